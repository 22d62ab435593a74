package filter

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/plugins/budget"
)

// TestTrapInEveryCallback runs each callback as one section of a shared script. A trap in
// create needs a separate guest, because no section is chosen by then.
func TestTrapInEveryCallback(t *testing.T) {
	callbacks := []string{
		"request_headers", "request_body", "request_trailers",
		"response_headers", "response_body", "response_trailers", "done", "log", "delete",
	}
	script, left := "", ""
	for _, c := range callbacks {
		script += "[" + c + "]\n" + c + ": trap\n"
		left += "[" + c + "]\ndelete: say left\n"
	}
	for _, open := range []bool{true, false} {
		for _, tt := range []struct {
			script    string
			callbacks []string
		}{{script, callbacks}, {"[main]\ncreate: trap", []string{"create"}}} {
			w := newWorld(t)
			s := spec("f", tt.script)
			s.FailOpen, s.Timeout = open, time.Minute // on a busy machine, a new VM starts late
			w.start(s)
			w.start(spec("other", left))
			srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
				b, _ := io.ReadAll(r.Body)
				rw.Header().Set("Trailer", "X-End")
				rw.Write(b)
				rw.Header().Set("X-End", "e")
			})
			for _, callback := range tt.callbacks {
				t.Run(fmt.Sprintf("%s, fail open %v", callback, open), func(t *testing.T) {
					w.trapTwice(t, srv, callback, open)
				})
			}
		}
	}
}

// trapTwice sends two requests whose callback traps in the first plugin, and
// checks the answers. The second request gets a new VM.
func (w *world) trapTwice(t *testing.T, srv *httptest.Server, callback string, open bool) {
	before := len(w.meter.all())
	for range 2 {
		req, _ := http.NewRequest("POST", srv.URL, struct{ io.Reader }{strings.NewReader("hello")})
		req.Header.Set("X-Script", callback)
		req.Trailer = http.Header{"X-Sum": {"42"}}
		resp, err := srv.Client().Do(req)
		if err != nil {
			if open || callback != "response_trailers" {
				t.Fatal(err)
			}
			continue
		}
		b, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		w.waitIdle(0) // done, log and delete run in the background
		after := callback == "done" || callback == "log" || callback == "delete"
		switch {
		case open || after:
			if resp.StatusCode != 200 || string(b) != "hello" || err != nil {
				t.Errorf("got %d %q %v", resp.StatusCode, b, err)
			}
		case callback == "response_trailers": // the client has the head, so the connection is cut
			if err == nil {
				t.Errorf("a complete answer arrived: %d %q", resp.StatusCode, b)
			}
		default:
			if resp.StatusCode != 503 || !strings.Contains(string(b), `"code":"plugin_failed"`) || resp.Header.Get("Retry-After") != "1" {
				t.Errorf("got %d %q %v", resp.StatusCode, b, err)
			}
		}
	}
	w.waitIdle(0)
	if got := w.meter.all()[before:]; len(got) != 2 || got[0] != "trap" || got[1] != "trap" {
		t.Errorf("failures %q", got)
	}
}

// TestOtherStreamsOfALostVM: streams are in every state when their VM is lost.
func TestOtherStreamsOfALostVM(t *testing.T) {
	for _, open := range []bool{true, false} {
		t.Run(fmt.Sprintf("fail open %v", open), func(t *testing.T) {
			w := newWorld(t)
			s := spec("f", `[trap]
request_headers: trap
[paused]
request_headers: say paused
request_headers: return 1
[held]
response_body: say held
response_body: return 1
[stream]
response_body: say $size`)
			s.FailOpen = open
			w.start(s)
			lines := make(chan string, 1)
			srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
				if r.Header.Get("X-Script") == "stream" {
					events(lines)(rw, r)
					return
				}
				echo(rw, r)
			})
			results := map[string]chan string{}
			begun := make(chan struct{})
			for _, section := range []string{"paused", "held", "stream"} {
				results[section] = make(chan string, 1)
				go func() {
					req, _ := http.NewRequest("POST", srv.URL, strings.NewReader("hello"))
					req.Header.Set("X-Script", section)
					resp, err := srv.Client().Do(req)
					if err != nil {
						results[section] <- "no answer"
						return
					}
					in := bufio.NewReader(resp.Body)
					if section == "stream" {
						in.Peek(8)
						close(begun)
					}
					b, err := io.ReadAll(in)
					resp.Body.Close()
					results[section] <- fmt.Sprintf("%d %.10q %v", resp.StatusCode, b, err)
				}()
			}
			w.log.wait(t, 1, "|paused")
			w.log.wait(t, 1, "|held")
			lines <- "data: 0\n"
			<-begun
			do(t, srv, "trap", "")
			if open {
				lines <- "data: 1\n"
				close(lines)
			}
			want := map[string]string{"paused": `200 "hello" <nil>`, "held": `200 "hello" <nil>`, "stream": `200 "data: 0\nda" <nil>`}
			if !open {
				failed := `503 "{\"error\":{" <nil>`
				want = map[string]string{"paused": failed, "held": failed, "stream": `200 "data: 0\n" unexpected EOF`}
			}
			for section, want := range want {
				if got := <-results[section]; got != want {
					t.Errorf("%s: got %s, want %s", section, got, want)
				}
			}
			w.waitIdle(0)
		})
	}
}

// TestLoopsPark: a filter that loops is parked after the third loop, with one
// client, however many failures are allowed. Waiting for a busy instance does
// not count.
func TestLoopsPark(t *testing.T) {
	w := newWorld(t)
	s := spec("f", "[s]\nrequest_headers: loop\n[fine]\nrequest_headers: say fine")
	s.Timeout = 50 * time.Millisecond
	s.FailOpen = true
	d := w.deps()
	d.Budget = budget.New(1000, time.Minute, 0.1/60) // two loops are below the limit
	p := w.startWith(s, d)
	srv := w.serve(echo)
	loops := func() (n int) {
		for _, reason := range w.meter.all() {
			if reason == "timeout" {
				n++
			}
		}
		return n
	}
	for tries := 0; p.State() == Serving; tries++ { // a request that waits too long for an instance does not loop
		if n := loops(); n >= 3 || tries == 1000 {
			t.Fatalf("serving after %d loops of %d requests", n, tries)
		}
		do(t, srv, "s", "x")
	}
	if n := loops(); p.State() != Parked || n != 3 {
		t.Fatalf("%s after %d loops", p.State(), n)
	}
	do(t, srv, "s", "x")
	if n := loops(); n != 3 {
		t.Errorf("%d loops: a parked plugin was called", n)
	}
}

func TestLoopIsEnded(t *testing.T) {
	w := newWorld(t)
	s := spec("f", "[s]\nrequest_headers: loop\n[slow]\nrequest_headers: say $nth")
	s.Timeout = 50 * time.Millisecond
	s.VMs = 2
	w.start(s)
	srv := w.serve(echo)
	if resp, body := do(t, srv, "s", "x"); resp.StatusCode != 503 || !strings.Contains(body, "plugin_failed") {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
	if got := w.meter.all(); !slices.Equal(got, []string{"timeout"}) {
		t.Errorf("failures %q", got)
	}
	if resp, _ := do(t, srv, "slow", "x"); resp.StatusCode != 200 {
		t.Errorf("got %d", resp.StatusCode)
	}
}

// TestBusyVM: a stream that waits too long for a VM fails, and the VM is not
// affected.
func TestBusyVM(t *testing.T) {
	w := newWorld(t)
	s := spec("f", "")
	s.Timeout = 20 * time.Millisecond
	p := w.start(s)
	srv := w.serve(echo)
	v := p.live[0]
	v.lock <- struct{}{}
	if resp, body := do(t, srv, "s", "x"); resp.StatusCode != 503 || !strings.Contains(body, "plugin_busy") {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
	v.exit()
	if resp, _ := do(t, srv, "s", "x"); resp.StatusCode != 200 || v.dead.Load() {
		t.Errorf("got %d", resp.StatusCode)
	}
	if got := w.meter.all(); !slices.Equal(got, []string{"busy"}) {
		t.Errorf("failures %q", got)
	}
}

func TestParked(t *testing.T) {
	for _, open := range []bool{true, false} {
		w := newWorld(t)
		s := spec("f", "[s]\nrequest_headers: trap")
		s.FailOpen = open
		d := w.deps()
		d.Budget = budget.New(2, time.Hour, 0)
		p := w.startWith(s, d)
		srv := w.serve(echo)
		for range 5 {
			do(t, srv, "s", "x")
		}
		if p.State() != Parked || len(w.meter.all()) != 3 {
			t.Errorf("state %s after failures %q", p.State(), w.meter.all())
		}
		resp, body := do(t, srv, "s", "x")
		if open && resp.StatusCode != 200 || !open && (resp.StatusCode != 503 || !strings.Contains(body, "plugin_parked")) {
			t.Errorf("open %v: got %d %q", open, resp.StatusCode, body)
		}
	}
}

// TestVMThatDoesNotStartAgain: the guest keeps a mark in shared data, so that
// only its first VM starts.
func TestVMThatDoesNotStartAgain(t *testing.T) {
	w := newWorld(t)
	s := spec("f", "[main]\nconfigure: incr n\n[s]\nrequest_headers: trap")
	d := w.deps()
	d.Budget = budget.New(3, time.Hour, 0)
	p := w.startWith(s, d)
	p.spec.Config = "[main]\nconfigure: trap"
	srv := w.serve(echo)
	for p.State() != Parked {
		do(t, srv, "s", "x")
	}
	got := w.meter.all()
	if len(got) != 4 || got[0] != "trap" || got[3] != "start" {
		t.Errorf("failures %q", got)
	}
}

func TestStartFails(t *testing.T) {
	for _, tt := range []struct{ name, config, want string }{
		{"vm_start false", "vm", "proxy_on_vm_start answered false"},
		{"configure false", "[main]\nconfigure: return 0", "proxy_on_configure answered false"},
		{"configure traps", "[main]\nconfigure: trap", "proxy_on_configure: trap"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			s := spec("f", tt.config)
			if tt.config == "vm" {
				s.VMConfig = "[main]\nvm_start: return 0"
			}
			p := New(s, w.deps())
			if err := p.Start(t.Context()); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v", err)
			}
		})
	}
	w := newWorld(t)
	s := spec("f", "")
	s.Wasm = []byte("no module")
	if err := New(s, w.deps()).Start(t.Context()); err == nil {
		t.Error("no module, no error")
	}
}

func TestCloseDrains(t *testing.T) {
	w := newWorld(t)
	p := w.start(spec("f", ticking+`[main]
root_done: say root done
root_done: park proxy_done
root_delete: say root deleted
[s]
response_body: say $size`))
	lines := make(chan string)
	srv := w.serve(events(lines))
	req, _ := http.NewRequest("POST", srv.URL, nil)
	req.Header.Set("X-Script", "s")
	resp, err := srv.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	next := New(spec("f", ""), w.deps())
	if err := next.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.chain.Set([]*Plugin{next}, Limits{})
	w.plugins = append(w.plugins, next)
	closed := make(chan error)
	go func() { closed <- p.Close(context.Background()) }()
	for p.State() != Closed {
		<-nap()
	}
	in := bufio.NewReader(resp.Body)
	lines <- "data: 0\n"
	if got, err := in.ReadString('\n'); got != "data: 0\n" || err != nil {
		t.Fatalf("got %q %v", got, err)
	}
	w.log.wait(t, 1, "f: s|response_body|2|8") // still on the old version
	if got := w.log.find("root"); len(got) > 0 {
		t.Errorf("Close returned before a stream ended: %q", got)
	}
	close(lines)
	if err := <-closed; err != nil {
		t.Error(err)
	}
	w.log.wait(t, 1, "root deleted")
}

func TestCloseThatCannotWait(t *testing.T) {
	w := newWorld(t)
	p := w.start(spec("f", "[s]\nrequest_headers: say paused\nrequest_headers: return 1\n[main]\nroot_done: return 0"))
	srv := w.serve(echo)
	answer := make(chan int)
	go func() {
		resp, _ := do(t, srv, "s", "x")
		answer <- resp.StatusCode
	}()
	w.log.wait(t, 1, "|paused")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.Close(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if got := <-answer; got != 503 {
		t.Errorf("got %d", got)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Error(err)
	}
	// A chain of closed plugins lets no request pass.
	if resp, body := do(t, srv, "s", "x"); resp.StatusCode != 503 || !strings.Contains(body, "draining") {
		t.Errorf("got %d %q", resp.StatusCode, body)
	}
}

// TestManyStreams runs a thousand streams on two VMs. Some trap, some pause,
// some get an answer of the guest.
func TestManyStreams(t *testing.T) {
	before := runtime.NumGoroutine()
	w := newWorld(t)
	s := spec("f", ticking+`[pass]
request_body: !eos return 1
response_body: say $size
[pause]
request_headers: park proxy_continue_stream 0
request_headers: return 1
[local]
request_headers: `+deny+`
[trap]
response_headers: trap`)
	s.VMs, s.FailOpen = 2, true
	p := w.start(s)
	w.start(spec("g", "[trap]\nrequest_headers: say 1"))
	srv := w.serve(echo)
	sections := []string{"pass", "pause", "local", "pass", "none"}
	var wg sync.WaitGroup
	var denied atomic.Int32
	for i := range 1000 {
		section := sections[i%len(sections)]
		if i%250 == 249 {
			section = "trap"
		}
		wg.Go(func() {
			req, _ := http.NewRequest("POST", srv.URL, strings.NewReader("hello"))
			req.Header.Set("X-Script", section)
			resp, err := srv.Client().Do(req)
			if err != nil {
				t.Errorf("%s: srv.Client().Do(req) = %v, want nil", section, err)
				return
			}
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			// A stream that loses the filter through a trap of another stream
			// passes, too.
			got := fmt.Sprintf("%d %s", resp.StatusCode, b)
			if err != nil || got != "200 hello" && (section != "local" || got != "403 denied") {
				t.Errorf("%s: got %q %v", section, got, err)
			}
			if got == "403 denied" {
				denied.Add(1)
			}
		})
		if i%64 == 63 {
			wg.Wait()
		}
	}
	wg.Wait()
	if denied.Load() < 100 {
		t.Errorf("only %d streams were answered by the guest", denied.Load())
	}
	w.waitIdle(0)
	w.waitIdle(1)
	p.mu.Lock()
	live := slices.Clone(p.live)
	p.mu.Unlock()
	for _, v := range live {
		v.mu.Lock()
		if len(v.streams) > 0 {
			t.Errorf("%d contexts remain", len(v.streams))
		}
		v.mu.Unlock()
	}
	for _, p := range w.plugins {
		if err := p.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	srv.Close()
	for runtime.NumGoroutine() > before+2 {
		<-nap()
	}
}

// TestBodyChangedFromATickWhileItGrows: between two chunks the guest changes a
// body that it holds.
func TestBodyChangedFromATickWhileItGrows(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", `[main]
configure: call proxy_set_tick_period_milliseconds 1
tick: wake
[s]
request_body: say $size
request_body: !eos park proxy_set_buffer_bytes 0 0 0 "+"
request_body: !eos return 1`))
	srv := w.serve(echo)
	body, answers := slowBody(t, srv, "s")
	for i := range 20 {
		io.WriteString(body, "x")
		w.log.wait(t, i+1, "s|request_body|")
		w.log.wait(t, i+1, "proxy_set_buffer_bytes=0")
	}
	body.Close()
	if got := readAll(t, <-answers); got != strings.Repeat("+", 20)+strings.Repeat("x", 20) {
		t.Errorf("got %q", got)
	}
}

// TestContinueOfTheOtherDirection: a callback of the request releases held data
// of the answer, while the handler writes nothing.
func TestContinueOfTheOtherDirection(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", `[s]
response_body: 1 return 1
request_body: eos call proxy_continue_stream 1`))
	seen := make(chan struct{})
	srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
		io.WriteString(rw, "early")
		io.Copy(io.Discard, r.Body)
		<-seen
	})
	req, _ := http.NewRequest("POST", srv.URL, strings.NewReader("x"))
	req.Header.Set("X-Script", "s")
	resp, err := srv.Client().Do(req)
	close(seen)
	if err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, resp); got != "early" {
		t.Errorf("got %q", got)
	}
}

// TestRequestBodyBesideAReply: the reader of a request body holds no lock of the
// answer, so it must not read the answer's hops. Only the race detector sees the
// mistake.
func TestRequestBodyBesideAReply(t *testing.T) {
	s := &stream{}
	s.req.hops = []hop{{}}
	var wg sync.WaitGroup
	wg.Go(func() {
		s.out.Lock()
		defer s.out.Unlock()
		s.resp.hops = []hop{{}, {}} // as in reply
	})
	wg.Go(func() {
		s.in.Lock()
		defer s.in.Unlock()
		s.passed(request)
	})
	wg.Wait()
	if len(s.req.hops) != 1 || len(s.resp.hops) != 2 {
		t.Errorf("%d and %d hops", len(s.req.hops), len(s.resp.hops))
	}
}

// TestATrapIsOneLine: a trap is one line of the log, at each level, with the panic that the guest
// printed. At debug level the line has the stack.
func TestATrapIsOneLine(t *testing.T) {
	for _, level := range []slog.Level{slog.LevelDebug, slog.LevelInfo} {
		var out testbed.Log
		w := newWorld(t)
		d := w.deps()
		d.Log = slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: level}))
		w.startWith(spec("f", "[s]\nrequest_headers: trap"), d)
		srv := w.serve(echo)
		if resp, _ := do(t, srv, "fine", ""); resp.StatusCode != 200 {
			t.Errorf("got %d", resp.StatusCode)
		}
		if resp, _ := do(t, srv, "s", ""); resp.StatusCode != 503 {
			t.Errorf("got %d", resp.StatusCode)
		}
		w.waitIdle(0)
		text := out.String()
		if n := strings.Count(text, "level="); n != 1 || !strings.Contains(text, `printed="panic: runtime error: invalid memory address`) || !strings.Contains(text, "goroutine 1 [running]") {
			t.Errorf("%s: got %q", level, text)
		}
		if got := strings.Contains(text, " stack="); got != (level == slog.LevelDebug) {
			t.Errorf("%s: stack in %q: %v", level, text, got)
		}
	}
}
