package world

import (
	"strings"
)

// StreamHead is the head of a stream in chunks.
const StreamHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"

// Unary is a whole answer with its usage.
const Unary = `{"choices":[{"text":"ab","finish_reason":"length"}],"usage":{"prompt_tokens":2,"completion_tokens":2}}`

// KVParams are parameters of a prefill engine of vLLM.
const KVParams = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[1,2],"remote_engine_id":"p","remote_host":"p0.test","remote_port":1,"remote_request_id":"r"}`

// Whole answers of prefill engines.
const (
	DoneAnswer = `{"choices":[{"text":"x","finish_reason":"length"}]}`
	NIXLAnswer = `{"choices":[{"text":"x","finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true,` +
		`"remote_block_ids":[1],"remote_engine_id":"e","remote_host":"p.test","remote_port":5600}}`
	TRTAnswer = `{"choices":[{"text":"x","finish_reason":"length","disaggregated_params":{"request_type":"context_only",` +
		`"ctx_request_id":1,"disagg_request_id":1}}],"prompt_token_ids":[1]}`
)

// NamedAnswer is an answer of prefill whose parameters contain the id of the request.
var NamedAnswer = strings.Replace(NIXLAnswer, `"remote_port"`, `"remote_request_id":"r","remote_port"`, 1)

// Events of streams.
const (
	EventA  = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n"
	EventB  = "data: {\"choices\":[{\"text\":\"b\"}]}\n\n"
	Done    = "data: [DONE]\n\n"
	Comment = ": keep-alive\n\n"
	Opening = "data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":null}]}\n\n"
	// AbortEvent is the last event of a stream that SGLang aborts. Aborted is the event
	// that the client gets instead.
	AbortEvent = "data: {\"choices\":[{\"finish_reason\":\"abort\"}]}\n\n"
	Aborted    = "data: {\"error\":{\"message\":\"the engine aborted the request; the answer is not complete\",\"type\":\"upstream_error\",\"param\":null,\"code\":\"stream_broken\",\"not_continued\":\"no_ids\"}}\n\n"
	Broken     = "data: {\"error\":{\"message\":\"the engine's stream broke off; the answer is not complete\",\"type\":\"upstream_error\",\"param\":null,\"code\":\"stream_broken\",\"not_continued\":\"no_ids\"}}\n\n"
)
