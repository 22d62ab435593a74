package downstream

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// wholeBody is a body as the server of HTTP/1.1 gives it if it has come with its head.
type wholeBody struct{ io.Reader }

func (wholeBody) Close() error { return nil }
func (wholeBody) Whole() bool  { return true }

// A body whose reads do not wait for the client has no limits of time, and takes no place.
func TestWholeBody(t *testing.T) {
	var b Bodies
	r := httptest.NewRequest(http.MethodPost, "/", nil)
	r.Body = wholeBody{strings.NewReader("hello")}
	served := false
	b.Limit(http.HandlerFunc(func(_ http.ResponseWriter, got *http.Request) {
		text, err := io.ReadAll(got.Body)
		served = string(text) == "hello" && err == nil && incomingOf(got.Context()) == nil && b.Reading() == 0
	})).ServeHTTP(httptest.NewRecorder(), r)
	if !served {
		t.Error("the body has limits")
	}
}
