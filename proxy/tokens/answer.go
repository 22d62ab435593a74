package tokens

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// statusError is an answer other than 200.
type statusError struct {
	status int
	// absent: the engine has no such endpoint. It is false if the engine does not know
	// the model or rejects the request.
	absent bool
}

func (e *statusError) Error() string { return "status " + strconv.Itoa(e.status) }

func (e *statusError) reason() Reason {
	switch {
	case e.absent:
		return Unsupported
	case e.status >= 500 || e.status < 400 || e.status == http.StatusTooManyRequests:
		return Failed
	}
	return Refused
}

// errVersion is an answer in the form of the render endpoints of some vLLM versions,
// before there was one with ids alone: messages and prompts in a list.
var errVersion = errors.New("the answer has the form of another version")

// readAnswer returns the ids of an answer. The error contains nothing of it.
func (w way) readAnswer(status int, answer []byte) ([]uint32, error) {
	if status != http.StatusOK {
		return nil, &statusError{status, absent(status, answer)}
	}
	list := bytes.HasPrefix(answer, []byte("["))
	if w == renderPrompt && list { // one entry for each prompt
		first, ok, err := openai.Lookup(answer, "0")
		if err != nil || !ok {
			return nil, fmt.Errorf("%w: not a list with one element", errAnswer)
		}
		answer, list = first, false
	}
	if w.renders() && list {
		return nil, errVersion
	}
	var o openai.Object
	if err := o.Parse(answer); err != nil {
		return nil, fmt.Errorf("%w: not the JSON of an object", errAnswer)
	}
	key := "tokens"
	if w.renders() {
		key = "token_ids"
	}
	raw, ok := o.Get(key)
	switch {
	case ok:
	case key == "token_ids":
		return nil, errVersion
	default:
		return nil, fmt.Errorf("%w: no %q", errAnswer, key)
	}
	ids, err := AppendIDs(make([]uint32, 0, len(raw)/4+1), raw)
	if err != nil {
		return nil, err
	}
	if count, ok := o.Get("count"); ok && key == "tokens" {
		if n, ok := openai.Int64(count); !ok || n != int64(len(ids)) {
			return nil, fmt.Errorf("%w: count is not that of the list", errAnswer)
		}
	}
	return ids, nil
}

// absent distinguishes a missing route from a model that the engine does not serve,
// which is also a 404. Engines report the latter in their own error bodies,
// {"error":{...}} or {"object":"error","message":...}, and the former in that of their
// router, {"detail":"Not Found"}. vLLM without --enable-scale-out has the routes that
// render, and answers 403 of its own type (vllm/entrypoints/scale_out/factories.py). Any
// other 403 refuses the request.
func absent(status int, answer []byte) bool {
	switch status {
	case http.StatusMethodNotAllowed, http.StatusNotImplemented:
		return true
	case http.StatusForbidden:
		kind, _, err := openai.Lookup(answer, "error", "type")
		return err == nil && string(kind) == `"PermissionDeniedError"`
	case http.StatusNotFound:
		for _, key := range [...]string{"error", "message"} {
			if _, ok, err := openai.Lookup(answer, key); ok && err == nil {
				return false
			}
		}
		return true
	}
	return false
}
