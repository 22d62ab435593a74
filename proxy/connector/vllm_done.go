package connector

import "github.com/pdproxy/pdproxy/proxy/openai"

// endedAtOnce handles an answer whose first token ended the text although the limit of
// tokens should have: /v1/messages has no ignore_eos, and connectors that keep blocks
// only for the limit (request_finished) then have nothing for decode. Prefill's answer
// is the whole answer. ok is false for other answers.
func endedAtOnce(a *Attempt, body []byte) (h Handoff, ok bool) {
	if a.Request.API != openai.Messages {
		return h, false
	}
	var answer openai.Object
	if answer.Parse(body) != nil {
		return h, false
	}
	reason, _ := answer.Get("stop_reason")
	if string(reason) != `"end_turn"` {
		return h, false
	}
	kv, ec := cut("kv_transfer_params"), cut("ec_transfer_params")
	h.Done = true
	if !a.Request.Stream {
		h.Answer = answer.Append(nil, kv, ec)
		return h, true
	}
	// The events that a vLLM engine streams for a text without tokens.
	h.Answer = append(h.Answer, "event: message_start\ndata: {\"type\":\"message_start\",\"message\":"...)
	start := answer.Append(nil, kv, ec,
		openai.Edit{Key: "content", Value: literal("[]")}, openai.Edit{Key: "stop_reason", Value: literal("null")})
	h.Answer = appendOneLine(h.Answer, start)
	h.Answer = append(h.Answer, "}\n\nevent: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\",\"stop_sequence\":null},\"usage\":"...)
	h.Answer = appendMember(h.Answer, &answer, "usage")
	h.Answer = append(h.Answer, "}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"...)
	return h, true
}
