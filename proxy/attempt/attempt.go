package attempt

import (
	"sync/atomic"
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
	both     concurrentLegs             // of both legs, if they run at the same time
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

// concurrentLegs is the state of two legs that run at the same time. The zero value is that of an
// attempt whose legs do not.
type concurrentLegs struct {
	winner  atomic.Uint32      // what settled the attempt first: one of the constants below
	sent    chan struct{}      // closed when all of the decode leg has been sent, if prefill waits for that; else nil
	prefill chan prefillResult // gets one result, when the prefill leg has ended
	over    bool               // the result has been taken; the goroutine of the exchange owns it
	merger  connector.Merger   // completes decode's answer from prefill's; nil: nothing does
	merged  []byte             // memory of merged events
}

// What settles concurrent legs. Once decode has taken over it has the KV, and a failure of
// prefill's late answer does not end decode any more.
const (
	decodeTook    = 1
	prefillFailed = 2
	kvLate        = 3 // prefill has answered, but decode has not got the KV in time
)

// runs reports whether the legs run at the same time.
func (c *concurrentLegs) runs() bool { return c.prefill != nil }

// takePrefill takes over the result of the prefill leg.
func (a *attempt) takePrefill(r prefillResult) {
	a.both.over = true
	a.prefillEnded(r)
}
