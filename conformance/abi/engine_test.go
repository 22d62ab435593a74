package abi

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// engineAnswer is the scripted engine's answer to a request without a stream.
const engineAnswer = `{"id":"c1","object":"text_completion","model":"sim","choices":[{"index":0,"text":"well met","finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4}}`

// engine is an engine whose answers the test writes, if needed byte by byte. It
// records its requests.
type engine struct {
	*httptest.Server
	mu     sync.Mutex
	seen   []seen
	answer func(w http.ResponseWriter, r *http.Request, body string) // nil: engineAnswer
}

// seen is one received request.
type seen struct {
	method, path string
	header       http.Header
	body         string
}

func startEngine(t *testing.T) *engine {
	t.Helper()
	e := &engine{}
	e.Server = httptest.NewServer(http.HandlerFunc(e.serve))
	return e
}

func (e *engine) serve(w http.ResponseWriter, r *http.Request) {
	data, _ := io.ReadAll(r.Body)
	if r.Method == http.MethodGet {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"object":"list","data":[{"id":"sim","object":"model"}]}`)
		return
	}
	e.mu.Lock()
	e.seen = append(e.seen, seen{r.Method, r.URL.RequestURI(), r.Header.Clone(), string(data)})
	answer := e.answer
	e.mu.Unlock()
	if answer != nil {
		answer(w, r, string(data))
		return
	}
	if strings.Contains(string(data), `"stream":true`) {
		events(w, 3, func(int) {})
		return
	}
	w.Header().Set("Content-Type", "application/json")
	io.WriteString(w, engineAnswer)
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

// script sets the engine's answers.
func (e *engine) script(answer func(w http.ResponseWriter, r *http.Request, body string)) {
	e.mu.Lock()
	e.answer = answer
	e.mu.Unlock()
}

// last returns the last received request; ok is false before the first.
func (e *engine) last() (s seen, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.seen) == 0 {
		return seen{}, false
	}
	return e.seen[len(e.seen)-1], true
}

// count returns the number of received requests.
func (e *engine) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.seen)
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
