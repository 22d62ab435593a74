package conformance

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

const chatPath = "/v1/chat/completions"

// long is a prompt of many KV blocks.
var long = strings.Repeat("the tide comes in and the tide goes out again ", 20)

// eachConnector runs one row of the failure table for every protocol.
func eachConnector(t *testing.T, run func(t *testing.T, connector string)) {
	for _, c := range connectors {
		if only := os.Getenv(connectorsVar); only == "" || slices.Contains(strings.Split(only, ","), c) {
			t.Run(c, func(t *testing.T) { run(t, c) })
		}
	}
}

func slow(phase string, us int) func(string, int, *enginesim.Config) {
	return func(role string, _ int, c *enginesim.Config) {
		if role == enginesim.RoleBoth {
			return
		}
		if phase == enginesim.RolePrefill {
			c.PrefillUsPerToken = us
		} else {
			c.DecodeUsPerToken = us
		}
	}
}

// cleanupCounted asserts that the clean-up of the engines' memory was counted
// and its time measured, unless the engine did it alone.
func (f *fleet) cleanupCounted() {
	f.t.Helper()
	f.eventually("the clean-up is counted and timed", func() bool {
		all, left := f.metric("pdproxy_kv_cleanups_total"), f.metric("pdproxy_kv_cleanups_total", `how="engine_timeout"`)
		return all > 0 && f.metric("pdproxy_kv_cleanup_seconds_count") == all-left
	})
}

func TestAnswersEqualOneEngine(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{})
		bodies := map[string][2]string{
			"chat unary":         {chatPath, chat("hello there", 20, false)},
			"chat stream":        {chatPath, chat(long, 20, true)},
			"completion text":    {"/v1/completions", `{"model":"sim","prompt":"once upon a time","max_tokens":12}`},
			"completion stream":  {"/v1/completions", `{"model":"sim","prompt":"once upon a time","max_tokens":12,"stream":true,"stream_options":{"include_usage":true}}`},
			"completion ids":     {"/v1/completions", `{"model":"sim","prompt":[5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21],"max_tokens":9}`},
			"one token":          {chatPath, chat("just one", 1, false)},
			"one token stream":   {chatPath, chat("just one", 1, true)},
			"no limit":           {chatPath, `{"model":"sim","messages":[{"role":"user","content":"<eos1> at once"}]}`},
			"first token is end": {chatPath, `{"model":"sim","messages":[{"role":"user","content":"<eos1> stream"}],"stream":true}`},
			"no model":           {chatPath, `{"messages":[{"role":"user","content":"who"}],"max_tokens":5}`},
			"parts":              {chatPath, `{"model":"sim","messages":[{"role":"user","content":[{"type":"text","text":"in parts"}]}],"max_tokens":5}`},
		}
		for name, b := range bodies {
			t.Run(name, func(t *testing.T) {
				g := *f
				g.t = t
				a := g.try(b[0], b[1])
				if strings.Contains(b[1], "<eos1>") {
					if a.status != 200 || a.errors > 0 || a.err != nil {
						t.Fatalf("got status %d: %s", a.status, a.body)
					}
					want := g.post(context.Background(), g.alone.URL(), b[0], b[1])
					if a.text != want.text {
						t.Fatalf("got text %q, want %q as from one engine alone", a.text, want.text)
					}
					return
				}
				g.right(a, b[0], b[1])
				if a.header.Get("X-Pdproxy-Prefill") == "" || a.header.Get("X-Request-Id") == "" {
					t.Errorf("placement or request id is missing: %v", a.header)
				}
			})
		}
	})
}

func TestClientLeavesBeforePrefillAnswered(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{engine: slow(enginesim.RolePrefill, 2000)})
		ctx, leave := context.WithCancel(context.Background())
		gone := make(chan answer, 1)
		go func() { gone <- f.post(ctx, f.url, chatPath, chat(long, 20, true)) }()
		f.eventually("prefill works", func() bool { return f.busy(f.prefill) })
		leave()
		if a := <-gone; !errors.Is(a.err, context.Canceled) {
			t.Fatalf("the client got %+v", a)
		}
		f.settled()
		f.eventually("the outcome is counted", func() bool { return f.metric("pdproxy_exchanges_total", `outcome="cancelled"`) == 1 })
	})
}

// After its client has left, the proxy still waits for the answer of a short
// prefill, because only the answer says which blocks the prefill holds. It
// stops a long prefill.
func TestPrefillOfALeftClient(t *testing.T) {
	for name, tt := range map[string]struct {
		us      int
		aborted int64
		cleaned float64
	}{
		"short": {500, 0, 1},
		"long":  {20000, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{prefill: 1, decode: 1, engine: slow(enginesim.RolePrefill, tt.us)})
			ctx, leave := context.WithCancel(context.Background())
			gone := make(chan answer, 1)
			go func() { gone <- f.post(ctx, f.url, chatPath, chat(long, 20, true)) }()
			f.eventually("prefill works", func() bool { return f.busy(f.prefill) })
			leave()
			<-gone
			f.settled()
			s := f.prefill[0].State()
			if s.Aborted != tt.aborted || s.LeasesExpired != 0 {
				t.Errorf("prefill: %d aborted, %d leases expired", s.Aborted, s.LeasesExpired)
			}
			f.eventually("the clean-ups are counted", func() bool { return f.metric("pdproxy_kv_cleanups_total", `how="abort_decode"`) == tt.cleaned })
		})
	}
}

func TestClientLeavesWhileDecodeStreams(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{engine: slow(enginesim.RoleDecode, 20000)})
		f.leaveStream()
		f.settled()
		f.eventually("the outcome is counted", func() bool { return f.metric("pdproxy_exchanges_total", `outcome="cancelled"`) == 1 })
	})
}

// leaveStream makes a client leave after the first event.
func (f *fleet) leaveStream() {
	f.t.Helper()
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	resp := f.open(ctx, chat(long, 2000, true))
	defer resp.Body.Close()
	if _, err := resp.Body.Read(make([]byte, 10)); err != nil {
		f.t.Fatal(err)
	}
	leave()
}

// Decode accepts the request and never processes it. Prefill has answered, and
// its blocks are not read. When the client leaves, they must be freed anyway. A
// client that leaves while decode streams leaves nothing to free.
func TestClientLeavesBetweenTheLegs(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{engine: slow(enginesim.RoleDecode, 20000)})
		f.leaveStream()
		f.settled()
		f.leaveBetweenLegs(chatPath, chat(long, 20, true))
		if connector == enginesim.ConnectorVLLMStore { // its engines hold no blocks for each other
			if n := f.metric("pdproxy_kv_cleanups_total"); n != 0 {
				t.Errorf("the proxy made %v clean-ups", n)
			}
			return
		}
		f.cleanupCounted()
		if n := f.metric("pdproxy_kv_cleanups_total", `how="engine_timeout"`); n > 1 {
			t.Errorf("the proxy left %v clean-ups to the engines' time-outs", n)
		}
	})
}

// leaveBetweenLegs makes a client leave while blocks are held for a decode that
// does not process its leg, and waits until they are free.
func (f *fleet) leaveBetweenLegs(path, body string) {
	f.t.Helper()
	for _, d := range f.decode {
		d.SetFault("", 0, "head")
	}
	ctx, leave := context.WithCancel(context.Background())
	gone := make(chan answer, 1)
	go func() { gone <- f.post(ctx, f.url, path, body) }()
	f.eventually("blocks are held for decode", f.heldForDecode)
	leave()
	<-gone
	f.eventually("the proxy has noticed", func() bool { return f.metric("pdproxy_leases_open") == 0 }) // else decode may still answer it
	for _, d := range f.decode {
		d.SetFault("", 0, "")
		f.eventually("decode has noticed", func() bool { return d.State().RequestsHanging == 0 })
	}
	f.settled()
}

// heldForDecode reports whether an engine holds blocks, or a request, for decode.
func (f *fleet) heldForDecode() bool {
	for _, e := range append(f.prefill, f.decode...) { // with some protocols decode already holds the blocks
		s := e.State()
		// Engines of vllm-store hold nothing for each other: decode hangs when prefill has answered.
		if s.BlocksPinned > 0 || s.RequestsWaiting > 0 || f.connector == enginesim.ConnectorVLLMStore && s.RequestsHanging > 0 {
			return true
		}
	}
	return false
}

func TestPrefillRefuses(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{})
		for _, p := range f.prefill {
			p.SetFault("1:400", 0, "")
		}
		a := f.try(chatPath, chat("no", 5, true))
		if a.status != 400 || !strings.Contains(a.body, "message") {
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
		f.settled()
		if n := f.metric("pdproxy_retries_total"); n != 0 {
			t.Errorf("a 4xx was retried %v times", n)
		}
	})
}

func TestDecodeRefuses(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{})
		for _, d := range f.decode {
			d.SetFault("1:400", 0, "")
		}
		a := f.try(chatPath, chat(long, 5, false))
		if a.status != 400 {
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
		for _, d := range f.decode {
			d.SetFault("", 0, "")
		}
		f.settled()
	})
}

// faultsBeforeFirstByte are the ways in which an engine fails a request before
// its first byte.
var faultsBeforeFirstByte = []string{"500", "503", "reset", "close", "garbage"}

func TestLegFailsBeforeFirstByteAndIsRetried(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{config: func(c *config.Config) {
			c.Retry.MinBudget = 27 // each request may reach the faulty engine first; the share of 27 requests would allow 5 more than the usual 10
		}})
		for _, phase := range []string{"prefill", "decode"} {
			for _, kind := range faultsBeforeFirstByte {
				if kind == "garbage" && phase == "decode" {
					continue // the proxy does not check the content of an unary answer
				}
				t.Run(phase+" "+kind, func(t *testing.T) {
					g := *f
					g.t = t
					bad := g.prefill[0]
					if phase == "decode" {
						bad = g.decode[0]
					}
					bad.SetFault("1:"+kind, 0, "")
					for range 3 {
						body := chat("try "+kind+phase, 8, true)
						g.right(g.try(chatPath, body), chatPath, body)
					}
					bad.SetFault("", 0, "")
					g.settled()
				})
			}
		}
		if f.metric("pdproxy_retries_total") == 0 {
			t.Error("no retry was counted")
		}
	})
}

func TestEveryEngineOfAPhaseFails(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		for _, phase := range []string{"prefill", "decode"} {
			t.Run(phase, func(t *testing.T) {
				f := startFleet(t, connector, fleetOptions{})
				bad := f.prefill
				if phase == "decode" {
					bad = f.decode
				}
				for _, e := range bad {
					e.SetFault("1:500", 0, "")
				}
				a := f.try(chatPath, chat("all fail", 5, true))
				if a.status != 502 || !strings.Contains(a.body, phase) {
					t.Fatalf("got status %d, want 502 naming %s: %s", a.status, phase, a.body)
				}
				for _, e := range bad {
					e.SetFault("", 0, "")
				}
				f.settled()
			})
		}
	})
}

// usualLegTime is more than the time of a leg on an engine that does not hang, also on a busy machine.
const usualLegTime = time.Second

func TestPrefillTimesOut(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{config: func(c *config.Config) {
			c.Timeouts.Prefill = config.Duration(usualLegTime)
			c.Timeouts.FirstByte = config.Duration(10 * time.Second)
		}})
		f.prefill[0].SetFault("", 0, "prefill")
		body := chat("one hangs", 8, true)
		for range 2 {
			f.right(f.try(chatPath, body), chatPath, body)
		}
		f.prefill[1].SetFault("", 0, "prefill")
		a := f.try(chatPath, body+" ")
		if a.status != 504 || !strings.Contains(a.body, "prefill") {
			t.Fatalf("got status %d, want 504 naming prefill: %s", a.status, a.body)
		}
		f.prefill[0].SetFault("", 0, "")
		f.prefill[1].SetFault("", 0, "")
		f.settled()
	})
}

func TestDecodeTimesOutBeforeFirstByte(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{config: func(c *config.Config) {
			c.Timeouts.FirstByte = config.Duration(usualLegTime)
		}})
		f.decode[0].SetFault("", 0, "head")
		body := chat(long, 8, true)
		for range 2 {
			f.right(f.try(chatPath, body), chatPath, body)
		}
		f.decode[1].SetFault("", 0, "head")
		if a := f.try(chatPath, body); a.status != 504 || !strings.Contains(a.body, "decode") {
			t.Fatalf("got status %d, want 504 naming decode: %s", a.status, a.body)
		}
		f.decode[0].SetFault("", 0, "")
		f.decode[1].SetFault("", 0, "")
		f.settled()
	})
}

func TestDecodeDiesMidStream(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		for _, kind := range []string{"cut", "kill"} {
			t.Run(kind, func(t *testing.T) {
				f := startFleet(t, connector, fleetOptions{prefill: 1, decode: 1, engine: slow(enginesim.RoleDecode, 5000)})
				if kind == "cut" {
					f.decode[0].SetFault("1:cut", 0, "")
				}
				resp := f.open(context.Background(), chat(long, 400, true))
				if kind == "kill" {
					if _, err := resp.Body.Read(make([]byte, 10)); err != nil {
						t.Fatal(err)
					}
					f.decode[0].Kill()
				}
				a := readRest(resp)
				if a.err != nil || a.errors != 1 || a.done {
					t.Fatalf("%d error events, done %v, err %v: %s", a.errors, a.done, a.err, a.body)
				}
				f.eventually("the broken stream is counted", func() bool { return f.metric("pdproxy_broken_streams_total") == 1 })
				f.settled()
			})
		}
	})
}

func TestDecodeDiesInsideAUnaryAnswer(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{engine: slow(enginesim.RoleDecode, 5000)})
		body := chat(long, 60, false)
		got := make(chan answer, 1)
		go func() { got <- f.try(chatPath, body) }()
		var busy *enginesim.Engine
		f.eventually("decode works", func() bool {
			for _, d := range f.decode {
				if d.State().OutputTokens > 0 || d.State().RequestsRunning > 0 {
					busy = d
				}
			}
			return busy != nil
		})
		busy.Kill()
		f.right(<-got, chatPath, body)
		f.settled()
	})
}

func TestStreamIsIdleTooLong(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{config: func(c *config.Config) {
			c.Retry.Continue = config.ContinueOff
			c.Timeouts.StreamIdle = config.Duration(300 * time.Millisecond)
		}})
		for _, d := range f.decode {
			d.SetFault("", 0, "stream")
		}
		a := f.try(chatPath, chat(long, 50, true))
		if a.status != 200 || a.errors != 1 || a.done {
			t.Fatalf("got status %d, %d error events, done %v: %s", a.status, a.errors, a.done, a.body)
		}
		f.settled()
		if f.metric("pdproxy_leg_errors_total", `phase="decode"`, `reason="timeout"`) != 1 {
			t.Error("the idle time-out is not counted")
		}
	})
}

// Comments keep a connection alive, but not a stream.
func TestStreamOfComments(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{
		engine: func(role string, _ int, c *enginesim.Config) { c.SSEKeepAlive = 50 * time.Millisecond },
		config: func(c *config.Config) { c.Timeouts.StreamIdle = config.Duration(300 * time.Millisecond) },
	})
	for _, d := range f.decode {
		d.SetFault("", 0, "stream")
	}
	a := f.try(chatPath, chat(long, 50, true))
	if a.status != 200 || a.errors != 1 || a.done {
		t.Fatalf("got status %d, %d error events, done %v: %s", a.status, a.errors, a.done, a.body)
	}
	f.settled()
}

func TestNoTargetForAPhase(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{})
		for _, p := range f.prefill {
			p.Kill()
		}
		f.eventually("the probes have found that the engines have ended", func() bool {
			return f.engineState("p0") == "unhealthy" && f.engineState("p1") == "unhealthy"
		})
		resp, err := f.client.Get(f.url + "/health")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("health answers %d", resp.StatusCode)
		}
		a := f.try(chatPath, chat("nobody", 5, true))
		if a.status != 503 || a.header.Get("Retry-After") == "" || !strings.Contains(a.body, "prefill") {
			t.Fatalf("got status %d, Retry-After %q: %s", a.status, a.header.Get("Retry-After"), a.body)
		}
	})
}

func TestEngineRestarts(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		for _, role := range []string{enginesim.RolePrefill, enginesim.RoleDecode} {
			t.Run(role, func(t *testing.T) {
				f := startFleet(t, connector, fleetOptions{prefill: 1, decode: 1})
				body := chat("before and after", 8, true)
				f.right(f.try(chatPath, body), chatPath, body)
				set, name := &f.prefill[0], "p0"
				if role == enginesim.RoleDecode {
					set, name = &f.decode[0], "d0"
				}
				addr := (*set).Addr()
				(*set).Kill()
				(*set).Close()
				f.eventually("the probes have found that the engine has ended", func() bool { return f.engineState(name) == "unhealthy" })
				c := enginesim.Config{Connector: f.connector, Role: role, Listen: addr}
				c.TRTLLM.DisconnectPoll = 20 * time.Millisecond
				c.SGLang.HeaderOverrides = connector == sglangHeaders
				keepKVPorts(&c, *set)
				*set = startEngine(t, c)
				f.eventually("the engine is ready again", func() bool { return f.engineState(name) == "ready" })
				f.awaitWorkers()
				f.right(f.try(chatPath, body), chatPath, body)
				if f.metric("pdproxy_engine_restarts_total", `engine="`+name+`"`) == 0 {
					t.Error("the restart is not counted")
				}
			})
		}
	})
}

func TestOverload(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{
		engine: slow(enginesim.RoleDecode, 10000),
		config: func(c *config.Config) {
			c.Limits.MaxReading = 100 // the bodies may arrive at the same time
			c.Limits.MaxExchanges, c.Limits.Queue, c.Limits.QueueTimeout = 1, 1, config.Duration(200*time.Millisecond)
		},
	})
	f.oneEntry() // the limits are divided between workers and rounded up
	first := f.open(context.Background(), chat("first", 200, true))
	answers := make(chan answer, 3)
	for range 3 {
		go func() { answers <- f.try(chatPath, chat("more", 5, true)) }()
	}
	got := map[int]int{}
	for range 3 {
		a := <-answers
		got[a.status]++
		if a.header.Get("Retry-After") == "" {
			t.Errorf("got status %d without Retry-After", a.status)
		}
	}
	if got[429] != 2 || got[503] != 1 {
		t.Fatalf("got %v, want two rejected at once (429) and one rejected after its wait (503)", got)
	}
	first.Body.Close()
	if f.metric("pdproxy_shed_total") < 2 {
		t.Error("shed requests are not counted")
	}
}

func TestRetryBudgetIsGlobal(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{config: func(c *config.Config) {
		c.Retry.Budget, c.Retry.MinBudget = 0, 2
		c.Circuit.Failures = 1000
	}})
	f.oneEntry() // each worker has a separate budget
	for _, p := range f.prefill {
		p.SetFault("1:500", 0, "")
	}
	for range 5 {
		if a := f.try(chatPath, chat("x", 5, true)); a.status != 502 {
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
	}
	if n := f.metric("pdproxy_retries_total"); n != 2 {
		t.Errorf("got %v retries, want the floor of 2", n)
	}
	if f.metric("pdproxy_fallbacks_total", `what="retry"`, `reason="budget"`) == 0 {
		t.Error("the used-up budget is not counted")
	}
}

// busy reports whether one of the engines computes.
func (f *fleet) busy(engines []*enginesim.Engine) bool {
	for _, e := range engines {
		if s := e.State(); s.RequestsRunning > 0 || s.BlocksUsed > 0 {
			return true
		}
	}
	return false
}

// engineState returns the state of an engine in all processes; "" is an engine
// that no process knows.
func (f *fleet) engineState(name string) string {
	state := f.front.engines()[name]
	for _, w := range f.workers {
		if w.engines()[name] != state {
			return "known to some processes only"
		}
	}
	return state
}

// open posts a chat request and returns when the head of the answer has arrived.
func (f *fleet) open(ctx context.Context, body string) *http.Response {
	f.t.Helper()
	return f.openAt(ctx, chatPath, body)
}

// openAt is open for any route.
func (f *fleet) openAt(ctx context.Context, path, body string) *http.Response {
	f.t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+path, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	resp, err := f.client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	if resp.StatusCode != 200 {
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		f.t.Fatalf("got status %d: %s", resp.StatusCode, text)
	}
	return resp
}
