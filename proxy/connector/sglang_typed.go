package connector

import (
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// The legs of /v1/responses and /v1/messages. Their bodies have the fields of the transfer since
// the releases below, but no member rid:
//
//   - A response's rid is its request_id, which the engine also makes the id of the answer. Ids of
//     responses begin with resp_. Source, in SGLang: srt/entrypoints/openai/protocol.py
//     ResponsesRequest, serving_responses.py create_responses.
//   - The body of messages cannot name a rid. Only a header line can, on engines with
//     header_overrides. Without the line the engines abort a leg because the proxy closes its
//     connection: a stream at once, or after 2 s, a whole answer at the next poll (4 s,
//     SGLANG_REQUEST_STATE_WAIT_TIMEOUT). Sources: srt/entrypoints/anthropic/serving.py,
//     srt/managers/tokenizer_manager.py _stream_one_response, _release_req_states_on_failure and
//     create_abort_task.

// The first releases 0.5.x whose bodies have the fields: 0.5.20 and 0.5.22, read in 0.5.19 to
// 0.5.23. Older releases ignore the fields and reject a leg without a room.
const (
	firstResponses = 20
	firstMessages  = 22
)

// overrideRID is the header line that sets the rid.
const overrideRID = "x-override-rid"

// endTurn is the reason with which an engine ends messages that were aborted. Prefill ends each other
// request with max_tokens. Sources: srt/entrypoints/anthropic/serving.py STOP_REASON_MAP,
// srt/disaggregation/prefill.py (FINISH_LENGTH).
const endTurn = "end_turn"

// Unfit rejects engines whose release has no transfer on r's route, by the facts of the engine. An
// unknown release is fit. Header lines carry the transfer of messages on older engines too.
func (sglang) Unfit(r *openai.Request, _ abi.Phase, t engine.Target) (reason string, sure bool, err error) {
	first := 0
	switch r.API {
	case openai.Responses:
		first = firstResponses
	case openai.Messages:
		if !t.Spec.HeaderOverrides {
			first = firstMessages
		}
	default:
	}
	if !olderSGLang(t.Facts().Version, first) {
		return "", false, nil
	}
	return "old_engine", true, openai.NewError(openai.CodeNotImplemented, "Prefill and decode of "+r.API.Path()+" on two SGLang engines need SGLang 0.5."+
		strconv.Itoa(first)+" or newer, and no engine here serves the request whole.")
}

// olderSGLang reports whether a known release is older than 0.5.patch.
func olderSGLang(version string, patch int) bool {
	var numbers [3]int
	for i := range numbers {
		digits := len(version) - len(strings.TrimLeft(version, "0123456789"))
		n, err := strconv.Atoi(version[:digits])
		if err != nil {
			return false
		}
		numbers[i], version = n, strings.TrimPrefix(version[digits:], ".")
	}
	major, minor := numbers[0], numbers[1]
	switch {
	case patch == 0, major > 0, minor > 5:
		return false
	case minor == 5:
		return numbers[2] < patch
	}
	return minor > 0 // 0.0.0 is a build without a release
}

// storedState returns the member of a response that needs stored responses, or "". Engines of a
// pair store none (serving_responses.py _response_store_disabled_error).
func storedState(r *openai.Request) string {
	if r.API != openai.Responses {
		return ""
	}
	if isSet(r, "previous_response_id") {
		return "previous_response_id"
	}
	if v, _ := r.Get("background"); string(v) == "true" {
		return "background"
	}
	return ""
}

// ridFor returns the rid of a's legs, without the suffix of a batch.
func ridFor(a *Attempt) string {
	if a.Request.API == openai.Responses {
		return "resp_" + a.LegID
	}
	return a.LegID
}

// ridHeader returns the header line with the rid of a messages leg; nil if the engine does not
// read the line.
func ridHeader(a *Attempt, prefill bool) []Field {
	t := a.Decode
	if prefill {
		t = a.Prefill
	}
	if !t.Spec.HeaderOverrides {
		return nil
	}
	return []Field{{Name: overrideRID, Value: a.LegID}}
}

// namedForMessages returns the edit that names the model on Anthropic's routes, which reject a body
// without a model (srt/entrypoints/anthropic/protocol.py).
func namedForMessages(a *Attempt) openai.Edit {
	if !a.Request.API.Anthropic() {
		return openai.Edit{}
	}
	return modelNamed(a)
}

// readTyped checks prefill's answer of these routes. An abort has status 200.
func readTyped(api openai.API, body []byte) error {
	member, aborted := "status", "failed"
	if api == openai.Messages {
		member, aborted = "stop_reason", endTurn
	}
	reason, ok, err := openai.Lookup(body, member)
	switch {
	case err != nil:
		return badReply(err.Error())
	case !ok || openai.IsNull(reason):
		return badReply("no " + member)
	case reason[0] != '"':
		return badReply(member + " is no text")
	}
	if text, _ := openai.String(reason); text == aborted || text == "cancelled" {
		return badReply("the engine aborted the request")
	}
	return nil
}
