package proxy

import (
	"context"
	"errors"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/retained"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// attempt is one placement of an exchange and what its legs have done. Once
// prefill has registered the disagg id, no step of the attempt changes it: a
// retry is another attempt with another id. The exchange's goroutine owns it.
type attempt struct {
	x       *exchange
	p       *coordinator.Placement
	conn    connector.Connector
	c       connector.Attempt
	orphan  connector.Orphan
	handoff connector.Handoff
	answer  *buffer.Buffer // prefill's answer; handoff aliases it
	verdict atomic.Uint32  // of concurrent legs: who settled the attempt first
	legBody *buffer.Buffer // body of the leg that answers the client
	pair    *engine.Pair   // of the two targets; nil with one leg
	fresh   bool           // nothing had come over it when the attempt began

	restarts uint32 // of the decode engine when the attempt began
	forced   bool   // decode was placed with an open circuit: as a trial

	// timed says that the engines have been asked how the legs went there.
	timed bool
	// timing is the row of the leg whose stream ends with that; nil: none does.
	timing *leg
	// decodeSent is closed when all of the decode leg has been sent, where prefill
	// waits for that; else nil.
	decodeSent chan struct{}
	// prefillOver is closed when the prefill leg beside decode's has ended, where
	// the client wants to know how it went; else nil.
	prefillOver chan struct{}

	handed   time.Time                  // when decode could begin; zero: not known
	readBy   time.Time                  // decode must have its leg by then to find prefill's blocks; zero: any time
	deadline time.Time                  // for the client's first byte, by the plan policy; zero: none
	limit    time.Duration              // of the wait for decode's first event
	kvBound  bool                       // it is that of the transfer
	late     *time.Timer                // ends concurrent legs whose KV does not come over
	edits    [abi.Encode + 1][]abi.Edit // of header lines, by phase
	merge    merge                      // of decode's answer with prefill's
	held     int                        // bytes of the budget for parts of events
	turn     *retained.KV               // that prefill pulls; nil: none
	left     *upstream.Detached         // of prefill's leg, if that was left and may yet be answered
}

// The verdicts of concurrent legs. Once decode has taken over it has the KV,
// and a failure of prefill's late answer no longer ends it.
const (
	decodeTook    = 1
	prefillFailed = 2
	kvLate        = 3 // prefill has answered, but decode has not got the KV in time
)

// reasonKVLate is the kind of failure of a transfer that did not come in time.
const reasonKVLate = "kv_timeout"

// reasonKVSilent is that of a leg whose KV is with an engine that has fallen silent.
const reasonKVSilent = "kv_silent"

// reasonKVLease is that of a leg that would have come when prefill's blocks are gone.
const reasonKVLease = "kv_lease"

var errKVLate = errors.New("the KV did not come over in time")

// kvLimit is how long decode may take, from when prefill has answered, until it
// has the prompt's KV and begins its stream. A whole answer begins when all of it
// is there, which says nothing of the KV: only timeouts.first_byte bounds it.
func (a *attempt) kvLimit() time.Duration {
	t := &a.x.cfg.Timeouts
	limit := t.Transfer
	if a.fresh {
		limit += t.Handshake
	}
	if d, ok := a.conn.(connector.Deferrer); ok && d.Defers() {
		limit += t.DeferredWrite
	}
	return time.Duration(limit)
}

// awaitKV ends decode, by cancel, if it has not got the KV in time. Prefill has
// answered, and its goroutine calls; the timer must be stopped.
func (a *attempt) awaitKV(cancel context.CancelCauseFunc) {
	if !a.x.req.Stream {
		return
	}
	late := &legError{phase: abi.Decode, target: a.p.Decode, reason: reasonKVLate, code: 504, sent: true, pair: a.pair, err: errKVLate}
	a.late = time.AfterFunc(a.kvLimit(), func() {
		if a.verdict.CompareAndSwap(0, kvLate) {
			cancel(late)
		}
	})
}

// run sends the legs in the order of the flow; nil means that the client has
// the whole answer.
func (a *attempt) run() error {
	if err := a.encode(); err != nil {
		return err
	}
	switch a.p.Flow {
	case abi.FlowPrefillFirst:
		return a.prefillFirst()
	case abi.FlowConcurrent, abi.FlowDecodeFirst:
		return a.concurrent()
	default:
		return a.aggregated()
	}
}

// order settles the order of the legs where the connector has several.
func (a *attempt) order() {
	if o, ok := a.conn.(connector.Ordered); ok && !a.p.Prefill.IsZero() {
		var fallback string
		if a.p.Flow, fallback = o.Order(&a.c, a.x.cfg.Retry.ScheduleStyle); fallback != "" {
			a.p.Fallbacks = append(a.p.Fallbacks, coordinator.Fallback{What: "schedule_style", Reason: fallback})
		}
	}
	a.c.Flow = a.p.Flow
}

// end frees what a failed attempt left on the engines, releases the lease and
// gives the buffers back. Clean-up that must come before a retry (the engines
// would meet the old attempt again) has been awaited when it returns.
func (a *attempt) end(err error) {
	if err != nil {
		a.cleanUp(err)
		a.giveUpTurn(err)
	}
	if a.left != nil { // decode has what it said
		a.left.Close()
	}
	a.p.Lease.Release()
	a.leavePair()
	a.answer.Free()
	a.legBody.Free()
	a.handoff = connector.Handoff{}
}

// joinPair notes that the attempt begins on its pair of targets.
func (a *attempt) joinPair() {
	if !a.p.Prefill.IsZero() {
		a.pair = a.x.s.deps.Registry.Pair(a.p.Prefill, a.p.Decode)
		a.fresh = a.pair.Begin()
	}
}

func (a *attempt) leavePair() {
	if a.fresh {
		a.pair.End()
	}
	a.pair, a.fresh = nil, false
}

// releaseRequest gives back what an open stream no longer needs: the request as
// it came and as it was sent, and prefill's answer.
func (a *attempt) releaseRequest() {
	a.x.releaseBody()
	a.legBody.Free()
	a.legBody = nil
	if !a.together() { // there it may only now be coming
		a.answer.Free()
		a.answer, a.handoff, a.orphan.Handoff = nil, connector.Handoff{}, nil
	}
}

// aggregated sends one leg to an engine that serves both phases.
func (a *attempt) aggregated() error {
	body, err := a.bodyBuffer()
	if err != nil {
		return err
	}
	leg, err := a.conn.Aggregated(&a.c, body)
	if err != nil {
		return err
	}
	return a.answerLeg(a.x.ctx, leg)
}

// prefillFirst waits for prefill's answer and lets it shape the decode leg. As
// long as no decode engine can have read the blocks, another decode gets them.
func (a *attempt) prefillFirst() error {
	a.pullTurn()
	leg, body, err := a.shapePrefill()
	if err != nil {
		return err
	}
	if err = a.prefillAlone(leg, body); err != nil {
		return err
	}
	a.setOrphanCleanup()
	a.handed = time.Now()
	a.noteLease()
	a.x.journal.PrefillDone()
	if a.handoff.Done {
		return a.replyHandoff()
	}
	a.pick()
	for {
		body, err := a.bodyBuffer()
		if err != nil {
			return err
		}
		leg, err := a.conn.Decode(&a.c, &a.handoff, body)
		if err != nil {
			return err
		}
		err = a.answerLeg(a.x.ctx, leg)
		if err == nil || downstream.OwnFault(err) || maybeSent(err) || connector.PinsDecode(a.conn) || a.leaseOver() {
			return err
		}
		if a.judge(err); afresh(err) || !a.moveDecode(err) {
			return err
		}
	}
}

// prefillAlone runs the prefill leg, whose body nobody needs afterwards.
func (a *attempt) prefillAlone(leg connector.Leg, body *buffer.Buffer) error {
	defer body.Free()
	return a.prefill(a.x.ctx, leg)
}

// noteLease sets readBy. Half of prefill's lease is decode's, to meet prefill and to
// renew it.
func (a *attempt) noteLease() {
	a.readBy = time.Time{}
	if lease := a.handoff.Lease; lease > 0 {
		a.readBy = a.handed.Add(lease / 2)
	}
}

// leaseOver reports that decode must not be sent to prefill's blocks any more.
func (a *attempt) leaseOver() bool { return !a.readBy.IsZero() && !time.Now().Before(a.readBy) }

// afresh reports whether the leg hook wants another attempt, or none, instead of
// another decode for the same blocks.
func afresh(err error) bool {
	var le *legError
	return errors.As(err, &le) && (le.verdict == abi.LegRetry || le.verdict == abi.LegGiveUp)
}

// moveDecode places the decode leg, which failed with err, anew, with the
// prefill target and the disagg id as they are. False: it stays failed.
func (a *attempt) moveDecode(err error) bool {
	x := a.x
	x.exclude(err)
	x.route.Relax()
	p, placeErr := a.placeDecode()
	if placeErr != nil {
		return false
	}
	if !x.mayRetry(err) {
		p.Lease.Release()
		return false
	}
	a.move(p)
	return true
}

// placeDecode asks for another decode target for the prefill target and the
// disagg id that there are.
func (a *attempt) placeDecode() (*coordinator.Placement, error) {
	ask := &a.x.ask
	ask.Prefill, ask.ID = a.p.Prefill, a.p.ID
	p, err := a.x.s.deps.Coordinator.Place(a.x.ctx, ask)
	ask.Prefill, ask.ID = engine.Target{}, 0
	return p, err
}

// move makes p, which differs in the decode target, the attempt's placement. Where
// prefill's answer sends decode may be right for the one and foreign to the other:
// it is judged again.
func (a *attempt) move(p *coordinator.Placement) {
	a.p.Lease.Release()
	a.leavePair()
	a.p, a.c.Decode = p, p.Decode
	a.restarts = p.Decode.Restarts()
	before := a.handoff.Fallback
	if h, err := a.conn.ReadPrefill(&a.c, a.answer.B); err == nil { // as it was the first time
		if a.handoff = h; h.Fallback != before {
			a.countFallback()
		}
		a.noteLease()
	}
	a.joinPair()
	a.x.placed(p)
	a.setOrphanCleanup()
}

// shapePrefill returns the prefill leg and the buffer that holds its body.
func (a *attempt) shapePrefill() (connector.Leg, *buffer.Buffer, error) {
	body, err := a.x.client.Buffer(len(a.x.client.Body()) + legSlack)
	if err != nil {
		return connector.Leg{}, nil, err
	}
	shaped := false
	defer func() { // also after a panic
		if !shaped {
			body.Free()
		}
	}()
	leg, err := a.conn.Prefill(&a.c, body.B)
	if err != nil {
		return leg, nil, err
	}
	if leg.Alias { // an open stream gives the client's body back while the leg may still be sent
		body.Free()
		body = a.x.client.HoldBody()
	} else {
		body.Set(leg.Body)
	}
	if a.x.legPolicy != nil {
		if leg, err = a.edited(abi.Prefill, leg, &body); err != nil {
			return leg, nil, err
		}
	}
	shaped = true
	return leg, body, nil
}

// computed compares what was believed of the engine that computed the prompt with
// what its answer says.
func (a *attempt) computed(answer []byte) {
	if a.p.Matched < 0 {
		return
	}
	if u, ok := openai.ParseUsage(answer); ok && u.Cached >= 0 && u.Prompt > 0 {
		a.x.s.deps.Coordinator.Computed(a.p, &a.x.ask.Key, u.Prompt, u.Cached)
	}
}

// prefill sends the prefill leg and reads its whole answer into the handoff.
func (a *attempt) prefill(ctx context.Context, leg connector.Leg) error {
	a.orphan.PrefillSent = true
	if err := a.prefillLeg(ctx, leg); err != nil {
		a.orphan.PrefillSent, a.orphan.Refused = maybeSent(err), refused(err)
		return err
	}
	a.orphan.Handoff = &a.handoff
	a.computed(a.answer.B)
	a.countFallback()
	if ctx.Err() != nil { // the answer came while the client was leaving
		return context.Cause(ctx)
	}
	return nil
}

// countFallback counts that decode works without the transferred KV, if it does.
func (a *attempt) countFallback() {
	reason := a.handoff.Fallback
	if reason == "" {
		return
	}
	a.x.journal.Fallback("kv_transfer", reason)
	if reason == connector.ForeignHost {
		a.x.s.sayForeign(a.p.Prefill)
	}
}

// maybeSent reports whether a failed leg may have reached its engine.
func maybeSent(err error) bool {
	var le *legError
	if errors.As(err, &le) {
		return le.sent
	}
	return !errors.Is(err, coordinator.ErrNoTarget)
}

// refused reports whether the engine answered a failed leg with an error status.
func refused(err error) bool {
	var le *legError
	return errors.As(err, &le) && le.status != 0
}

// bodyBuffer returns an empty slice to append the body to of the leg that answers
// the client; legBody owns it.
func (a *attempt) bodyBuffer() (b []byte, err error) {
	if a.legBody == nil {
		if a.legBody, err = a.x.client.Buffer(len(a.x.client.Body()) + legSlack); err != nil {
			return nil, err
		}
	}
	return a.legBody.B[:0], nil
}

// legSlack is the room that a connector's own fields usually need.
const legSlack = 2 << 10

// pick lets the picker of a sidecar choose decode for a prefill that has answered.
// Without a usable answer decode stays the engine of the place policy.
func (a *attempt) pick() {
	x := a.x
	if !x.route.Pick(a.p.Decode.Instance) {
		return
	}
	p, err := a.placeDecode()
	if err != nil {
		x.route.DropPick()
		return
	}
	a.move(p)
}

// replyHandoff answers with prefill's answer, which was the whole text.
func (a *attempt) replyHandoff() error {
	x := a.x
	x.journal.FirstByte(nil)
	if u, ok := openai.ParseUsage(a.answer.B); ok {
		x.journal.Used(u)
	}
	h := x.client.AnswerHeader()
	h.Set("Content-Type", "application/json")
	if x.req.Stream {
		h.Set("Content-Type", "text/event-stream")
	} else {
		a.tellTiming()
	}
	return x.writeWhole(http.StatusOK, a.handoff.Answer)
}
