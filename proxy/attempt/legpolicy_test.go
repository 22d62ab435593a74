package attempt_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// fakeLegs is a leg policy with the answers of a test. It records the events that it
// receives.
type fakeLegs struct {
	answer func(*abi.LegFacts) (abi.LegDecision, []byte, string)

	mu       sync.Mutex
	asked    []abi.LegFacts    // guarded by mu
	finished []abi.FinishFacts // guarded by mu
}

func (l *fakeLegs) Leg(_ context.Context, f *abi.LegFacts, edits []byte) (abi.LegDecision, []byte, string) {
	l.mu.Lock()
	l.asked = append(l.asked, *f)
	l.mu.Unlock()
	if l.answer == nil {
		return abi.LegPass, nil, coordinator.ReasonAbsent
	}
	d, list, reason := l.answer(f)
	return d, append(edits, list...), reason
}

func (l *fakeLegs) Finish(f *abi.FinishFacts) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.finished = append(l.finished, *f)
}

func (l *fakeLegs) install(d *proxy.Options) { d.Hooks = l }

// failures returns the events of failed legs.
func (l *fakeLegs) failures() (failed []abi.LegFacts) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range l.asked {
		if f.Event == abi.LegFailed {
			failed = append(failed, f)
		}
	}
	return failed
}

// edits encodes the edits that change makes.
func edits(change func(*abi.Edits)) []byte {
	e := abi.NewEdits(make([]byte, 256<<10))
	change(&e)
	return e.Bytes()
}

// onSend answers the events of legs that the proxy is about to send: it returns edits.
func onSend(change func(*abi.Edits)) func(*abi.LegFacts) (abi.LegDecision, []byte, string) {
	return func(f *abi.LegFacts) (abi.LegDecision, []byte, string) {
		if f.Event != abi.LegSend {
			return abi.LegPass, nil, ""
		}
		return abi.LegEdited, edits(change), ""
	}
}

// onFailure answers the events of failed legs.
func onFailure(d abi.LegDecision) func(*abi.LegFacts) (abi.LegDecision, []byte, string) {
	return func(f *abi.LegFacts) (abi.LegDecision, []byte, string) {
		if f.Event != abi.LegFailed {
			return abi.LegPass, nil, ""
		}
		return d, nil, ""
	}
}

// The engine of each leg receives the edits. The rest of the leg is unchanged.
func TestLegEdits(t *testing.T) {
	change := func(e *abi.Edits) {
		e.SetHeader("x-custom", "mine")
		e.AddHeader("X-More", "1")
		e.AddHeader("X-More", "2")
		e.RemoveHeader("x-gone")
		e.SetField("temperature", "0.5")
		e.SetField("user", `"u"`)
		e.RemoveField("seed")
	}
	const body = `{"model":"m","prompt":"hi","max_tokens":5,"seed":7, "user":null,"x":{"kept":1.50}}`
	for _, pair := range []bool{false, true} {
		world.Run(t, fmt.Sprintf("pair %v", pair), func(t *testing.T) {
			engines := []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}
			if pair {
				engines = []*world.Engine{
					{Name: "p0", Role: "prefill", Connector: "vllm-nixl", Serve: world.PrefillAnswers},
					{Name: "d0", Role: "decode", Connector: "vllm-nixl", Serve: engines[0].Serve},
				}
			}
			legs := &fakeLegs{answer: onSend(change)}
			w := world.New(t, world.Setup{Engines: engines, Options: legs.install})
			if a := w.Post(world.CompletionsPath, body, "X-Custom", "a", "X-Custom", "b", "X-Gone", "1", "X-Kept", "1"); a.Status != 200 || a.Body != world.Unary {
				t.Fatalf("%+v", a)
			}
			for _, e := range engines {
				leg := e.Seen()[0]
				for name, want := range map[string]string{"X-Custom": "mine", "X-More": "1,2", "X-Gone": "", "X-Kept": "1"} {
					if got := strings.Join(leg.Header[name], ","); got != want {
						t.Errorf("%s: %q, want %q", name, got, want)
					}
				}
				if !strings.Contains(leg.Body, `"temperature":0.5`) || !strings.Contains(leg.Body, `"user":"u"`) ||
					strings.Contains(leg.Body, "seed") || !strings.Contains(leg.Body, `"x":{"kept":1.50}`) {
					t.Errorf("got body %s", leg.Body)
				}
				if pair && !strings.Contains(leg.Body, `"kv_transfer_params"`) {
					t.Errorf("the leg has no transfer parameters: %s", leg.Body)
				}
			}
			if len(legs.asked) != len(engines) {
				t.Fatalf("asked %d times", len(legs.asked))
			}
			for i, f := range legs.asked {
				e := engines[i]
				want := abi.LegFacts{
					Request: abi.RequestFacts{PromptTokens: f.Request.PromptTokens, MaxTokens: 5, N: 1, Model: "m"},
					Phase:   abi.PhaseNone, Flow: abi.FlowAggregated, Attempt: 1, Left: 2,
					Instance: w.Registry.Snapshot().Instance(e.Spec().Name).ID, Engine: e.Spec().Name,
				}
				if pair {
					want.Phase, want.Flow = []abi.Phase{abi.Prefill, abi.Decode}[i], abi.FlowPrefillFirst
					want.Partner, want.ID = w.Registry.Snapshot().Instance(engines[1-i].Name).ID, w.Explained().DisaggID
				}
				if !reflect.DeepEqual(f, want) {
					t.Errorf("events: got %+v, want %+v", f, want)
				}
			}
		})
	}
}

// A policy may not edit the fields that the connection, the transfer or the client needs.
// If an answer contains such an edit, the proxy ignores the whole answer.
func TestLegEditsRefused(t *testing.T) {
	tests := []struct {
		name string
		list []byte
	}{
		{"Content-Length", edits(func(e *abi.Edits) { e.SetHeader("content-length", "1") })},
		{"long lines", edits(func(e *abi.Edits) {
			e.SetHeader("x-a", strings.Repeat("a", abi.MaxEditHeaders/2))
			e.SetHeader("x-b", strings.Repeat("b", abi.MaxEditHeaders/2))
		})},
		{"Host", edits(func(e *abi.Edits) { e.SetHeader("Host", "other") })},
		{"Connection", edits(func(e *abi.Edits) { e.AddHeader("Connection", "close") })},
		{"Transfer-Encoding", edits(func(e *abi.Edits) { e.RemoveHeader("Transfer-Encoding") })},
		{"Content-Type", edits(func(e *abi.Edits) { e.SetHeader("Content-Type", "text/plain") })},
		{"Content-Encoding", edits(func(e *abi.Edits) { e.SetHeader("Content-Encoding", "gzip") })},
		{"Accept-Encoding", edits(func(e *abi.Edits) { e.SetHeader("Accept-Encoding", "gzip") })},
		{"leg id", edits(func(e *abi.Edits) { e.SetHeader("X-Request-Id", "mine") })},
		{"rank", edits(func(e *abi.Edits) { e.RemoveHeader("x-data-parallel-rank") })},
		{"line break", edits(func(e *abi.Edits) { e.SetHeader("X-A", "1\r\nX-B: 2") })},
		{"name", edits(func(e *abi.Edits) { e.SetHeader("X A", "1") })},
		{"kv_transfer_params", edits(func(e *abi.Edits) { e.SetField("kv_transfer_params", "{}") })},
		{"request_id", edits(func(e *abi.Edits) { e.SetField("request_id", `"a"`) })},
		{"rid", edits(func(e *abi.Edits) { e.SetField("rid", `"a"`) })},
		{"bootstrap_room", edits(func(e *abi.Edits) { e.RemoveField("bootstrap_room") })},
		{"data_parallel_rank", edits(func(e *abi.Edits) { e.SetField("data_parallel_rank", "1") })},
		{"vllm_xargs", edits(func(e *abi.Edits) { e.SetField("vllm_xargs", "{}") })},
		{"extra_args", edits(func(e *abi.Edits) { e.SetField("sampling_params", `{"extra_args":{}}`) })},
		{"stream", edits(func(e *abi.Edits) { e.SetField("stream", "true") })},
		{"the connector's own", edits(func(e *abi.Edits) { e.SetField("max_tokens", "100") })},
		{"no JSON", edits(func(e *abi.Edits) { e.SetField("seed", "1,") })},
		{"no UTF-8", edits(func(e *abi.Edits) { e.SetField("user", "\"\xff\"") })},
		{"empty", edits(func(e *abi.Edits) { e.SetField("user", "") })},
		{"cut off", edits(func(e *abi.Edits) { e.SetField("user", "1") })[:10]},
		{"unknown", binary.LittleEndian.AppendUint32(nil, 9)},
		{"with allowed edits", edits(func(e *abi.Edits) { e.SetField("seed", "1"); e.SetHeader("X-A", "1"); e.SetField("rid", "1") })},
	}
	for _, tt := range tests {
		world.Run(t, tt.name, func(t *testing.T) {
			p := &world.Engine{Name: "p0", Role: "prefill", Connector: "vllm-nixl", Serve: world.PrefillAnswers}
			d := &world.Engine{Name: "d0", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			legs := &fakeLegs{answer: func(f *abi.LegFacts) (abi.LegDecision, []byte, string) {
				if f.Phase == abi.Prefill {
					return abi.LegEdited, tt.list, ""
				}
				return abi.LegPass, nil, ""
			}}
			w := world.New(t, world.Setup{Engines: []*world.Engine{p, d}, Options: legs.install})
			for range 2 {
				if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 {
					t.Fatalf("%+v", a)
				}
				w.SetHooks(nil)
			}
			edited, plain := p.Seen()[0], p.Seen()[1]
			for _, h := range []http.Header{edited.Header, plain.Header} {
				h.Del("X-Request-Id")
			}
			if edited.Body != plain.Body || fmt.Sprint(edited.Header) != fmt.Sprint(plain.Header) {
				t.Errorf("got  %v %s\nwant %v %s", edited.Header, edited.Body, plain.Header, plain.Body)
			}
			if n := w.Metric("pdproxy_fallbacks_total", "leg", "nonsense"); n != 1 {
				t.Errorf("got %v fallbacks", n)
			}
		})
	}
}

// If the hook has no usable answer, the leg is unchanged and the proxy counts the
// failure. A missing hook is not counted.
func TestLegHookFails(t *testing.T) {
	for reason, count := range map[string]float64{coordinator.ReasonLate: 1, coordinator.ReasonTrap: 1, coordinator.ReasonAbsent: 0} {
		synctest.Test(t, func(t *testing.T) {
			legs := &fakeLegs{answer: func(*abi.LegFacts) (abi.LegDecision, []byte, string) {
				return abi.LegEdited, edits(func(e *abi.Edits) { e.SetField("seed", "1") }), reason
			}}
			e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Options: legs.install})
			if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 || e.Seen()[0].Body != world.Completions(false) {
				t.Errorf("%+v, sent %s", a, e.Seen()[0].Body)
			}
			if n := w.Metric("pdproxy_fallbacks_total", "leg", reason); n != count {
				t.Errorf("%s: %v fallbacks", reason, n)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		legs := &fakeLegs{answer: func(*abi.LegFacts) (abi.LegDecision, []byte, string) { return 9, nil, "" }}
		w := world.New(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}, Options: legs.install})
		if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 || w.Metric("pdproxy_fallbacks_total", "leg", "nonsense") != 1 {
			t.Errorf("%+v", a)
		}
	})
}

// After a failed leg the policy may choose the next step, up to the limit of attempts.
func TestLegFailed(t *testing.T) {
	status := func(n int) func(*world.Conn, int) {
		return func(c *world.Conn, _ int) { c.JSON(n, `{"error":{}}`) }
	}
	tests := []struct {
		name     string
		serve    func(*world.Conn, int)
		decision abi.LegDecision
		want     int    // status
		tries    [2]int // on the failing engine, and on the other engine
	}{
		{"built-in rule", status(500), abi.LegPass, 200, [2]int{1, 1}},
		{"built-in rule, fault of the request", status(400), abi.LegPass, 400, [2]int{1, 0}},
		{"again", status(500), abi.LegRetry, 502, [2]int{3, 0}},
		{"again, fault of the request", status(422), abi.LegRetry, 422, [2]int{3, 0}},
		{"elsewhere", status(500), abi.LegPlaceAgain, 200, [2]int{1, 1}},
		{"elsewhere, fault of the request", status(400), abi.LegPlaceAgain, 200, [2]int{1, 1}},
		{"give up", status(500), abi.LegGiveUp, 502, [2]int{1, 0}},
		{"nonsense", status(500), 77, 200, [2]int{1, 1}},
	}
	for _, tt := range tests {
		world.Run(t, tt.name, func(t *testing.T) {
			e0 := &world.Engine{Name: "e0", Serve: tt.serve}
			e1 := &world.Engine{Name: "e1", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			legs := &fakeLegs{answer: onFailure(tt.decision)}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e0, e1}, Options: legs.install, Config: func(c *config.Config) { c.Circuit.Failures = 100 }})
			if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != tt.want {
				t.Errorf("%+v", a)
			}
			if got := [2]int{len(e0.Seen()), len(e1.Seen())}; got != tt.tries {
				t.Errorf("got tries %v, want %v", got, tt.tries)
			}
			ids := make(map[string]bool)
			for _, leg := range e0.Seen() {
				ids[leg.Header.Get("X-Request-Id")] = true
			}
			if len(ids) != tt.tries[0] {
				t.Errorf("got %d ids for %d legs", len(ids), tt.tries[0])
			}
			f := legs.failures()[0]
			if len(legs.failures()) != tt.tries[0] || f.Attempt != 1 || f.Left != 2 || f.Engine != "e0" ||
				f.Reason != fmt.Sprintf("status_%d", f.Status) || f.Elapsed != 0 || f.Phase != abi.PhaseNone {
				t.Errorf("asked %+v", legs.failures())
			}
		})
	}
}

// The retry budget also limits the retries that the policy requests.
func TestLegRetryBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(500, "{}") }}
		legs := &fakeLegs{answer: onFailure(abi.LegRetry)}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Options: legs.install, Config: func(c *config.Config) {
			c.Retry.Attempts, c.Retry.Budget, c.Retry.MinBudget = 10, 0, 2
		}})
		w.Post(world.CompletionsPath, world.Completions(false))
		if n := len(e.Seen()); n != 3 || w.Metric("pdproxy_fallbacks_total", "retry", "budget") != 1 {
			t.Errorf("got %d legs", n)
		}
	})
}

// The proxy could not send a decode leg. The policy may request a new attempt with
// another id, instead of another decode engine for the same blocks.
func TestLegFailedPair(t *testing.T) {
	for _, tt := range []struct {
		decision       abi.LegDecision
		status         int
		prefills, d1   int
		decodeAttempts uint32
	}{
		{abi.LegPass, 200, 1, 1, 1},
		{abi.LegPlaceAgain, 200, 1, 1, 1},
		{abi.LegRetry, 502, 3, 0, 3},
		{abi.LegGiveUp, 502, 1, 0, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := &world.Engine{Name: "p0", Role: "prefill", Connector: "vllm-nixl", Serve: func(c *world.Conn, nth int) {
				if strings.Contains(c.Leg.Body, "do_remote_prefill") { // a clean-up
					c.JSON(200, world.Unary)
					return
				}
				world.PrefillAnswers(c, nth)
			}}
			d0 := &world.Engine{Name: "d0", Role: "decode", Connector: "vllm-nixl", Refuse: true}
			d1 := &world.Engine{Name: "d1", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			legs := &fakeLegs{answer: onFailure(tt.decision)}
			w := world.New(t, world.Setup{Engines: []*world.Engine{p, d0, d1}, Options: legs.install, Config: func(c *config.Config) { c.Circuit.Failures = 100 }})
			if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != tt.status {
				t.Errorf("%d: %+v", tt.decision, a)
			}
			e := w.Explained()
			prefills := 0
			for _, l := range e.Legs {
				if l.Phase == "prefill" {
					prefills++
				}
			}
			if prefills != tt.prefills {
				t.Errorf("case %d: got %d prefill legs", tt.decision, prefills)
			}
			failed := legs.failures()
			last := failed[len(failed)-1]
			if last.Attempt != tt.decodeAttempts || last.Phase != abi.Decode || last.Reason != "dial" || last.Partner == 0 {
				t.Errorf("%d: asked %+v", tt.decision, failed)
			}
			ids := make(map[uint64]bool)
			for _, f := range failed {
				ids[f.ID] = true
			}
			if len(ids) != len(failed) {
				t.Errorf("case %d: got %d ids in %d attempts", tt.decision, len(ids), len(failed))
			}
		})
	}
}

// The legs run at the same time. The policy can edit each leg, and gets one event if one
// fails. The next attempt on the same targets has another bootstrap room.
func TestLegPolicyConcurrent(t *testing.T) {
	for _, stream := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			p := &world.Engine{Name: "p0", Role: "prefill", Connector: "sglang", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			d := &world.Engine{Name: "d0", Role: "decode", Connector: "sglang", Serve: func(c *world.Conn, nth int) {
				switch {
				case nth == 1:
					time.Sleep(time.Millisecond) // until prefill has received its leg
					c.JSON(500, "{}")
				case stream:
					c.Stream(world.EventA, world.Done)
				default:
					c.JSON(200, world.Unary)
				}
			}}
			legs := &fakeLegs{answer: func(f *abi.LegFacts) (abi.LegDecision, []byte, string) {
				if f.Event == abi.LegFailed {
					return abi.LegRetry, nil, ""
				}
				return abi.LegEdited, edits(func(e *abi.Edits) {
					e.SetField("user", fmt.Sprintf("%q", f.Phase))
					e.SetHeader("X-Phase", f.Phase.String())
				}), ""
			}}
			w := world.New(t, world.Setup{Engines: []*world.Engine{p, d}, Options: legs.install})
			if a := w.Post(world.CompletionsPath, world.Completions(stream)); a.Status != 200 {
				t.Fatalf("%+v", a)
			}
			synctest.Wait() // the client has the answer before prefill has answered
			rooms := make(map[string]bool)
			for phase, e := range map[string]*world.Engine{"prefill": p, "decode": d} {
				n := 0
				for _, leg := range e.Seen() {
					if leg.Path != world.CompletionsPath {
						continue // a clean-up
					}
					n++
					if leg.Header.Get("X-Phase") != phase || !strings.Contains(leg.Body, fmt.Sprintf(`"user":%q`, phase)) {
						t.Errorf("%s: %v %s", phase, leg.Header, leg.Body)
					}
					_, room, _ := strings.Cut(leg.Body, `"bootstrap_room":`)
					room, _, _ = strings.Cut(room, ",")
					rooms[room] = true
				}
				if n != 2 {
					t.Errorf("%d %s legs", n, phase)
				}
			}
			if len(rooms) != 2 {
				t.Errorf("rooms %v", rooms)
			}
			if failed := legs.failures(); len(failed) != 1 || failed[0].Phase != abi.Decode || failed[0].Engine != "d0" {
				t.Errorf("asked %+v", failed)
			}
		})
	}
}

// The finish hook gets the outcome of an exchange.
func TestFinish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &world.Engine{Name: "p0", Role: "prefill", Connector: "vllm-nixl", Serve: func(c *world.Conn, nth int) {
			time.Sleep(3 * time.Millisecond)
			world.PrefillAnswers(c, nth)
		}}
		d := &world.Engine{Name: "d0", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) {
			time.Sleep(4 * time.Millisecond)
			c.Send(world.StreamHead)
			c.Chunks(world.EventA)
			time.Sleep(5 * time.Millisecond)
			c.Chunks(`data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}`+"\n\n", world.Done)
			c.Send("0\r\n\r\n")
		}}
		legs := &fakeLegs{}
		w := world.New(t, world.Setup{Engines: []*world.Engine{p, d}, Options: legs.install})
		w.Post(world.CompletionsPath, world.Completions(true))
		synctest.Wait()
		if len(legs.finished) != 1 {
			t.Fatalf("told %d times", len(legs.finished))
		}
		f := legs.finished[0]
		s := w.Registry.Snapshot()
		want := abi.FinishFacts{
			Request: abi.RequestFacts{PromptTokens: f.Request.PromptTokens, MaxTokens: 5, N: 1, Stream: true, Model: "m"},
			Outcome: abi.OutcomeOK, Flow: abi.FlowPrefillFirst, Status: 200, ID: w.Explained().DisaggID,
			Prefill: s.Instance("p0").ID, Decode: s.Instance("d0").ID, Attempts: 2,
			FirstByte: 7000, Total: 12000, PromptTokens: 7, CachedTokens: 4, OutputTokens: 2,
		}
		if !reflect.DeepEqual(f, want) {
			t.Errorf("facts: got  %+v\nwant %+v", f, want)
		}
	})
}

func TestFinishFailures(t *testing.T) {
	for _, tt := range []struct {
		name string
		e    *world.Engine
		body string
		want abi.FinishFacts
	}{
		{"engine error", &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(500, "{}") }}, world.Completions(false),
			abi.FinishFacts{Outcome: abi.OutcomeEngineError, Flow: abi.FlowAggregated, Status: 502, Failed: abi.Decode, Reason: "status_500", Decode: 1, Attempts: 3}},
		{"not placed", &world.Engine{}, `{"model":"other","prompt":"x"}`, abi.FinishFacts{Outcome: abi.OutcomeClientError, Status: 404}},
		{"no request", &world.Engine{}, "{", abi.FinishFacts{Outcome: abi.OutcomeClientError, Status: 400}},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			legs := &fakeLegs{}
			w := world.New(t, world.Setup{Engines: []*world.Engine{tt.e}, Options: legs.install})
			w.Post(world.CompletionsPath, tt.body)
			f := legs.finished[0]
			f.Request, tt.want.FirstByte = abi.RequestFacts{}, -1
			tt.want.PromptTokens, tt.want.CachedTokens, tt.want.OutputTokens = -1, -1, -1
			if tt.want.Decode != 0 {
				tt.want.Decode = w.Registry.Snapshot().Instance("e").ID
			}
			if !reflect.DeepEqual(f, tt.want) {
				t.Errorf("facts: got  %+v\nwant %+v", f, tt.want)
			}
		})
	}
}

// The outcomes have the same numbers on both sides of the contract.
func TestOutcomesAgree(t *testing.T) {
	pairs := map[telemetry.Outcome]abi.Outcome{
		telemetry.OutcomeNone: abi.OutcomeNone, telemetry.OutcomeOK: abi.OutcomeOK, telemetry.OutcomeClientError: abi.OutcomeClientError,
		telemetry.OutcomeEngineError: abi.OutcomeEngineError, telemetry.OutcomeTimeout: abi.OutcomeTimeout,
		telemetry.OutcomeCancelled: abi.OutcomeCancelled, telemetry.OutcomeBroken: abi.OutcomeBroken, telemetry.OutcomeShed: abi.OutcomeShed,
		telemetry.OutcomeNoTarget: abi.OutcomeNoTarget, telemetry.OutcomeInternal: abi.OutcomeInternal,
	}
	for o, a := range pairs {
		if uint8(o) != uint8(a) {
			t.Errorf("%s: %d and %d", o, o, a)
		}
	}
}

// Filters read facts from the request's context, and write notes there.
func TestStreamInfo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		info := new(abi.StreamInfo)
		var first abi.StreamFacts
		o := world.Setup{Engines: []*world.Engine{
			{Name: "p0", Role: "prefill", Connector: "vllm-nixl", Serve: func(c *world.Conn, nth int) {
				time.Sleep(time.Millisecond)
				world.PrefillAnswers(c, nth)
			}},
			{Name: "d0", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) {
				time.Sleep(2 * time.Millisecond)
				c.JSON(200, `{"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}`)
			}},
		}}
		o.Options = func(d *proxy.Options) {
			d.Wrap = func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					info.AddNote("seen")
					h.ServeHTTP(headSpy{w, func() { first = info.Facts() }}, r.WithContext(abi.WithStreamInfo(r.Context(), info)))
				})
			}
		}
		w := world.New(t, o)
		if a := w.Post(world.CompletionsPath, world.Completions(false), "X-Request-Id", "mine"); a.Status != 200 {
			t.Fatalf("%+v", a)
		}
		e := w.Explained()
		f := info.Facts()
		want := abi.StreamFacts{
			RequestID: "mine", Model: "m", Flow: abi.FlowPrefillFirst, DisaggID: e.DisaggID, Attempts: 1,
			Prefill: abi.StreamTarget{Engine: "p0", Address: "p0.test:80"}, Decode: abi.StreamTarget{Engine: "d0", Address: "d0.test:80"},
			PrefillDone: time.Millisecond, FirstByte: 3 * time.Millisecond, PromptTokens: f.PromptTokens,
		}
		if first != want {
			t.Errorf("facts with the head: got %+v, want %+v", first, want)
		}
		want.End, want.InputTokens, want.OutputTokens, want.CachedTokens = 3*time.Millisecond, 7, 2, 4
		if f != want {
			t.Errorf("facts at the end: got %+v, want %+v", f, want)
		}
		if len(e.Notes) != 1 || e.Notes[0] != "seen" {
			t.Errorf("notes %q", e.Notes)
		}
		legs := w.Logged.String()
		for _, l := range e.Legs {
			if len(l.ID) != 32 || !strings.Contains(legs, "leg_id="+l.ID+" phase="+l.Phase) {
				t.Errorf("leg id %q", l.ID)
			}
		}
	})
}

// headSpy calls before when the head is written.
type headSpy struct {
	http.ResponseWriter
	before func()
}

func (s headSpy) WriteHeader(status int) { s.before(); s.ResponseWriter.WriteHeader(status) }

// Unwrap serves http.ResponseController.
func (s headSpy) Unwrap() http.ResponseWriter { return s.ResponseWriter }
