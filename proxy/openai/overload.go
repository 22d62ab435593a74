package openai

import (
	"bytes"
	"net/http"
)

// overloadWindow is how much of an answer Overloaded reads, in bytes: the texts of engines are short.
const overloadWindow = 4 << 10

// overloadTexts are parts of the texts with which engines refuse a request for lack of room, in lower
// case. Each begins a word.
//
// Sources: sglang managers/scheduler.py ("The request queue is full.", "Request queue timeout
// reached.", "The request is aborted by a higher priority request."); vllm exceptions.py (QueueOverflowError: "The
// engine is currently busy", MaxQueuedTokensError: "prefill token backlog limit").
var overloadTexts = [...]string{"queue", "currently busy", "backlog", "higher priority request", "waiting timeout", "overload", "too many requests"}

// Overloaded reports whether an engine's answer with an error status says that the engine has too
// many requests now: a 429, or a 503 that names a time in Retry-After or whose text mentions the
// engine's queue. Such an engine works. Any other 503 is a failure: vLLM answers with it when its
// engine is dead.
func Overloaded(status int, retryAfter string, answer []byte) bool {
	switch status {
	case http.StatusTooManyRequests:
		return true
	case http.StatusServiceUnavailable:
		return retryAfter != "" || mentionsOverload(answer)
	}
	return false
}

func mentionsOverload(answer []byte) bool {
	text := bytes.ToLower(answer[:min(len(answer), overloadWindow)])
	for _, part := range overloadTexts {
		for rest := text; ; {
			i := bytes.Index(rest, []byte(part))
			if i < 0 {
				break
			}
			if i == 0 || rest[i-1] < 'a' || rest[i-1] > 'z' { // a failure to "enqueue" is none
				return true
			}
			rest = rest[i+1:]
		}
	}
	return false
}
