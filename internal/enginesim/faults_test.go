package enginesim

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

func TestFaultsRefused(t *testing.T) {
	for _, cfg := range []Config{
		{Fail: "500"}, {Fail: "1:what"}, {Fail: "2:500"}, {Fail: "-0.1:500"}, {Fail: "NaN:500"}, {Fail: ":500"}, {Hang: "lunch"}, {DieAfter: -1},
		{Role: "none"}, {Connector: "other"}, {KVBlocks: -1}, {Lease: -time.Second},
	} {
		if _, err := New(cfg); err == nil {
			t.Errorf("%+v accepted", cfg)
		}
	}
	e := newBare(t, Config{Fail: "1:500"})
	if err := e.SetFault("1:what", 0, ""); err == nil {
		t.Error("unknown fault accepted")
	}
	if kind, _ := e.Faults.Draw(); kind != core.Fail500 {
		t.Errorf("a refused change removed the fault %q", kind)
	}
}

func TestFaultRate(t *testing.T) {
	draw := func(seed uint64) (hits int, pattern string) {
		e := newBare(t, Config{Fail: "0.25:500", Seed: seed})
		for range 1000 {
			if kind, _ := e.Faults.Draw(); kind == core.Fail500 {
				hits++
				pattern += "x"
			} else {
				pattern += "."
			}
		}
		return hits, pattern
	}
	hits, first := draw(5)
	if hits < 200 || hits > 300 {
		t.Errorf("%d of 1000 at rate 0.25", hits)
	}
	if _, again := draw(5); again != first {
		t.Error("the same seed draws differently")
	}
	if _, other := draw(6); other == first {
		t.Error("seeds draw alike")
	}
}

// TestFaultAnswers checks the answers of each kind of fault, unary and streaming.
func TestFaultAnswers(t *testing.T) {
	e := startEngine(t, Config{})
	url := e.URL() + core.RouteCompletions
	unary, streaming := completion("hello", `"max_tokens":8`), completion("hello", `"max_tokens":8,"stream":true`)
	short := completion("hello", `"max_tokens":1,"stream":true`)
	set := func(t *testing.T, fail string) {
		t.Helper()
		if a := post(t, e.URL()+"/sim/fault", `{"fail":"`+fail+`"}`); a.status != 200 {
			t.Fatalf("set fault: %d %s", a.status, a.body)
		}
	}
	for kind, status := range map[string]int{core.Fail500: 500, core.Fail503: 503, core.Fail429: 429, core.Fail400: 400} {
		t.Run(kind, func(t *testing.T) {
			set(t, "1:"+kind)
			for _, body := range []string{unary, streaming} {
				a := post(t, url, body)
				if a.status != status || a.field(t, "error", "code").(json.Number).String() != kind {
					t.Errorf("post(url, body) = %d, %s", a.status, a.body)
				}
			}
		})
	}
	for kind, check := range map[string]func(error) bool{
		core.FailReset: func(err error) bool { return errors.Is(err, syscall.ECONNRESET) },
		core.FailClose: func(err error) bool { return errors.Is(err, io.EOF) },
	} {
		t.Run(kind, func(t *testing.T) {
			set(t, "1:"+kind)
			for _, body := range []string{unary, streaming} {
				conn, err := net.Dial("tcp", e.Addr())
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				req, _ := http.NewRequest(http.MethodPost, url, strings.NewReader(body))
				req.Write(conn)
				if n, err := conn.Read(make([]byte, 1)); n != 0 || !check(err) {
					t.Errorf("read %d bytes, %v", n, err)
				}
			}
		})
	}
	t.Run(core.FailCut, func(t *testing.T) {
		set(t, "1:cut")
		for _, body := range []string{unary, streaming, short} {
			a, err := try(t.Context(), url, body)
			if a.status != 200 || err == nil || len(a.body) == 0 || strings.Contains(string(a.body), "[DONE]") || json.Valid(a.body) {
				t.Errorf("try(url, body) = %d, %q, %v", a.status, a.body, err)
			}
		}
	})
	t.Run(core.FailGarbage, func(t *testing.T) {
		set(t, "1:garbage")
		if a := post(t, url, unary); a.status != 200 || json.Valid(a.body) {
			t.Errorf("post(url, unary) = %d, %q", a.status, a.body)
		}
	})
	t.Run(core.FailSSEError, func(t *testing.T) {
		set(t, "1:sse-error")
		events := stream(t, url, streaming)
		if n := len(events); n != core.StreamEventsBeforeFault+2 || !strings.HasPrefix(events[n-2], `{"error": {"message": `) || events[n-1] != "[DONE]" {
			t.Errorf("events %q", events)
		}
		if events := stream(t, url, short); len(events) != 3 || !strings.HasPrefix(events[1], `{"error":`) {
			t.Errorf("events %q", events)
		}
		if a := post(t, url, unary); a.status != 500 {
			t.Errorf("unary: %d %s", a.status, a.body)
		}
	})
	t.Run(core.FailSlow, func(t *testing.T) {
		set(t, "1:slow")
		start := time.Now()
		if a := post(t, url, unary); a.status != 200 || time.Since(start) < core.SlowAdmission {
			t.Errorf("%d after %v", a.status, time.Since(start))
		}
	})
	set(t, "")
	if a := post(t, url, unary); a.status != 200 {
		t.Errorf("without a fault: %d %s", a.status, a.body)
	}
	if a := post(t, e.URL()+"/sim/fault", `{"fial":"1:500"}`); a.status != 400 {
		t.Errorf("unknown field: %d %s", a.status, a.body)
	}
}

func TestFaultLoadAndNoParams(t *testing.T) {
	pd := startPair(t, func(c *Config) { c.Lease = time.Hour })
	prompt := words(1, 40)
	params := pd.prefill(t, prompt)
	pd.d.SetFault("1:load", 0, "")
	if a := pd.decode(t, prompt, params); a.status != 500 {
		t.Errorf("unary: %d %s", a.status, a.body)
	}
	events := stream(t, pd.d.URL()+core.RouteCompletions, completion(prompt, `"stream":true,"kv_transfer_params":`+params))
	if len(events) != 2 || !strings.HasPrefix(events[0], `{"error":`) {
		t.Errorf("stream %q", events)
	}
	if s := pd.p.State(); s.BlocksPinned != 3 {
		t.Errorf("a failed load freed the prefill: %+v", s)
	}
	if a := post(t, pd.d.URL()+core.RouteCompletions, completion(prompt, "")); a.status != 200 {
		t.Errorf("without a transfer: %d %s", a.status, a.body)
	}
	pd.p.SetFault("1:no-params", 0, "")
	a := post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,`+prefillParams))
	if a.status != 200 || a.params(t) != "null" {
		t.Errorf("no-params: %d %s", a.status, a.body)
	}
	if s := pd.p.State(); s.BlocksPinned != 3 {
		t.Errorf("pinned without parameters: %+v", s)
	}
}

// TestHangs: a request hangs in its phase until the client leaves. Then nothing
// of it remains.
func TestHangs(t *testing.T) {
	for _, phase := range []string{core.HangPrefill, core.HangDecode, core.HangHead, core.HangStream} {
		t.Run(phase, func(t *testing.T) {
			e := startEngine(t, Config{Hang: phase})
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, e.URL()+core.RouteCompletions, strings.NewReader(completion("hello", `"stream":true`)))
			if phase == core.HangHead {
				go func() {
					eventually(t, "a connection", func() bool { return e.State().ConnectionsOpen == 1 })
					leave()
				}()
			}
			resp, err := http.DefaultClient.Do(req)
			if phase == core.HangHead {
				if err == nil {
					t.Error("answered")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			eventually(t, "a running request", func() bool { return e.State().RequestsRunning == 1 })
			if phase == core.HangStream {
				br := bufio.NewReader(resp.Body)
				for range 2 * core.StreamEventsBeforeFault {
					if _, err := br.ReadString('\n'); err != nil {
						t.Fatal(err)
					}
				}
			}
			leave()
			eventually(t, "an abort", func() bool { s := e.State(); return s.Aborted == 1 && s.BlocksUsed == 0 })
		})
	}
	t.Run(core.HangConnect, func(t *testing.T) {
		e := startEngine(t, Config{Hang: core.HangConnect})
		ctx, leave := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer leave()
		if a, err := try(ctx, e.URL()+core.RouteCompletions, completion("hello", "")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("try = %d, %v", a.status, err)
		}
		if s := e.State(); s.Requests != 0 || s.ConnectionsOpen == 0 {
			t.Errorf("state %+v", s)
		}
		e.SetFault("", 0, "")
		if a := post(t, e.URL()+core.RouteCompletions, completion("hello", "")); a.status != 200 {
			t.Errorf("status after the fault: %d", a.status)
		}
	})
}

// TestDieAfter: a request kills the engine with all its connections.
func TestDieAfter(t *testing.T) {
	e := startEngine(t, Config{DieAfter: 2, DecodeUsPerToken: 20000})
	ended := make(chan error, 1)
	runs := startedRun(t, Config{DieAfter: 1})
	go func() { ended <- runs.err() }()
	post(t, runs.e.URL()+core.RouteCompletions, completion("x", `"max_tokens":1`))
	if _, err := try(t.Context(), runs.e.URL()+core.RouteCompletions, completion("x", "")); err == nil {
		t.Error("the second request was answered")
	}
	if err := <-ended; err == nil {
		t.Error("Run ended without an error")
	}

	post(t, e.URL()+core.RouteCompletions, completion("x", `"max_tokens":1`))
	events, _ := openStream(t, e.URL()+core.RouteCompletions, completion("x", `"max_tokens":1000,"stream":true`))
	if _, err := try(t.Context(), e.URL()+core.RouteCompletions, completion("x", "")); err == nil {
		t.Error("the third request was answered")
	}
	<-e.Died()
	if list, err := events(); err == nil || len(list) > 900 {
		t.Errorf("the stream continued: %d events, %v", len(list), err)
	}
	if _, err := net.Dial("tcp", e.Addr()); err == nil {
		t.Error("still listening")
	}
}

// running is an engine under Run.
type running struct {
	e    *Engine
	done chan error
}

func (r running) err() error { return <-r.done }

func startedRun(t *testing.T, cfg Config) running {
	t.Helper()
	e := newBare(t, cfg)
	r := running{e, make(chan error, 1)}
	go func() { r.done <- e.Run(t.Context()) }()
	eventually(t, "an address", func() bool { return e.Addr() != "" })
	return r
}
