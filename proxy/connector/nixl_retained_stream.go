package connector

import (
	"bytes"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Sources, in vLLM 0.33.0: entrypoints/openai/chat_completion/serving.py
// (chat_completion_stream_generator_raw) and completion/serving.py
// (completion_stream_generator): each event of a choice has kv_transfer_params, null before
// the finish reason; the role event and the usage have no such member.
// entrypoints/openai/responses/serving.py: response.completed has the whole response.
// Streams of messages and of /inference/v1/generate have no parameters.

// streamsRetained is the first 0.x whose streams of chats and completions name retained KV.
const streamsRetained = 33

// NamesInStreams implements Retainer. A build without a release number counts as a new one:
// if its streams name nothing, the token ids of their events are not used.
func (nixl) NamesInStreams(api openai.API, f *engine.Facts) bool {
	major, minor := release(f.Version)
	return (api == openai.Completions || api == openai.Chat) && (major > 0 || minor == 0 || minor >= streamsRetained)
}

var transferMember = literal(`"kv_transfer_params"`)

// CutRetained implements Retainer. It parses only an event whose parameters are not null. The
// client gets null in their place, as from an engine that retains nothing.
func (nixl) CutRetained(a *Attempt, events []byte) (rest []byte, k Retained, ok bool) {
	if !hasTransfer(events) {
		return events, Retained{}, false
	}
	rest = make([]byte, 0, len(events))
	for len(events) > 0 {
		end := len(events)
		if i := bytes.Index(events, literal("\n\n")); i >= 0 {
			end = i + len("\n\n")
		}
		var params []byte
		rest, params = cutTransfer(rest, events[:end])
		if one, named := readRetained(a, params); named {
			k, ok = one, true
		}
		events = events[end:]
	}
	return rest, k, ok
}

// hasTransfer reports whether events have transfer parameters other than null. A text of an
// answer cannot contain the member, because its quotes have a backslash.
func hasTransfer(events []byte) bool {
	for {
		i := bytes.Index(events, transferMember)
		if i < 0 {
			return false
		}
		if events = events[i+len(transferMember):]; !bytes.HasPrefix(events, literal(":null")) {
			return true
		}
	}
}

// cutTransfer appends one event to dst, with null for its transfer parameters, and returns
// these; nil without the member. They are beside the choices, or in the response of an event of
// responses. An event that is no JSON is appended unchanged.
func cutTransfer(dst, event []byte) (rest, params []byte) {
	before, data, found := bytes.Cut(event, literal("data: "))
	if !found || !hasTransfer(data) {
		return append(dst, event...), nil
	}
	text := bytes.TrimRight(data, "\r\n")
	var o, response openai.Object
	if o.Parse(text) != nil {
		return append(dst, event...), nil
	}
	edit := openai.Edit{Key: "kv_transfer_params", Value: literal("null")}
	if inner, _ := o.Get("response"); isObject(inner) && response.Parse(inner) == nil {
		if params, _ = response.Get("kv_transfer_params"); params != nil {
			edit = openai.Edit{Key: "response", Value: response.Append(nil, edit)}
		}
	}
	if params == nil {
		if params, _ = o.Get("kv_transfer_params"); params == nil {
			return append(dst, event...), nil
		}
	}
	dst = append(append(dst, before...), "data: "...)
	dst = o.Append(dst, edit)
	return append(dst, data[len(text):]...), params
}
