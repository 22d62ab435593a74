package attempt

import (
	"context"
	"net/http"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/retained"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// attempt is one placement of an exchange and what its legs have done. Once prefill has
// registered the disagg id, no step of the attempt changes it: a retry is another attempt
// with another id. The goroutine of the exchange owns it. The goroutine of a concurrent
// prefill leg only reads what does not change meanwhile, and hands over a prefillResult.
type attempt struct {
	env     *Env
	p       *coordinator.Placement
	conn    connector.Connector
	c       connector.Attempt
	orphan  connector.Orphan
	prefill prefillResult
	legBody *buffer.Buffer // body of the leg that answers the client
	pair    *engine.Pair   // of the two targets; nil with one leg
	fresh   bool           // nothing had come over the pair when the attempt began

	began    decodeState                // of the decode engine when the attempt began
	deadline time.Time                  // for the client's first byte, by the plan policy; zero: none
	edits    [abi.Encode + 1][]abi.Edit // of header lines, by phase
	turn     *retained.KV               // that prefill pulls; nil: none
	both     concurrent                 // of both legs, if they run at the same time
	hook     HookAnswer                 // for the leg that failed last
}

// decodeState is the state of a decode engine at one moment.
type decodeState struct {
	restarts uint32
	forced   bool // its circuit was open: the leg is a trial
}

// prefillResult is what the prefill leg has left.
type prefillResult struct {
	answer  *buffer.Buffer     // the whole answer; nil: none
	handoff connector.Handoff  // refers to answer
	handed  time.Time          // when decode could begin; zero: decode did not wait for prefill
	left    *upstream.Detached // the leg, if it was given up and may yet be answered; nil: it was not

	begun    bool        // the leg counts as a try
	sent     bool        // the leg may have reached the engine
	done     bool        // answer is whole
	read     bool        // handoff is valid
	rejected bool        // the engine answered with an error status
	late     *time.Timer // of a concurrent leg: ends decode if the KV does not come over; nil: none
	err      error
}

// chooseFlow chooses the order of the legs if the connector has several.
func (a *attempt) chooseFlow() {
	if o, ok := a.conn.(connector.Ordered); ok && !a.p.Prefill.IsZero() {
		var fallback string
		if a.p.Flow, fallback = o.Order(&a.c, a.env.Config.Retry.ScheduleStyle); fallback != "" {
			a.p.Fallbacks = append(a.p.Fallbacks, coordinator.Fallback{What: "schedule_style", Reason: fallback})
		}
	}
	a.c.Flow = a.p.Flow
}

// end frees what a failed attempt left on the engines, releases the lease and gives the
// buffers back. When it returns, a clean-up that must come before a retry has been made:
// the engines would otherwise meet the old attempt again.
func (a *attempt) end(err error) {
	if err != nil {
		a.cleanUp(err)
		a.giveUpTurn(err)
	}
	if a.prefill.left != nil { // decode has what prefill's answer would say
		a.prefill.left.Close()
	}
	a.p.Lease.Release()
	a.leavePair()
	a.prefill.answer.Free()
	a.legBody.Free()
	a.prefill = prefillResult{}
}

// joinPair notes that the attempt begins on its pair of targets.
func (a *attempt) joinPair() {
	if !a.p.Prefill.IsZero() {
		a.pair = a.env.Registry.Pair(a.p.Prefill, a.p.Decode)
		a.fresh = a.pair.Begin()
	}
}

func (a *attempt) leavePair() {
	if a.fresh {
		a.pair.End()
	}
	a.pair, a.fresh = nil, false
}

// isConcurrent reports whether prefill's answer does not shape the decode leg, so that both
// legs run at the same time.
func (a *attempt) isConcurrent() bool {
	return a.p.Flow == abi.FlowConcurrent || a.p.Flow == abi.FlowDecodeFirst
}

// releaseRequest gives back what an open stream does not need any more: the request as it
// came and as it was sent, and prefill's answer.
func (a *attempt) releaseRequest() {
	a.env.ReleaseBody()
	a.legBody.Free()
	a.legBody = nil
	if !a.isConcurrent() { // a concurrent prefill may only now be answering
		a.prefill.answer.Free()
		a.prefill.answer, a.prefill.handoff, a.orphan.Handoff = nil, connector.Handoff{}, nil
	}
}

// aggregated sends one leg to an engine that serves both phases.
func (a *attempt) aggregated() error {
	body, err := a.bodyBuffer()
	if err != nil {
		return err
	}
	shaped, err := a.conn.Aggregated(&a.c, body)
	if err != nil {
		return err
	}
	return a.answerLeg(a.env.Context, shaped)
}

// runPrefill sends the prefill leg and reads its answer into r. Only the caller may read r
// until runPrefill has returned.
func (a *attempt) runPrefill(ctx context.Context, shaped connector.Leg, r *prefillResult) {
	r.sent = true
	if r.err = a.prefillLeg(ctx, shaped, r); r.err != nil {
		r.sent, r.rejected = maybeSent(r.err), answeredWithError(r.err)
		return
	}
	r.read = true
	a.reportCached(r.answer.B)
	a.countFallback(&r.handoff)
	if ctx.Err() != nil { // the answer came while the client was leaving
		r.err = context.Cause(ctx)
	}
}

// prefillEnded takes over what prefill has left.
func (a *attempt) prefillEnded(r prefillResult) {
	a.prefill = r
	a.orphan.PrefillSent, a.orphan.PrefillDone, a.orphan.Refused = r.sent, r.done, r.rejected
	if r.read {
		a.orphan.Handoff = &a.prefill.handoff
	}
	if r.begun {
		a.env.tries[abi.Prefill]++
	}
}

// shapePrefill returns the prefill leg and the buffer that holds its body.
func (a *attempt) shapePrefill() (connector.Leg, *buffer.Buffer, error) {
	body, err := a.env.Client.Buffer(len(a.env.Client.Body()) + legSlack)
	if err != nil {
		return connector.Leg{}, nil, err
	}
	done := false
	defer func() { // also after a panic
		if !done {
			body.Free()
		}
	}()
	shaped, err := a.conn.Prefill(&a.c, body.B)
	if err != nil {
		return shaped, nil, err
	}
	if shaped.Alias { // an open stream gives the client's body back while the leg may still be sent
		body.Free()
		body = a.env.Client.HoldBody()
	} else {
		body.Set(shaped.Body)
	}
	if a.env.Hooks != nil {
		if shaped, err = a.edited(abi.Prefill, shaped, &body); err != nil {
			return shaped, nil, err
		}
	}
	done = true
	return shaped, body, nil
}

// reportCached tells the coordinator how many tokens of the prompt the engine had cached, by
// its answer, so that the coordinator can compare that with what it believed.
func (a *attempt) reportCached(answer []byte) {
	if a.p.Matched < 0 {
		return
	}
	if u, ok := openai.ParseUsage(answer); ok && u.Cached >= 0 && u.Prompt > 0 {
		a.env.Coordinator.Computed(a.p, &a.env.Ask.Key, u.Prompt, u.Cached)
	}
}

// countFallback counts that decode works without the transferred KV, if it does.
func (a *attempt) countFallback(h *connector.Handoff) {
	reason := h.Fallback
	if reason == "" {
		return
	}
	a.env.Journal.Fallback("kv_transfer", reason)
	if reason == connector.ForeignHost {
		a.env.warnForeign(a.p.Prefill)
	}
}

// bodyBuffer returns an empty slice to append the body to of the leg that answers the
// client; legBody owns it.
func (a *attempt) bodyBuffer() (b []byte, err error) {
	if a.legBody == nil {
		if a.legBody, err = a.env.Client.Buffer(len(a.env.Client.Body()) + legSlack); err != nil {
			return nil, err
		}
	}
	return a.legBody.B[:0], nil
}

// legSlack is the room, in bytes, that a connector's own fields usually need.
const legSlack = 2 << 10

// replyHandoff answers with prefill's answer, which was the whole text.
func (a *attempt) replyHandoff() error {
	env := a.env
	env.Journal.FirstByte(nil)
	if u, ok := openai.ParseUsage(a.prefill.answer.B); ok {
		env.Journal.Used(u)
	}
	h := env.Client.AnswerHeader()
	h.Set("Content-Type", "application/json")
	if env.Request.Stream {
		h.Set("Content-Type", "text/event-stream")
	} else {
		a.tellTiming()
	}
	return env.Answer(http.StatusOK, a.prefill.handoff.Answer)
}
