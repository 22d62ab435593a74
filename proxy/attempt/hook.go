package attempt

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"time"
	"unicode/utf8"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// legFacts returns the facts for the leg hook about a leg on t. try counts the legs of this
// phase from 1.
func (a *attempt) legFacts(event abi.LegEvent, phase abi.Phase, t engine.Target, try int) abi.LegFacts {
	env := a.env
	f := abi.LegFacts{
		Request: env.Ask.Request, Event: event, Phase: phase, Flow: a.p.Flow,
		Attempt: uint32(try), Left: uint32(max(0, env.Config.Retry.Attempts-try)),
		Instance: t.ID, Rank: int32(t.Rank), ID: a.p.ID, Engine: t.Name(),
	}
	f.Request.Model, f.Request.Remaining = env.Request.Model, env.Ask.Remaining(time.Now())
	partner := a.p.Prefill
	switch {
	case partner.IsZero():
		f.Phase = abi.PhaseNone
		return f
	case phase == abi.Prefill:
		partner = a.p.Decode
	}
	f.Partner, f.PartRank = partner.ID, int32(partner.Rank)
	return f
}

// askLeg calls the leg hook and returns its decision. Without a usable decision, askLeg returns
// abi.LegPass: the built-in rule applies.
func (env *Env) askLeg(f *abi.LegFacts) (abi.LegDecision, []byte) {
	d, list, reason := env.Hooks.Leg(env.Context, f, nil)
	env.Journal.Note(f.Notes...)
	switch {
	case reason == coordinator.ReasonAbsent:
	case reason != "":
		env.Journal.Fallback("leg", reason)
	case f.Event == abi.LegSend && d > abi.LegEdited || d > abi.LegGiveUp:
		env.Journal.Fallback("leg", coordinator.ReasonNonsense)
	default:
		return d, list
	}
	return abi.LegPass, nil
}

// edit lets the leg hook edit a leg that the connector has shaped. slot points to the buffer
// that holds the leg's body. If one edit is not allowed, edit applies no edit. Only the
// goroutine of the exchange may call edit, because edit reads the request.
func (a *attempt) edit(phase abi.Phase, l *connector.Leg, slot **buffer.Buffer) error {
	t := a.p.Decode
	if phase == abi.Prefill {
		t = a.p.Prefill
	}
	a.edits[phase] = nil
	f := a.legFacts(abi.LegSend, phase, t, a.env.tries[phase]+1)
	d, list := a.env.askLeg(&f)
	if d != abi.LegEdited {
		return nil
	}
	var body openai.Object
	if body.Parse(l.Body) != nil { // only a JSON object has members
		body.Reset()
	}
	headers, members, ok := readEdits(list, &a.env.Request.Object, &body)
	if !ok || len(members) > 0 && body.Raw() == nil {
		a.env.Journal.Fallback("leg", coordinator.ReasonNonsense)
		return nil
	}
	a.edits[phase] = headers
	if len(members) > 0 {
		b, err := a.env.Client.Buffer(len(l.Body) + len(list) + legSlack)
		if err != nil {
			return err
		}
		b.Set(body.Append(b.B, members...))
		(*slot).Free()
		*slot = b
		l.Body, l.Alias = b.B, false
	}
	return nil
}

// readEdits reads a list of edits and checks that each edit is allowed. client is the body of
// the client's request, and leg is the body of the leg.
func readEdits(list []byte, client, leg *openai.Object) (headers []abi.Edit, members []openai.Edit, ok bool) {
	lines := 0 // size of the edited header lines in bytes
	for len(list) > 0 {
		var e abi.Edit
		if e, list, ok = abi.NextEdit(list); !ok {
			return nil, nil, false
		}
		switch e.Op {
		case abi.EditSetField, abi.EditRemoveField:
			m := openai.Edit{Key: e.Name, Remove: e.Op == abi.EditRemoveField}
			if !m.Remove {
				m.Value = []byte(e.Value)
			}
			if !memberEditable(&m, client, leg) {
				return nil, nil, false
			}
			members = append(members, m)
		default:
			lines += len(e.Name) + len(e.Value)
			if lines > abi.MaxEditHeaders || !headerEditable(&e) {
				return nil, nil, false
			}
			headers = append(headers, e)
		}
	}
	return headers, members, true
}

// memberEditable reports whether the hook may edit a member of a leg's body. It may not edit
// the members that control the KV transfer, the members that the connector has changed for
// the transfer, or "stream", because the client expects the form of answer that it asked for.
func memberEditable(e *openai.Edit, client, leg *openai.Object) bool {
	if e.Key == "stream" || !utf8.ValidString(e.Key) || connector.PDMember(e.Key, e.Value) {
		return false
	}
	if !e.Remove && !(utf8.Valid(e.Value) && json.Valid(e.Value)) {
		return false
	}
	theirs, had := client.Get(e.Key)
	ours, has := leg.Get(e.Key)
	return had == has && bytes.Equal(theirs, ours)
}

// headerEditable reports whether the hook may edit a header line of a leg. It may not edit the
// lines that belong to the connection or to the protocol between proxy and engine.
func headerEditable(e *abi.Edit) bool {
	k := http.CanonicalHeaderKey(e.Name)
	return !downstream.Proxied(k) && !connector.PDHeader(e.Name) &&
		upstream.ValidField(upstream.Field{Name: e.Name, Value: e.Value})
}

// editFields applies the edits of header lines to fields.
func editFields(fields []upstream.Field, edits []abi.Edit) []upstream.Field {
	for _, e := range edits {
		if e.Op != abi.EditAddHeader {
			fields = downstream.Without(fields, e.Name)
		}
		if e.Op != abi.EditRemoveHeader {
			fields = append(fields, upstream.Field{Name: e.Name, Value: e.Value})
		}
	}
	return fields
}

// askHook returns the decision of the leg hook about a leg that failed before the client's first
// byte. It calls the hook once for each failure.
func (a *attempt) askHook(err error) HookAnswer {
	env := a.env
	var e *Error
	if env.Hooks == nil || env.Client.Begun() || env.Context.Err() != nil || !errors.As(err, &e) || e.Phase == abi.Encode {
		a.hook = HookAnswer{}
		return a.hook
	}
	if a.hook.failed == e {
		return a.hook
	}
	f := a.legFacts(abi.LegFailed, e.Phase, e.Target, env.tries[e.Phase])
	f.Status, f.Elapsed, f.Reason = uint32(e.Status), e.elapsed.Microseconds(), e.Reason
	a.hook = HookAnswer{failed: e}
	if a.hook.Decision, _ = env.askLeg(&f); a.hook.Decision == abi.LegRetry {
		a.hook.Same = coordinator.Pair{Prefill: a.p.Prefill, Decode: a.p.Decode}
	}
	return a.hook
}
