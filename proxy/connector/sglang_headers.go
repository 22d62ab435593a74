package connector

import (
	"slices"
	"strconv"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// An engine that accepts overrides in header lines gets the client's body unchanged,
// without a copy. Sources, in SGLang: srt/entrypoints/request_headers.py;
// srt/entrypoints/http_server.py (/generate) and openai/serving_chat.py
// (_convert_to_internal_request, which also serves /v1/messages) read them. They are
// single values, so a batch keeps its lists in the body.

// byHeader reports whether the leg to t can use the client's body unchanged. That
// requires that no PD field must be cut out.
func byHeader(a *Attempt, t engine.Target) bool {
	if !t.Spec.HeaderOverrides || a.Trust || batch(a.Request) > 0 {
		return false
	}
	switch a.Request.API {
	case openai.Chat, openai.Generate:
	case openai.Messages:
		if !a.Request.HasModel {
			return false
		}
	default:
		return false
	}
	var room [editRoom]openai.Edit
	return a.Priority == nil && len(openai.CutPD(room[:0], a.Request)) == 0
}

// override returns the leg with the client's own body, and with m in header lines.
func (m *meeting) override(a *Attempt) Leg {
	leg := Leg{Path: a.Request.API.Path(), Body: a.Request.Raw(), Alias: true}
	leg.Header = append(make([]Field, 0, 6),
		Field{Name: "x-override-bootstrap-host", Value: m.host},
		Field{Name: "x-override-bootstrap-port", Value: strconv.Itoa(m.port)},
		Field{Name: "x-override-bootstrap-room", Value: strconv.FormatUint(bootstrapRoom(a, 0), 10)},
		Field{Name: overrideRID, Value: a.LegID})
	if m.own >= 0 {
		leg.Header = append(leg.Header, Field{Name: "x-override-routed-dp-rank", Value: strconv.Itoa(m.own)})
	}
	if m.prefills >= 0 {
		leg.Header = append(leg.Header, Field{Name: "x-override-disagg-prefill-dp-rank", Value: strconv.Itoa(m.prefills)})
	}
	return leg
}

// readStream checks prefill's answer if the body requested a stream.
func readStream(api openai.API, body []byte) error {
	events := openai.EventScanner{Reasons: api == openai.Messages}
	events.Feed(body)
	events.Finish()
	switch {
	case events.Failed, events.Aborted, slices.Contains(events.FinishReasons(), endTurn):
		return badReply("the engine gave up in its stream")
	case !events.Done:
		return badReply("the stream has no end")
	}
	return nil
}
