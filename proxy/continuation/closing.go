package continuation

import (
	"bytes"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Head returns the raw id and creation time of a whole event; nil for a member that it lacks. An event
// of /inference/v1/generate has its id as request_id
// (vLLM entrypoints/scale_out/token_in_token_out/protocol.py).
func Head(event []byte) (id, created []byte) {
	data := dataOf(event)
	if id, _ = openai.Find(data, "id"); id == nil {
		id, _ = openai.Find(data, "request_id")
	}
	created, _ = openai.Find(data, "created")
	return bytes.Clone(id), bytes.Clone(created)
}

func dataOf(event []byte) []byte {
	data, _ := bytes.CutPrefix(event, []byte("data:"))
	return bytes.TrimSpace(data)
}

// Closing appends the events that are left of a stream whose answer is complete, with the numbers of
// tokens of prompt and output. last is its last event with a choice. Unless ended is set, that event
// had no finish reason, although the output has reached the limit of r.
func Closing(dst []byte, r *openai.Request, last []byte, ended bool, prompt, output int) []byte {
	var o openai.Object
	if o.Parse(dataOf(last)) != nil {
		return openai.AppendDone(dst)
	}
	event := func(edits ...openai.Edit) {
		dst = append(o.Append(append(dst, "data: "...), edits...), "\n\n"...)
	}
	if !ended {
		choice := `[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}]`
		switch r.API {
		case openai.Chat:
			choice = `[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}]`
		case openai.VLLMGenerate:
			choice = `[{"index":0,"token_ids":[],"logprobs":null,"finish_reason":"length"}]`
		}
		event(openai.Edit{Key: "choices", Value: []byte(choice)})
	}
	options, _ := r.Get("stream_options")
	if include, _ := openai.Find(options, "include_usage"); string(include) == "true" {
		var usage openai.Object // without members
		event(openai.Edit{Key: "choices", Value: []byte("[]")}, openai.Edit{Key: "usage", Value: usage.Append(nil,
			number("prompt_tokens", int64(prompt)), number("total_tokens", int64(prompt+output)), number("completion_tokens", int64(output)))})
	}
	return openai.AppendDone(dst)
}
