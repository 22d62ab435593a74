package tokens

import (
	"fmt"
	"net/http"
	"strconv"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// statusError is an answer other than 200.
type statusError struct {
	status int
	// absent: the engine has no such endpoint, as opposed to not knowing the
	// model or not liking the request.
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

// readAnswer gives the ids of an answer. The error holds nothing of it.
func (w way) readAnswer(status int, answer []byte) ([]uint32, error) {
	if status != http.StatusOK {
		return nil, &statusError{status, absent(status, answer)}
	}
	path := [...]string{"tokens", ""}
	steps := path[:1]
	switch w {
	case renderChat:
		path[0] = "token_ids"
	case renderPrompt: // a list with one for each prompt
		path, steps = [...]string{"0", "token_ids"}, path[:]
	}
	raw, ok, err := openai.Lookup(answer, steps...)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errAnswer, err)
	}
	if !ok {
		return nil, fmt.Errorf("%w: no %q", errAnswer, steps[len(steps)-1])
	}
	ids, err := AppendIDs(make([]uint32, 0, len(raw)/4+1), raw)
	if err != nil {
		return nil, err
	}
	if count, ok := openai.Find(answer, "count"); ok && path[0] == "tokens" {
		if n, ok := openai.Int64(count); !ok || n != int64(len(ids)) {
			return nil, fmt.Errorf("%w: count is not that of the list", errAnswer)
		}
	}
	return ids, nil
}

// absent tells a missing route from a model that the engine does not serve,
// which is a 404 too: the engines say the latter in their own error bodies,
// {"error":{...}} or {"object":"error","message":...}, the former in those of
// their router, {"detail":"Not Found"}.
func absent(status int, answer []byte) bool {
	switch status {
	case http.StatusMethodNotAllowed, http.StatusNotImplemented:
		return true
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
