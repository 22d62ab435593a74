package abi

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// engineAnswer is the scripted engine's answer to a request without a stream.
const engineAnswer = `{"id":"c1","object":"text_completion","model":"sim","choices":[{"index":0,"text":"well met","finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4}}`

// answers is the scripted engine's usual answer to a leg.
func answers(w http.ResponseWriter, leg testbed.Leg) {
	if strings.Contains(leg.Text, `"stream":true`) {
		events(w, 3, func(int) {})
		return
	}
	w.Header().Set("Content-Type", "application/json")
	io.WriteString(w, engineAnswer)
}

// last returns the last leg of the engine; without one, an empty leg.
func (n *node) last() testbed.Leg {
	legs := n.engine.Seen(nil)
	if len(legs) == 0 {
		return testbed.Leg{Request: &http.Request{}}
	}
	return legs[len(legs)-1]
}

// events writes n events and the end of a stream. It calls wait before each event.
func events(w http.ResponseWriter, n int, wait func(i int)) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.WriteHeader(200)
	flush := http.NewResponseController(w).Flush
	flush()
	for i := range n {
		wait(i)
		io.WriteString(w, event(i))
		flush()
	}
	io.WriteString(w, "data: [DONE]\n\n")
}

// event is the i-th event of the scripted engine's streams.
func event(i int) string {
	return fmt.Sprintf("data: {\"id\":\"c1\",\"object\":\"text_completion\",\"model\":\"sim\",\"choices\":[{\"index\":0,\"text\":\"w%d\",\"finish_reason\":null}]}\n\n", i)
}

// seen is one request that a side received.
type seen struct {
	method, path string
	header       http.Header
	body         string
}

// side is an upstream that filters call.
type side struct {
	*httptest.Server
	mu     sync.Mutex
	calls  []seen
	answer func(w http.ResponseWriter, r *http.Request)
}

func startSide(t *testing.T) *side {
	t.Helper()
	s := &side{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, _ := io.ReadAll(r.Body)
		s.mu.Lock()
		s.calls = append(s.calls, seen{r.Method, r.URL.RequestURI(), r.Header.Clone(), string(data)})
		answer := s.answer
		s.mu.Unlock()
		if answer != nil {
			answer(w, r)
			return
		}
		w.Header().Set("X-Side", "1")
		io.WriteString(w, "from the side")
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *side) script(answer func(w http.ResponseWriter, r *http.Request)) {
	s.mu.Lock()
	s.answer = answer
	s.mu.Unlock()
}

func (s *side) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.calls)
}
