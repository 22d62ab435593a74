package openai

import (
	"net/http"
	"strings"
)

// StoredResponse is the target of a request about a response that an engine stores.
type StoredResponse struct {
	ID     string // of letters, digits, _ and -
	Cancel bool   // the request ends the response; otherwise it reads or deletes the response
}

// maxResponseID is the maximum length of the id of a response, in bytes.
const maxResponseID = 256

// StoredResponseAt returns the target of a path below /v1/responses; ok is false for any other
// path. An id with other characters is no id of an engine. OpenAI has the endpoints
// /v1/responses/compact and /v1/responses/input_tokens, which concern no stored response.
func StoredResponseAt(path string) (s StoredResponse, ok bool) {
	rest, ok := strings.CutPrefix(path, routes[Responses].path+"/")
	if !ok || rest == "compact" || rest == "input_tokens" {
		return StoredResponse{}, false
	}
	id, cancel := strings.CutSuffix(rest, "/cancel")
	s, ok = StoredResponseFor(id)
	s.Cancel = cancel
	return s, ok
}

// StoredResponseFor returns the target with that id; ok is false if the text is no id.
func StoredResponseFor(id string) (s StoredResponse, ok bool) {
	if id == "" || len(id) > maxResponseID {
		return StoredResponse{}, false
	}
	for i := range len(id) {
		if c := id[i]; !(c-'0' < 10 || c|0x20-'a' < 26 || c == '_' || c == '-') {
			return StoredResponse{}, false
		}
	}
	return StoredResponse{ID: strings.Clone(id)}, true
}

// Path returns the path of the target, which is the same on the proxy and on the engines.
func (s StoredResponse) Path() string {
	path := routes[Responses].path + "/" + s.ID
	if s.Cancel {
		path += "/cancel"
	}
	return path
}

// Methods returns the methods that the target takes, as the header Allow lists them.
func (s StoredResponse) Methods() string {
	if s.Cancel {
		return "POST"
	}
	return "GET, DELETE"
}

// Takes reports whether the target takes a method.
func (s StoredResponse) Takes(method string) bool {
	switch method {
	case http.MethodPost:
		return s.Cancel
	case http.MethodGet, http.MethodDelete:
		return !s.Cancel
	}
	return false
}

// Action names what a method does with the response: read, delete or cancel.
func (s StoredResponse) Action(method string) string {
	switch {
	case s.Cancel:
		return "cancel"
	case method == http.MethodDelete:
		return "delete"
	}
	return "read"
}
