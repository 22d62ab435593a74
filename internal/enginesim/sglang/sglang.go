package sglang

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// Disaggregation modes, as /server_info names them.
const (
	modeNull    = "null"
	modePrefill = "prefill"
	modeDecode  = "decode"
)

// fakeBootstrapHost marks a transfer that moves no KV (health requests).
const fakeBootstrapHost = "2.2.2.2"

// RouteGenerate is SGLang's native route.
const RouteGenerate = "/generate"

// SGLang is the SGLang engine. The prefill and decode legs of one request run
// at the same time and find each other by the bootstrap room. Decode gets the
// prefill's ranks from the bootstrap registry (sglang_bootstrap.go), reserves
// its blocks and sends their indices to the prefill's rank. Only then prefill
// computes. It pushes the KV with the first token, and answers after the
// transfer.
type SGLang struct {
	sglangDialect
	e    *core.Engine
	cfg  core.SGLangConfig
	mode string
	Boot *bootstrapRegistry // prefill only

	loadsAt string // where rank 0 publishes its load
	born    time.Time
	startup time.Duration // from born until the engine served

	http http.Client // decode's calls to bootstrap registries

	// Queues count the sequences of a rank in each of the PD queues.
	Queues []sglangQueues

	Mu sync.Mutex
	// live are the legs in flight, by rid.
	live map[string]*sglangLeg
	// Rooms are prefill's rooms: with legs, with decode's indices, or both.
	Rooms map[int64]*sglangRoom
	// receivers are decode's legs that wait for KV. Of two legs with one room,
	// the newer one is here.
	receivers map[int64]*sglangReceiver
	// Prefills are the prefill engines that decode knows, by bootstrap address.
	Prefills map[string]*sglangPrefill
}

// sglangQueues are the lengths of one rank's PD queues, and its last transfer.
type sglangQueues struct {
	Bootstrap, inflight, Prealloc, transfer atomic.Int64
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

func New(e *core.Engine) *SGLang {
	g := &SGLang{
		e: e, cfg: e.Cfg.SGLang, mode: modeNull, born: time.Now(),
		Queues: make([]sglangQueues, e.Cfg.Ranks),
		live:   make(map[string]*sglangLeg), Rooms: make(map[int64]*sglangRoom),
		receivers: make(map[int64]*sglangReceiver), Prefills: make(map[string]*sglangPrefill),
	}
	switch e.Cfg.Role {
	case core.RolePrefill:
		g.mode, g.Boot = modePrefill, newBootstrapRegistry(g)
	case core.RoleDecode:
		g.mode = modeDecode
		g.http.Transport = &http.Transport{DisableKeepAlives: true}
	}
	e.Publishers = core.NewPublishers(e, core.SGLangWire, true)
	if e.Publishers != nil && g.mode != modeDecode { // decode's chunk cache has no events
		e.LogKV(e.Publishers, core.SGLangNaming{}, false)
	}
	return g
}

func (g *SGLang) Start() error {
	g.startup = time.Since(g.born)
	if err := g.startLoads(); err != nil {
		return err
	}
	switch g.mode {
	case modePrefill:
		return g.Boot.Start()
	case modeDecode:
		g.e.Spawn(g.heartbeat)
	}
	return nil
}

func (g *SGLang) Generate(ctx context.Context, s *core.Sequence, emit func(core.Token)) error {
	ext := s.Req.Ext.(*SGLangRequest)
	if ext.refusal != nil {
		return ext.refusal
	}
	item := ext.Items[s.Choice]
	s.ID = item.rid
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	leg := &sglangLeg{sglangItem: item, cancel: cancel}
	err := g.run(ctx, s, leg, emit)
	var refusal *core.APIError
	if errors.As(err, &refusal) && refusal.Status == http.StatusBadRequest && s.Req.Route == RouteGenerate {
		return &core.APIError{Status: refusal.Status, Type: nativeError, Message: refusal.Message}
	}
	if refusal != nil && typed(s.Req.Route) {
		return typedFailure(s.Req, refusal)
	}
	return err
}

// run runs a leg in the engine's mode.
func (g *SGLang) run(ctx context.Context, s *core.Sequence, leg *sglangLeg, emit func(core.Token)) error {
	if !g.enter(leg) {
		return g.duplicateID(leg.rid)
	}
	defer g.leave(leg)
	if g.mode != modeNull && !leg.hasRoom {
		return core.BadRequest("", "Invalid request: Disaggregated request received without bootstrap room id. req.rid='%s'", leg.rid)
	}
	switch g.mode {
	case modePrefill:
		return g.prefill(ctx, s, leg, emit)
	case modeDecode:
		return g.decode(ctx, s, leg, emit)
	}
	s.Rank = g.e.PickRank(s.Req.Rank)
	defer s.Rank.Release(s)
	err := s.Rank.Reserve(ctx, s, core.Room(s), true)
	if err == nil {
		err = s.Rank.Prefill(ctx, s)
	}
	if err == nil {
		err = s.Rank.Decode(ctx, s, emit)
	}
	return g.ended(s, err, emit)
}

// ended turns the end of a running sequence by /abort_request into an answer of
// status 200 whose finish reason is "abort". It returns other errors unchanged.
func (g *SGLang) ended(s *core.Sequence, err error, emit func(core.Token)) error {
	if !errors.Is(err, errAbortReq) {
		return err
	}
	g.e.Stats.Aborted.Add(1)
	s.Finish = "abort"
	emit(0)
	return nil
}

// enter registers a leg under its rid; false when the rid is in flight.
func (g *SGLang) enter(leg *sglangLeg) bool {
	g.Mu.Lock()
	defer g.Mu.Unlock()
	if g.live[leg.rid] != nil {
		g.e.Stats.DuplicateIDs.Add(1)
		return false
	}
	g.live[leg.rid] = leg
	return true
}

func (g *SGLang) leave(leg *sglangLeg) {
	g.Mu.Lock()
	defer g.Mu.Unlock()
	delete(g.live, leg.rid)
}

func (g *SGLang) InFlight(rid string) bool {
	g.Mu.Lock()
	defer g.Mu.Unlock()
	return g.live[rid] != nil
}

func (g *SGLang) duplicateID(rid string) *core.APIError {
	return core.BadRequest("rid", "Duplicate request ID detected: %s", rid)
}

// abort answers POST /abort_request. The HTTP process knows only whole rids and
// drops an unknown one. The scheduler behind it matches prefixes, so a rid that
// is a prefix of others ends them too.
func (g *SGLang) abort(w http.ResponseWriter, r *http.Request) {
	body, err := core.ReadBody(w, r)
	if err != nil {
		return
	}
	f, ferr := core.DecodeFields(body)
	p := core.FieldReader{F: f, Err: ferr}
	rid, all := p.Str("rid", ""), p.Boolean("abort_all")
	if p.Err != nil {
		refusal := sglangFieldError(core.RouteCompletions, p.Err)
		core.WriteJSON(w, refusal.Status, g.ErrorBody(refusal))
		return
	}
	g.Mu.Lock()
	defer g.Mu.Unlock()
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
func kvError(phase string, leg *sglangLeg, reason string) *core.APIError {
	req := "req"
	if phase == phaseDecodeHandshake || phase == phaseDecodeTransfer {
		req = "decode_req.req"
	}
	return &core.APIError{Status: http.StatusInternalServerError, Type: "500", Message: fmt.Sprintf(
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
func (g *SGLang) interrupted(ctx context.Context, phase string, leg *sglangLeg) error {
	cause := context.Cause(ctx)
	var failure *transferFailure
	switch {
	case errors.Is(cause, errAbortReq):
		g.e.Stats.Aborted.Add(1)
	case errors.As(cause, &failure):
	default:
		return cause
	}
	return kvError(phase, leg, cause.Error())
}
