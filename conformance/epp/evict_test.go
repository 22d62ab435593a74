package epp

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// evicting are keys of a picker with places for two requests, and classes of which batch ends for others.
const (
	evicting = "limits.max_exchanges = 2\nlimits.queue_timeout = \"5m\"\nlimits.priority_header = \"x-priority\"\nlimits.trust_priority = true\npolicy.evict = \"lowest_youngest\"\n"
	evicted  = "[[priority_class]]\nname = \"batch\"\npriority = -10\n[[priority_class]]\nname = \"interactive\"\npriority = 10\n"
)

// ending is the answer to a request, which has ended.
type ending struct {
	status int
	header http.Header
	text   string
	err    error // of the body
}

// refused reports whether the request got the error evicted as its whole answer.
func (e *ending) refused() bool {
	return e.status == 429 && e.err == nil && e.header.Get("Retry-After") == "1" && strings.HasPrefix(e.text, `{"error":{`) && strings.Contains(e.text, `"code":"evicted"`)
}

// told reports whether the stream ended with the error evicted as its last event.
func (e *ending) told() bool {
	events := strings.Split(strings.TrimSuffix(e.text, "\n\n"), "\n\n")
	last := events[len(events)-1]
	return e.status == 200 && e.err == nil && strings.HasPrefix(last, `data: {"error":{`) && strings.Contains(last, `"code":"evicted"`)
}

// cut reports whether the stream ended with a cut.
func (e *ending) cut() bool { return e.status == 200 && e.err != nil }

// crowd takes both places with endless streams of the class batch, until ctx ends. With shown it waits
// until both clients have bytes of their answers. ended has the answers, in the order of their ends.
func (w *world) crowd(t *testing.T, ctx context.Context, c *http.Client, mode string, shown bool) (ended chan *ending) {
	t.Helper()
	begun := make(chan bool, 2)
	ended = make(chan *ending, 2)
	for _, tag := range []string{"a ", "b "} {
		go func() { // ends with ctx
			resp, err := post(ctx, c, w.url(mode), body(tag+mode, 200, 100_000, true), "x-priority", "batch")
			if err != nil {
				ended <- &ending{err: err}
				return
			}
			defer resp.Body.Close()
			r := bufio.NewReader(resp.Body)
			if _, err := r.Peek(1); err == nil {
				begun <- true
			}
			text, err := io.ReadAll(r)
			ended <- &ending{resp.StatusCode, resp.Header, string(text), err}
		}()
	}
	until(t, "both requests run", func() bool { return w.computing(t) == 2 && (!shown || len(begun) == 2) })
	return ended
}

// computing returns the number of requests that the decode engines run.
func (w *world) computing(t *testing.T) (n int) {
	t.Helper()
	for _, name := range decodes {
		s, _ := w.state(t, name)
		n += s.RequestsRunning
	}
	return n
}

// TestEviction: a request of a higher class gets the place of a running one. The client of that one learns
// of it, and its engine stops.
func TestEviction(t *testing.T) {
	eachSidecar(t, func(t *testing.T, k *kind) {
		w := newWorld(t, setting{kind: k, picker: evicting, tables: evicted, token: 10_000})
		for mode := range w.listeners {
			w.evicts(t, mode)
		}
		t.Run("metadata", func(t *testing.T) { // the picker holds the end of the answer back
			w := newWorld(t, setting{kind: k, picker: evicting + "epp.metadata = \"pdproxy\"\n", tables: evicted, token: 10_000})
			w.evicts(t, "closed")
		})
	})
}

// evicts lets requests of a higher class end those of the class batch, before the first token and after it.
// The sidecar of llm-d sends the head of an answer before the first token.
func (w *world) evicts(t *testing.T, mode string) {
	for version, c := range clients {
		for _, silent := range []bool{true, false} {
			want := (*ending).cut
			switch response := w.listeners[mode].Response; {
			case response == "BUFFERED", silent && w.kind != &llmdSidecar:
				want = (*ending).refused
			case response == "FULL_DUPLEX_STREAMED" && !silent:
				want = (*ending).told
			}
			t.Run(fmt.Sprint(mode, " ", version, map[bool]string{true: " before a token"}[silent]), func(t *testing.T) {
				w.evictsOne(t, c, mode, silent, want)
			})
		}
	}
}

func (w *world) evictsOne(t *testing.T, c *http.Client, mode string, silent bool, want func(*ending) bool) {
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	if silent {
		w.fault(t, decodes, "", "decode")
	}
	ended := w.crowd(t, ctx, c, mode, !silent && mode != "buffered")
	w.fault(t, decodes, "", "") // the requests of the crowd hang until they end
	if resp, text := answer(t, c, w.url(mode), body("urgent "+mode, 200, 4, false), "x-priority", "interactive"); resp.StatusCode != 200 {
		t.Errorf("the urgent request gets %d %s", resp.StatusCode, text)
	}
	if e := <-ended; !want(e) {
		t.Errorf("the ended request gets %d %v %s, %v", e.status, e.header, tail(e.text, 3), e.err)
	}
	until(t, "the engines run only the other request", func() bool { return w.computing(t) == 1 })
	leave()
	<-ended
	w.idle(t)
}

// TestFullQueue: if the queue of the picker is full, a request of a higher class gets the place of one that
// waits. The gateway gives the client of that one the error.
func TestFullQueue(t *testing.T) {
	w := newWorld(t, setting{picker: strings.Replace(evicting, `policy.evict = "lowest_youngest"`, "limits.queue = 1", 1), tables: evicted, token: 10_000})
	for mode := range w.listeners {
		for version, c := range clients {
			t.Run(mode+" "+version, func(t *testing.T) { w.displaces(t, c, mode) })
		}
	}
}

func (w *world) displaces(t *testing.T, c *http.Client, mode string) {
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	ended := w.crowd(t, ctx, c, mode, false)
	send := func(class string) <-chan *ending {
		got := make(chan *ending, 1)
		go func() { // ends with the answer
			resp, err := post(t.Context(), c, w.url(mode), body(class+mode, 200, 4, true), "x-priority", class)
			if err != nil {
				got <- &ending{err: err}
				return
			}
			defer resp.Body.Close()
			text, err := io.ReadAll(resp.Body)
			got <- &ending{resp.StatusCode, resp.Header, string(text), err}
		}()
		until(t, "a request waits", func() bool {
			return w.metric(t, "pdproxy_class_requests", `class="`+class+`"`, `state="waiting"`) == 1
		})
		return got
	}
	low := send("batch")
	high := send("default")
	if e := <-low; e.err != nil || e.status != 429 || e.header.Get("Retry-After") != "1" || !strings.Contains(e.text, `"code":"queue_full"`) {
		t.Errorf("the waiting request of the lower class gets %d %v %s", e.status, e.header, e.text)
	}
	leave()
	<-ended
	<-ended
	if e := <-high; e.err != nil || e.status != 200 {
		t.Errorf("the request of the higher class gets %d %s, %v", e.status, e.text, e.err)
	}
	w.idle(t)
}
