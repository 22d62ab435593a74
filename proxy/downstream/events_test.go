package downstream

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestEventFrame(t *testing.T) {
	for _, n := range []int{1, 15, 16, 255, 256, 4086} {
		var e Events
		copy(e.Take(), strings.Repeat("x", n))
		if got, want := string(e.frame(n)), fmt.Sprintf("%x\r\n%s\r\n", n, strings.Repeat("x", n)); got != want {
			t.Errorf("got %d bytes: %.20q, want %.20q", n, got, want)
		}
	}
}

// The writer of an answer is net/http's own writer, or another writer that the test can
// unwrap.
func TestEventsOnlyPastNetHTTP(t *testing.T) {
	conn, _ := net.Pipe()
	defer conn.Close()
	r := httptest.NewRequest("POST", "/", nil)
	r = r.WithContext(WithConn(r.Context(), conn))
	for _, tt := range []struct {
		name   string
		w      http.ResponseWriter
		status int
		major  int
		want   bool
	}{
		{"plain", httptest.NewRecorder(), 200, 1, true},
		{"wrapped", wrappedWriter{httptest.NewRecorder()}, 200, 1, false},
		{"HTTP/2", httptest.NewRecorder(), 200, 2, false},
		{"no body", httptest.NewRecorder(), 204, 1, false},
	} {
		r.ProtoMajor = tt.major
		e := (&Client{w: tt.w, r: r}).Events(tt.status, nil)
		if got := e.conn != nil; got != tt.want {
			t.Errorf("%s: got direct writes %v", tt.name, got)
		}
	}
}

// wrappedWriter is the writer of a filter: every write of the answer must go through it.
type wrappedWriter struct{ http.ResponseWriter }

func (w wrappedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
