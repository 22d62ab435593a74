package epp

import (
	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"

	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/sidecar/extproc"
)

// Names of the facts in the namespace of Options.Metadata.
const (
	factModel      = "model"
	factEngine     = "engine"
	factTenant     = "tenant"
	factClass      = "class"
	factPrompt     = "prompt_tokens"
	factCompletion = "completion_tokens"
	factCached     = "cached_tokens"
	factTotal      = "total_tokens"
)

// decided returns the dynamic metadata of a decision: the endpoints, and the facts that are known
// before the answer.
func (st *stream) decided(f *attempt.Forwarding, endpoints string) message {
	lb := make(message, 0, usual).fact(extproc.HeaderDestination, endpoints)
	if st.space == "" {
		return make(message, 0, usual).space(extproc.LBSpace, lb)
	}
	var facts message
	if st.space == extproc.LBSpace {
		facts, lb = lb, nil
	}
	facts = facts.fact(factModel, f.Model).fact(factEngine, f.Decode.Spec.Name).fact(factTenant, f.Tenant).fact(factClass, f.Class)
	m := message(nil).space(st.space, facts)
	if lb != nil {
		m = m.space(extproc.LBSpace, lb)
	}
	return m
}

// Used implements attempt.Gateway.
func (st *stream) Used(u attempt.Used) {
	if st.space == "" {
		return
	}
	if !st.answerOver && st.responseMode == filter.ProcessingMode_BUFFERED {
		u.Completion = -1 // the gateway shows the stream at its end
	}
	facts := message(nil).fact(factEngine, u.Engine).count(factPrompt, u.Prompt).count(factCompletion, u.Completion).count(factCached, u.Cached)
	if u.Prompt >= 0 && u.Completion >= 0 {
		facts = facts.count(factTotal, u.Prompt+u.Completion)
	}
	st.used = facts
}

// endAnswer answers the remaining messages of the engine's answer, the last one with the metadata of
// Used. The gateway has the facts before the client has the end of the answer.
func (st *stream) endAnswer() error {
	for !st.answerOver {
		if _, err := st.Next(st.ctx); err != nil && !st.answerOver {
			return err
		}
	}
	last := st.last
	if last == nil {
		return nil // the gateway does not show the end
	}
	last.tail = st.cost()
	return st.sendPart(true, *last)
}

// cost returns the field dynamic_metadata (8) of a ProcessingResponse with the facts of Used, nothing
// without them.
func (st *stream) cost() message {
	if st.used == nil {
		return nil
	}
	return message(nil).with(8, message(nil).space(st.space, st.used))
}

// tells reports whether the end of the answer has metadata. A gateway that shows no body shows no end.
func (st *stream) tells() bool {
	return st.space != "" && st.responseMode != filter.ProcessingMode_NONE
}

// keepLast sends the answer to a message of the engine's answer. The last one waits for endAnswer if
// it must have metadata. Otherwise the stream ends with it, although the request may not have ended.
func (st *stream) keepLast(o outgoing) error {
	if !st.answerOver {
		return st.sendPart(false, o)
	}
	if st.tells() {
		st.last = &o
		return nil
	}
	err := st.sendPart(true, o)
	st.grpc.End(nil)
	return err
}
