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

// attempt is the state of one placement of an exchange and of its legs. An attempt never
// changes its disagg id, because prefill registers the id: a retry is another attempt with
// another id. The goroutine of the exchange owns the attempt. The goroutine of a concurrent
// prefill leg reads only fields that do not change meanwhile, and returns a prefillResult.
type attempt struct {
	env     *Env
	p       *coordinator.Placement
	conn    connector.Connector
	c       connector.Attempt
	owed    owed
	prefill prefillAnswer
	pair    *engine.Pair // the pair of the two targets; nil with one leg
	trial   bool         // the circuit of the pair was not closed when the attempt began
	fresh   bool         // no transfer of the pair had succeeded when the attempt began

	began    decodeState                // the state of the decode engine when the attempt began
	deadline time.Time                  // the plan policy's deadline for the client's first byte; zero: none
	edits    [abi.Encode + 1][]abi.Edit // the leg hook's edits of header lines, by phase
	both     concurrentLegs             // the state of both legs, if they run at the same time
	hook     HookAnswer                 // the decision about the leg that failed last

	needs       Need         // what the attempt waits for
	failed      error        // the failure with which it waits; nil: none
	observation *observation // of the gateway that sends the request; nil until it must wait
}

// decodeState is the state of a decode engine at one moment.
type decodeState struct {
	restarts uint32
	forced   bool // the circuit of the engine was open: the leg is a trial
}

// owed is the record of everything that an attempt may still have to free, beside the lease of its
// placement. end and the clean-up read only this record.
type owed struct {
	connector.Orphan                    // what the legs may have left on the engines
	registered       bool               // the coordinator has the clean-up for the time until prefill has answered; constant while concurrent legs run
	late             *upstream.Detached // the prefill leg, if the proxy gave it up and the engine may still answer it; else nil
	turn             *retained.KV       // the KV of the previous turn that prefill pulls; nil: none
	legBody          *buffer.Buffer     // of the leg that answers the client; nil: none
}

// prefillAnswer is what prefill has answered.
type prefillAnswer struct {
	answer  *buffer.Buffer    // the whole answer; nil: none
	handoff connector.Handoff // refers to answer
	handed  time.Time         // when decode could begin; zero: decode did not wait for prefill
	expiry  *time.Timer       // ends a concurrent decode leg if the KV does not arrive in time; nil: none
	err     error
}

// prefillResult is the result of the prefill leg.
type prefillResult struct {
	prefillAnswer
	begun    bool               // the leg counts as a try
	sent     bool               // the leg may have reached the engine
	done     bool               // answer is whole
	read     bool               // handoff is valid
	rejected bool               // the engine answered with an error status
	left     *upstream.Detached // as owed.late
}

// joinPair counts the attempt on the pair of its two targets.
func (a *attempt) joinPair() {
	if !a.p.Prefill.IsZero() {
		a.pair = a.env.Registry.Pair(a.p.Prefill, a.p.Decode)
		a.trial = a.pair.Trial()
		a.fresh = a.pair.Begin()
	}
}

func (a *attempt) leavePair() {
	if a.fresh {
		a.pair.End()
	}
	a.pair, a.fresh, a.trial = nil, false, false
}

// isConcurrent reports whether prefill's answer does not shape the decode leg, so that both
// legs run at the same time.
func (a *attempt) isConcurrent() bool {
	return a.p.Flow == abi.FlowConcurrent || a.p.Flow == abi.FlowDecodeFirst
}

// releaseRequest frees the memory that an open stream does not need: the client's request, the
// body of the leg, and prefill's answer.
func (a *attempt) releaseRequest() {
	a.env.ReleaseBody()
	a.owed.legBody.Free()
	a.owed.legBody = nil
	if !a.isConcurrent() { // a concurrent prefill may answer later
		a.prefill.answer.Free()
		a.prefill.answer, a.prefill.handoff, a.owed.Handoff = nil, connector.Handoff{}, nil
	}
}

// prefillEnded stores the result of the prefill leg.
func (a *attempt) prefillEnded(r prefillResult) {
	a.prefill = r.prefillAnswer
	a.owed.PrefillSent, a.owed.PrefillDone, a.owed.Refused, a.owed.late = r.sent, r.done, r.rejected, r.left
	if r.read {
		a.owed.Handoff = &a.prefill.handoff
	}
	a.env.reached = a.env.reached || r.sent
	if r.begun {
		a.env.tries[abi.Prefill]++
	}
}

// reportCached reports to the coordinator how many tokens of the prompt the engine had cached,
// according to the engine's answer. The coordinator compares the number with its prediction.
func (a *attempt) reportCached(answer []byte) {
	if a.p.Matched < 0 {
		return
	}
	if u, ok := openai.ParseUsage(answer); ok && u.Cached >= 0 && u.Prompt > 0 {
		a.env.Coordinator.Computed(a.p, &a.env.Ask.Key, u.Prompt, u.Cached)
	}
}

// legSlack is the space in bytes that the fields of a connector usually need.
const legSlack = 2 << 10

// concurrentLegs is the state of two legs that run at the same time. The zero value belongs to
// an attempt whose legs do not.
type concurrentLegs struct {
	winner  atomic.Uint32      // the event that decided the attempt first: one of the constants below, 0: none yet
	sent    chan struct{}      // closed when all of the decode leg has been sent, if prefill waits for that; else nil
	prefill chan prefillResult // gets one result, when the prefill leg has ended
	over    bool               // the result has been taken; the goroutine of the exchange owns it
	opened  atomic.Bool        // decode has opened its answer, so it does not wait for the KV any more
	merger  connector.Merger   // completes decode's answer with prefill's answer; nil: not needed
	merged  []byte             // memory for merged events
}

// The events that decide concurrent legs. After decodeTook decode has the KV, and a failure of
// prefill no longer ends decode, unless it belies decode's answer.
const (
	decodeTook    = 1
	prefillFailed = 2
	kvLate        = 3 // prefill has answered, but decode has not got the KV in time
)

// runs reports whether the legs run at the same time.
func (c *concurrentLegs) runs() bool { return c.prefill != nil }

// takePrefill stores the result of a concurrent prefill leg.
func (a *attempt) takePrefill(r prefillResult) {
	a.both.over = true
	a.prefillEnded(r)
}
