package exchange

import (
	"bytes"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/continuation"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// HeaderContinue is the line by which a client declines the continuation of its stream: off.
const HeaderContinue = "X-Pdproxy-Continue"

// tailEvents is the number of a stream's last events among which its seam may lie, without those that
// a stop string may begin in.
const tailEvents = 16

// openStream is the stream of a request while it is kept, or that has broken off.
type openStream struct {
	kept   attempt.Kept        // env.Kept is nil unless it is used
	mode   string              // a value of retry.continue
	end    *attempt.Broken     // how the stream ends if no engine goes on; nil: it has not broken off
	count  int                 // how often it has broken off
	by     time.Time           // when an engine must have gone on
	reason continuation.Reason // why no engine goes on; "": one may

	asked    abi.RequestFacts // of the client's request; set with by
	deadline time.Time        // as asked
}

// resumes reports whether the next legs continue the stream; s may be nil.
func (s *openStream) resumes() bool { return s != nil && s.end != nil && s.reason == "" }

// keep decides, before a leg is sent to p, whether the stream of the request is kept: so that another
// engine can continue it, or so that its next turn can use the KV that decode retains. For a leg that
// continues a stream, it limits the time.
func (x *exchange) keep(p *coordinator.Placement) {
	s, cfg := x.stream, x.env.Config
	if s.resumes() {
		if left := time.Until(s.by); p.FirstByte == 0 || left < p.FirstByte {
			p.FirstByte = max(left, time.Millisecond)
		}
		return
	}
	mode, turn := config.ContinueOff, false
	if x.gateway == nil {
		turn = x.env.NamesTurn(p)
		if cfg.Retry.Continue != config.ContinueOff || x.journal.Requested != "" {
			mode = cfg.Continues(x.requested())
		}
	}
	if s != nil {
		s.kept.End() // of a leg that has failed before its content
	}
	if x.stream, x.env.Kept = nil, nil; mode == config.ContinueOff && !turn {
		return
	}
	d := dialectOf(p.Decode.Instance)
	s = &openStream{mode: mode}
	s.kept.Dialect, s.kept.Limit, s.kept.Moves = d, cfg.Retry.ContinueTokens, mode == config.ContinueOn
	s.kept.Given = continuation.Asked(&x.req) || x.req.API == openai.VLLMGenerate
	long := x.placing.ask.Request.PromptTokens > int64(cfg.Retry.ContinueTokens)
	switch {
	case mode == config.ContinueOff, strings.EqualFold(x.client.Header().Get(HeaderContinue), config.ContinueOff):
		s.reason = continuation.Off
	case long:
		s.reason = continuation.TooLong
	default:
		s.reason = continuation.Check(d, &x.req)
	}
	s.kept.Turn, s.kept.Reason = turn && !long, s.reason
	if x.stream = s; s.kept.Turn || s.reason == "" {
		x.env.Kept = &s.kept
	}
}

// dialectOf returns the kind of an engine. An engine of connector none may be any program: only the
// owner of its models tells.
func dialectOf(i *engine.Instance) tokens.Dialect {
	if i.Spec.Connector != config.ConnectorNone {
		return i.Tokenizes()
	}
	switch i.Facts().Owner {
	case "vllm":
		return tokens.VLLM
	case "sglang":
		return tokens.SGLang
	}
	return tokens.NoTokenizer
}

// resume makes the next placement continue a stream that has broken off. over: no engine goes on,
// and err is the end of the request; nil: the answer is complete.
func (x *exchange) resume(o *attempt.Outcome) (over bool, err error) {
	if x.stream == nil {
		x.stream = &openStream{mode: config.ContinueOff}
	}
	s := x.stream
	s.end = o.Broken
	s.count++
	var done bool
	if s.reason = x.mayResume(o); s.reason == "" {
		done, s.reason = x.begin()
	}
	if done {
		return true, nil
	}
	return s.reason != "", o.Err
}

// mayResume returns why no engine may continue the stream; "": one may.
func (x *exchange) mayResume(o *attempt.Outcome) continuation.Reason {
	s := x.stream
	var le *attempt.Error
	failed := errors.As(o.Err, &le)
	switch {
	case s.mode == config.ContinueOff:
		return continuation.Off
	case s.reason != "":
		return s.reason
	case s.kept.Reason != "":
		return s.kept.Reason
	case o.Broken.Final, !failed, x.env.Context.Err() != nil:
		return continuation.Refused
	case x.placing.route.Restricted && x.placing.route.CallerCoordinates():
		return continuation.NoEngine
	case le.Moved, leaves(le.Target):
		le.Reserved = true
		s.count-- // no failure
	case s.mode == config.ContinueDrain:
		return continuation.Off
	case s.count > x.env.Config.Retry.Attempts:
		return continuation.Attempts
	case le.Status == 0 && le.Code == http.StatusBadGateway && !x.another(le.Target):
		return continuation.NoEngine // a dead engine would not free the KV that prefill computes for it
	case s.count == 1: // the budget is for repeats
		le.Reserved = true
	}
	return ""
}

// another reports whether another engine than that of t could take the decode leg.
func (x *exchange) another(t engine.Target) bool {
	known := x.run.Registry.Snapshot()
	for tried := []engine.Target{t}; ; {
		peer := known.Peer(t, abi.Decode, tried)
		if peer.Instance != t.Instance {
			return !peer.IsZero()
		}
		tried = append(tried, peer)
	}
}

// leaves reports whether the engine of a target drains or has left.
func leaves(t engine.Target) bool { return t.State() == engine.Draining || t.Gone() }

// begin finds the seam of the stream and prepares the request that continues it. done: the answer is
// complete without one.
func (x *exchange) begin() (done bool, reason continuation.Reason) {
	k := x.env.Kept
	if !k.Load() {
		return false, k.Reason
	}
	var r openai.Request // the client's, without its prompt
	r.Memory = &x.client
	if err := openai.ParseRequest(x.req.API, k.Stub, &r); err != nil {
		return false, continuation.Refused
	}
	raw, all := k.Tail()
	tail := continuation.NewTail(k.Dialect, &r)
	var last []byte // event with a choice
	used := false   // the usage came behind it
	for len(raw) > 0 {
		n := openai.EventEnd(raw)
		if n == 0 {
			break
		}
		if e, ok := continuation.ReadEvent(raw[:n]); ok {
			tail.Events = append(tail.Events, e)
			last, used = raw[:n], false
		} else if bytes.Contains(raw[:n], usageMember) {
			used = true
		}
		raw = raw[n:]
	}
	if more := len(tail.Events) - tailEvents - tail.Stop; more > 0 {
		tail.Events, all = tail.Events[more:], false
	}
	if len(tail.Events) == 0 {
		return false, continuation.Seam
	}
	tail.First = all && !k.Continued()
	output := k.Output()
	if tail.Events[len(tail.Events)-1].Ended {
		if used {
			return x.complete(openai.AppendDone(nil), output)
		}
		return x.complete(continuation.Closing(nil, &r, last, true, k.Prompt, output), output)
	}
	var m continuation.Meeting
	if x.req.API != openai.VLLMGenerate { // a stream of tokens goes on behind its last one
		if m, reason = x.seam(&tail); reason != "" {
			return false, reason
		}
	}
	kept := output - m.Drop
	left := continuation.Left(&r, kept)
	if left == 0 {
		return x.complete(continuation.Closing(nil, &r, last, false, k.Prompt, output), output)
	}
	ids := k.IDs[:len(k.IDs)-m.Drop]
	if !x.rewrite(&r, ids, kept) {
		return false, continuation.Memory
	}
	s := &continuation.Splicer{Kept: int64(kept), Repeated: m.Repeated, Drop: m.Drop, Offset: tail.Offset(m)}
	s.ID, s.Created = continuation.Head(last)
	if !k.Resume(s, m.Drop) {
		return false, k.Reason
	}
	x.env.Resume()
	x.env.Models = nil // another model would be another answer
	ask := &x.placing.ask
	if x.stream.by.IsZero() {
		x.stream.asked, x.stream.deadline = ask.Request, ask.Deadline
	}
	x.stream.by = time.Now().Add(time.Duration(x.env.Config.Timeouts.StreamIdle))
	x.client.LimitWrites(time.Until(x.stream.by) + time.Duration(x.env.Config.Server.WriteTimeout))
	ask.Request.PromptTokens, ask.Request.MaxTokens = int64(len(ids)), left
	ask.Same, ask.Deadline = coordinator.Pair{}, x.stream.by
	x.placing.denied, x.placing.full = nil, nil
	return false, ""
}

// rewrite makes the request of the exchange the one that continues r behind the ids, of which the
// last kept ones are output. It counts all memory before it allocates it, and returns false if there is
// no room.
func (x *exchange) rewrite(r *openai.Request, ids []uint32, kept int) bool {
	text := continuation.TextOf(ids)
	room := continuation.BodyRoom(r, text)
	edits := int64(room) // that Body makes copies for: the ids and the sampling parameters
	if x.client.TakeMemory(edits) != nil {
		return false
	}
	defer x.client.ReleaseMemory(edits)
	var err error
	if x.client.RewriteBody(room, func(dst []byte) (body []byte) {
		body, err = continuation.Body(dst, r, ids, kept)
		return body
	}) != nil || err != nil {
		return false
	}
	model, target, named := x.req.Model, x.req.Target, x.req.HasModel
	if openai.ReadRequest(x.req.API, "", x.client.Body(), &x.req) != nil {
		return false
	}
	x.req.Model, x.req.Target, x.req.HasModel = model, target, named
	more := 0
	if n := x.req.Size(); n > downstream.MinDerived {
		more = n
	}
	if x.req.API == openai.Chat {
		more += 2 * text // each leg has a copy in its kv_transfer_params
	}
	if x.client.Derive(more) != nil {
		return false
	}
	if x.req.API == openai.Chat {
		x.env.PromptIDs = continuation.AppendIDs(make([]byte, 0, text), ids)
	}
	return true
}

// close frees what is kept, and makes the question to the coordinator that of the client again, for
// the records of the request.
func (s *openStream) close(ask *coordinator.PlacementRequest) {
	s.kept.End()
	if !s.by.IsZero() {
		ask.Request, ask.Deadline = s.asked, s.deadline
	}
}

// usageMember is the usage in an event, as both engines write it.
var usageMember = []byte(`"usage":{`)

// complete ends a stream that lacks only its closing events.
func (x *exchange) complete(closing []byte, output int) (done bool, reason continuation.Reason) {
	if x.client.Write(closing) != nil {
		return false, continuation.Refused
	}
	x.client.Flush()
	x.journal.Usage = openai.Usage{Prompt: int64(x.env.Kept.Prompt), Completion: int64(output), Cached: x.journal.Usage.Cached}
	x.journal.Completed(output)
	return true, ""
}

// endBroken ends the client's stream, which has broken off and which no engine continues.
func (x *exchange) endBroken() {
	s := x.stream
	reason := s.reason
	switch {
	case s.mode == config.ContinueOff, x.env.Stopped() != nil:
		reason = ""
	case reason != "":
	case s.kept.Reason != "":
		reason = s.kept.Reason
	case x.placing.denied != nil:
		reason = continuation.Budget
	case !time.Now().Before(s.by):
		reason = continuation.Late
	default:
		reason = continuation.NoEngine
	}
	if reason != "" && !x.client.Gone() {
		x.journal.NotContinued(s.kept.Output(), string(reason))
	}
	x.env.EndBroken(s.end, string(reason))
}
