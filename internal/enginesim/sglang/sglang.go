package enginesim

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
)

// Disaggregation modes, as /server_info names them.
const (
	modeNull    = "null"
	modePrefill = "prefill"
	modeDecode  = "decode"
)

// fakeBootstrapHost marks a transfer that moves no KV (health requests).
const fakeBootstrapHost = "2.2.2.2"

// routeGenerate is SGLang's native route.
const routeGenerate = "/generate"

// sglang is the SGLang engine. The prefill and decode legs of one request run
// at the same time and find each other by the bootstrap room. Decode gets the
// prefill's ranks from the bootstrap registry (sglang_bootstrap.go), reserves
// its blocks and sends their indices to the prefill's rank. Only then prefill
// computes. It pushes the KV with the first token, and answers after the
// transfer.
type sglang struct {
	sglangDialect
	e    *Engine
	cfg  SGLangConfig
	mode string
	boot *bootstrapRegistry // prefill only

	http http.Client // decode's calls to bootstrap registries

	// queues count the sequences of a rank in each of the PD queues.
	queues []sglangQueues

	mu sync.Mutex
	// live are the legs in flight, by rid.
	live map[string]*sglangLeg
	// rooms are prefill's rooms: with legs, with decode's indices, or both.
	rooms map[int64]*sglangRoom
	// receivers are decode's legs that wait for KV. Of two legs with one room,
	// the newer one is here.
	receivers map[int64]*sglangReceiver
	// prefills are the prefill engines that decode knows, by bootstrap address.
	prefills map[string]*sglangPrefill
}

// sglangQueues are the lengths of one rank's PD queues, and its last transfer.
type sglangQueues struct {
	bootstrap, inflight, prealloc, transfer atomic.Int64
	// ready counts the sequences in prealloc that wait only for memory.
	ready atomic.Int64
	// movedBytes and movedIn are the size of prefill's last KV transfer and its
	// duration in nanoseconds.
	movedBytes, movedIn atomic.Int64
}

// sglangLeg is one sequence in flight.
type sglangLeg struct {
	sglangItem
	// cancel ends the leg; its cause is errAbortReq or a *transferFailure.
	cancel context.CancelCauseFunc
}

// errAbortReq is the cause of legs that /abort_request ended, with SGLang's text.
var errAbortReq = errors.New("Aborted by AbortReq.") //lint:ignore ST1005 the engine says so

// transferFailure is the cause of legs whose KV transfer failed elsewhere.
type transferFailure struct{ reason string }

func (f *transferFailure) Error() string { return f.reason }

func newSGLang(e *Engine) *sglang {
	g := &sglang{
		e: e, cfg: e.cfg.SGLang, mode: modeNull,
		queues: make([]sglangQueues, e.cfg.Ranks),
		live:   make(map[string]*sglangLeg), rooms: make(map[int64]*sglangRoom),
		receivers: make(map[int64]*sglangReceiver), prefills: make(map[string]*sglangPrefill),
	}
	switch e.cfg.Role {
	case RolePrefill:
		g.mode, g.boot = modePrefill, newBootstrapRegistry(g)
	case RoleDecode:
		g.mode = modeDecode
		g.http.Transport = &http.Transport{DisableKeepAlives: true}
	}
	e.publishers = newPublishers(e, sglangWire, true)
	if e.publishers != nil && g.mode != modeDecode { // decode's chunk cache has no events
		e.logKV(e.publishers, sglangNaming{}, false)
	}
	return g
}

func (g *sglang) start() error {
	switch g.mode {
	case modePrefill:
		return g.boot.start()
	case modeDecode:
		g.e.spawn(g.heartbeat)
	}
	return nil
}

func (g *sglang) generate(ctx context.Context, s *sequence, emit func(token)) error {
	item := s.req.Ext.(*sglangRequest).items[s.choice]
	s.id = item.rid
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	leg := &sglangLeg{sglangItem: item, cancel: cancel}
	err := g.run(ctx, s, leg, emit)
	var refusal *apiError
	if errors.As(err, &refusal) && refusal.Status == http.StatusBadRequest && s.req.Route == routeGenerate {
		return &apiError{Status: refusal.Status, Type: nativeError, Message: refusal.Message}
	}
	return err
}

// run runs a leg in the engine's mode.
func (g *sglang) run(ctx context.Context, s *sequence, leg *sglangLeg, emit func(token)) error {
	if !g.enter(leg) {
		return g.duplicateID(leg.rid)
	}
	defer g.leave(leg)
	if g.mode != modeNull && !leg.hasRoom {
		return badRequest("", "Invalid request: Disaggregated request received without bootstrap room id. req.rid='%s'", leg.rid)
	}
	switch g.mode {
	case modePrefill:
		return g.prefill(ctx, s, leg, emit)
	case modeDecode:
		return g.decode(ctx, s, leg, emit)
	}
	s.rank = g.e.pickRank(s.req.Rank)
	defer s.rank.release(s)
	err := s.rank.reserve(ctx, s, room(s), true)
	if err == nil {
		err = s.rank.prefill(ctx, s)
	}
	if err == nil {
		err = s.rank.decode(ctx, s, emit)
	}
	return g.ended(s, err, emit)
}

// ended turns the end of a running sequence by /abort_request into an answer of
// status 200 whose finish reason is "abort". It returns other errors unchanged.
func (g *sglang) ended(s *sequence, err error, emit func(token)) error {
	if !errors.Is(err, errAbortReq) {
		return err
	}
	g.e.stats.aborted.Add(1)
	s.finish = "abort"
	emit(0)
	return nil
}

// enter registers a leg under its rid; false when the rid is in flight.
func (g *sglang) enter(leg *sglangLeg) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.live[leg.rid] != nil {
		g.e.stats.duplicateIDs.Add(1)
		return false
	}
	g.live[leg.rid] = leg
	return true
}

func (g *sglang) leave(leg *sglangLeg) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.live, leg.rid)
}

func (g *sglang) inFlight(rid string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.live[rid] != nil
}

func (g *sglang) duplicateID(rid string) *apiError {
	return badRequest("rid", "Duplicate request ID detected: %s", rid)
}

// abort answers POST /abort_request. The HTTP process knows only whole rids and
// drops an unknown one. The scheduler behind it matches prefixes, so a rid that
// is a prefix of others ends them too.
func (g *sglang) abort(w http.ResponseWriter, r *http.Request) {
	body, err := readBody(w, r)
	if err != nil {
		return
	}
	f, ferr := decodeFields(body)
	p := fieldReader{f: f, err: ferr}
	rid, all := p.str("rid", ""), p.boolean("abort_all")
	if p.err != nil {
		refusal := sglangFieldError(routeCompletions, p.err)
		writeJSON(w, refusal.Status, g.errorBody(refusal))
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !all && g.live[rid] == nil {
		return
	}
	for id, leg := range g.live {
		if all || strings.HasPrefix(id, rid) {
			leg.cancel(errAbortReq)
		}
	}
}

// kvError is the abort of a leg whose transfer failed in the named phase
// ("Prefill bootstrap", "Prefill transfer", "Decode handshake" or "Decode
// transfer"), with the engine's text.
func kvError(phase string, leg *sglangLeg, reason string) *apiError {
	req := "req"
	if phase == phaseDecodeHandshake || phase == phaseDecodeTransfer {
		req = "decode_req.req"
	}
	return &apiError{Status: http.StatusInternalServerError, Type: "500", Message: fmt.Sprintf(
		"%s failed for request rank=0 %s.rid='%s' %s.bootstrap_room=%d with exception KVTransferError(bootstrap_room=%d): %s",
		phase, req, leg.rid, req, leg.room, leg.room, reason)}
}

const (
	phasePrefillBootstrap = "Prefill bootstrap"
	phasePrefillTransfer  = "Prefill transfer"
	phaseDecodeHandshake  = "Decode handshake"
	phaseDecodeTransfer   = "Decode transfer"
)

// interrupted returns the error of a leg whose ctx ended in the named phase. An
// abort or a failed transfer becomes the engine's 500; the error of a client
// that left stays unchanged.
func (g *sglang) interrupted(ctx context.Context, phase string, leg *sglangLeg) error {
	cause := context.Cause(ctx)
	var failure *transferFailure
	switch {
	case errors.Is(cause, errAbortReq):
		g.e.stats.aborted.Add(1)
	case errors.As(cause, &failure):
	default:
		return cause
	}
	return kvError(phase, leg, cause.Error())
}
