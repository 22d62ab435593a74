package proxy

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
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
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

func (l *fakeLegs) install(d *Options) { d.Hooks = l }

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
		t.Run(fmt.Sprintf("pair %v", pair), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				engines := []*fakeEngine{{serve: func(c *engineConn, _ int) { c.json(200, unary) }}}
				if pair {
					engines = []*fakeEngine{
						{name: "p0", role: "prefill", connector: "vllm-nixl", serve: prefillAnswers},
						{name: "d0", role: "decode", connector: "vllm-nixl", serve: engines[0].serve},
					}
				}
				legs := &fakeLegs{answer: onSend(change)}
				w := newWorld(t, setup{engines: engines, options: legs.install})
				if a := w.post(completionsPath, body, "X-Custom", "a", "X-Custom", "b", "X-Gone", "1", "X-Kept", "1"); a.status != 200 || a.body != unary {
					t.Fatalf("%+v", a)
				}
				for _, e := range engines {
					leg := e.seen()[0]
					for name, want := range map[string]string{"X-Custom": "mine", "X-More": "1,2", "X-Gone": "", "X-Kept": "1"} {
						if got := strings.Join(leg.header[name], ","); got != want {
							t.Errorf("%s: %q, want %q", name, got, want)
						}
					}
					if !strings.Contains(leg.body, `"temperature":0.5`) || !strings.Contains(leg.body, `"user":"u"`) ||
						strings.Contains(leg.body, "seed") || !strings.Contains(leg.body, `"x":{"kept":1.50}`) {
						t.Errorf("got body %s", leg.body)
					}
					if pair && !strings.Contains(leg.body, `"kv_transfer_params"`) {
						t.Errorf("the leg has no transfer parameters: %s", leg.body)
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
						Instance: w.registry.Snapshot().Instance(e.spec().Name).ID, Engine: e.spec().Name,
					}
					if pair {
						want.Phase, want.Flow = []abi.Phase{abi.Prefill, abi.Decode}[i], abi.FlowPrefillFirst
						want.Partner, want.ID = w.registry.Snapshot().Instance(engines[1-i].name).ID, w.explained().DisaggID
					}
					if !reflect.DeepEqual(f, want) {
						t.Errorf("events: got %+v, want %+v", f, want)
					}
				}
			})
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
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := &fakeEngine{name: "p0", role: "prefill", connector: "vllm-nixl", serve: prefillAnswers}
				d := &fakeEngine{name: "d0", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.json(200, unary) }}
				legs := &fakeLegs{answer: func(f *abi.LegFacts) (abi.LegDecision, []byte, string) {
					if f.Phase == abi.Prefill {
						return abi.LegEdited, tt.list, ""
					}
					return abi.LegPass, nil, ""
				}}
				w := newWorld(t, setup{engines: []*fakeEngine{p, d}, options: legs.install})
				for range 2 {
					if a := w.post(completionsPath, completions(false)); a.status != 200 {
						t.Fatalf("%+v", a)
					}
					w.SetHooks(nil)
				}
				edited, plain := p.seen()[0], p.seen()[1]
				for _, h := range []http.Header{edited.header, plain.header} {
					h.Del("X-Request-Id")
				}
				if edited.body != plain.body || fmt.Sprint(edited.header) != fmt.Sprint(plain.header) {
					t.Errorf("got  %v %s\nwant %v %s", edited.header, edited.body, plain.header, plain.body)
				}
				if n := w.metric("pdproxy_fallbacks_total", "leg", "nonsense"); n != 1 {
					t.Errorf("got %v fallbacks", n)
				}
			})
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
			e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, unary) }}
			w := newWorld(t, setup{engines: []*fakeEngine{e}, options: legs.install})
			if a := w.post(completionsPath, completions(false)); a.status != 200 || e.seen()[0].body != completions(false) {
				t.Errorf("%+v, sent %s", a, e.seen()[0].body)
			}
			if n := w.metric("pdproxy_fallbacks_total", "leg", reason); n != count {
				t.Errorf("%s: %v fallbacks", reason, n)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		legs := &fakeLegs{answer: func(*abi.LegFacts) (abi.LegDecision, []byte, string) { return 9, nil, "" }}
		w := newWorld(t, setup{engines: []*fakeEngine{{serve: func(c *engineConn, _ int) { c.json(200, unary) }}}, options: legs.install})
		if a := w.post(completionsPath, completions(false)); a.status != 200 || w.metric("pdproxy_fallbacks_total", "leg", "nonsense") != 1 {
			t.Errorf("%+v", a)
		}
	})
}

// After a failed leg the policy may choose the next step, up to the limit of attempts.
func TestLegFailed(t *testing.T) {
	status := func(n int) func(*engineConn, int) {
		return func(c *engineConn, _ int) { c.json(n, `{"error":{}}`) }
	}
	tests := []struct {
		name     string
		serve    func(*engineConn, int)
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
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e0 := &fakeEngine{name: "e0", serve: tt.serve}
				e1 := &fakeEngine{name: "e1", serve: func(c *engineConn, _ int) { c.json(200, unary) }}
				legs := &fakeLegs{answer: onFailure(tt.decision)}
				w := newWorld(t, setup{engines: []*fakeEngine{e0, e1}, options: legs.install, config: func(c *config.Config) { c.Circuit.Failures = 100 }})
				if a := w.post(completionsPath, completions(false)); a.status != tt.want {
					t.Errorf("%+v", a)
				}
				if got := [2]int{len(e0.seen()), len(e1.seen())}; got != tt.tries {
					t.Errorf("got tries %v, want %v", got, tt.tries)
				}
				ids := make(map[string]bool)
				for _, leg := range e0.seen() {
					ids[leg.header.Get("X-Request-Id")] = true
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
		})
	}
}

// The retry budget also limits the retries that the policy requests.
func TestLegRetryBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(500, "{}") }}
		legs := &fakeLegs{answer: onFailure(abi.LegRetry)}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, options: legs.install, config: func(c *config.Config) {
			c.Retry.Attempts, c.Retry.Budget, c.Retry.MinBudget = 10, 0, 2
		}})
		w.post(completionsPath, completions(false))
		if n := len(e.seen()); n != 3 || w.metric("pdproxy_fallbacks_total", "retry", "budget") != 1 {
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
			p := &fakeEngine{name: "p0", role: "prefill", connector: "vllm-nixl", serve: func(c *engineConn, nth int) {
				if strings.Contains(c.leg.body, "do_remote_prefill") { // a clean-up
					c.json(200, unary)
					return
				}
				prefillAnswers(c, nth)
			}}
			d0 := &fakeEngine{name: "d0", role: "decode", connector: "vllm-nixl", refuse: true}
			d1 := &fakeEngine{name: "d1", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.json(200, unary) }}
			legs := &fakeLegs{answer: onFailure(tt.decision)}
			w := newWorld(t, setup{engines: []*fakeEngine{p, d0, d1}, options: legs.install, config: func(c *config.Config) { c.Circuit.Failures = 100 }})
			if a := w.post(completionsPath, completions(false)); a.status != tt.status {
				t.Errorf("%d: %+v", tt.decision, a)
			}
			e := w.explained()
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
			p := &fakeEngine{name: "p0", role: "prefill", connector: "sglang", serve: func(c *engineConn, _ int) { c.json(200, unary) }}
			d := &fakeEngine{name: "d0", role: "decode", connector: "sglang", serve: func(c *engineConn, nth int) {
				switch {
				case nth == 1:
					time.Sleep(time.Millisecond) // until prefill has received its leg
					c.json(500, "{}")
				case stream:
					c.stream(eventA, done)
				default:
					c.json(200, unary)
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
			w := newWorld(t, setup{engines: []*fakeEngine{p, d}, options: legs.install})
			if a := w.post(completionsPath, completions(stream)); a.status != 200 {
				t.Fatalf("%+v", a)
			}
			synctest.Wait() // the client has the answer before prefill has answered
			rooms := make(map[string]bool)
			for phase, e := range map[string]*fakeEngine{"prefill": p, "decode": d} {
				n := 0
				for _, leg := range e.seen() {
					if leg.path != completionsPath {
						continue // a clean-up
					}
					n++
					if leg.header.Get("X-Phase") != phase || !strings.Contains(leg.body, fmt.Sprintf(`"user":%q`, phase)) {
						t.Errorf("%s: %v %s", phase, leg.header, leg.body)
					}
					_, room, _ := strings.Cut(leg.body, `"bootstrap_room":`)
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
		p := &fakeEngine{name: "p0", role: "prefill", connector: "vllm-nixl", serve: func(c *engineConn, nth int) {
			time.Sleep(3 * time.Millisecond)
			prefillAnswers(c, nth)
		}}
		d := &fakeEngine{name: "d0", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) {
			time.Sleep(4 * time.Millisecond)
			c.send(streamHead)
			c.chunks(eventA)
			time.Sleep(5 * time.Millisecond)
			c.chunks(`data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}`+"\n\n", done)
			c.send("0\r\n\r\n")
		}}
		legs := &fakeLegs{}
		w := newWorld(t, setup{engines: []*fakeEngine{p, d}, options: legs.install})
		w.post(completionsPath, completions(true))
		synctest.Wait()
		if len(legs.finished) != 1 {
			t.Fatalf("told %d times", len(legs.finished))
		}
		f := legs.finished[0]
		s := w.registry.Snapshot()
		want := abi.FinishFacts{
			Request: abi.RequestFacts{PromptTokens: f.Request.PromptTokens, MaxTokens: 5, N: 1, Stream: true, Model: "m"},
			Outcome: abi.OutcomeOK, Flow: abi.FlowPrefillFirst, Status: 200, ID: w.explained().DisaggID,
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
		e    *fakeEngine
		body string
		want abi.FinishFacts
	}{
		{"engine error", &fakeEngine{serve: func(c *engineConn, _ int) { c.json(500, "{}") }}, completions(false),
			abi.FinishFacts{Outcome: abi.OutcomeEngineError, Flow: abi.FlowAggregated, Status: 502, Failed: abi.Decode, Reason: "status_500", Decode: 1, Attempts: 3}},
		{"not placed", &fakeEngine{}, `{"model":"other","prompt":"x"}`, abi.FinishFacts{Outcome: abi.OutcomeClientError, Status: 404}},
		{"no request", &fakeEngine{}, "{", abi.FinishFacts{Outcome: abi.OutcomeClientError, Status: 400}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				legs := &fakeLegs{}
				w := newWorld(t, setup{engines: []*fakeEngine{tt.e}, options: legs.install})
				w.post(completionsPath, tt.body)
				f := legs.finished[0]
				f.Request, tt.want.FirstByte = abi.RequestFacts{}, -1
				tt.want.PromptTokens, tt.want.CachedTokens, tt.want.OutputTokens = -1, -1, -1
				if tt.want.Decode != 0 {
					tt.want.Decode = w.registry.Snapshot().Instance("e").ID
				}
				if !reflect.DeepEqual(f, tt.want) {
					t.Errorf("facts: got  %+v\nwant %+v", f, tt.want)
				}
			})
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

// planner is a Decider whose plan answer a test gives.
type planner struct {
	nativeDecider
	answer abi.PlanAnswer
}

func (p *planner) Plan(context.Context, *abi.PlanFacts) (abi.PlanAnswer, string, bool) {
	return p.answer, "planner", true
}

// The plan policy can limit the time of an attempt until the client's first byte, over
// all legs. At the limit no engine is charged with a failure.
func TestPlanLimit(t *testing.T) {
	slow := func(d time.Duration, then func(*engineConn, int)) func(*engineConn, int) {
		return func(c *engineConn, nth int) { time.Sleep(d); then(c, nth) }
	}
	answers := func(c *engineConn, _ int) { c.json(200, unary) }
	streams := func(c *engineConn, _ int) {
		c.send(streamHead)
		c.chunks(": wait\n\n")
		time.Sleep(2 * time.Second)
		c.chunks(eventA)
		time.Sleep(10 * time.Second) // the limit applies to the first byte
		c.chunks(done)
		c.send("0\r\n\r\n")
	}
	tests := []struct {
		name            string
		prefill, decode func(*engineConn, int) // no prefill: aggregated
		stream          bool
		limit           uint32
		status          int
		took            time.Duration
	}{
		{"in time", slow(2*time.Second, prefillAnswers), slow(2*time.Second, answers), false, 5000, 200, 4 * time.Second},
		{"together too slow", slow(3*time.Second, prefillAnswers), slow(3*time.Second, answers), false, 5000, 504, 5 * time.Second},
		{"prefill too slow", slow(9*time.Second, prefillAnswers), answers, false, 5000, 504, 5 * time.Second},
		{"aggregated", nil, slow(9*time.Second, answers), false, 5000, 504, 5 * time.Second},
		{"stream, in time", nil, streams, true, 5000, 200, 12 * time.Second},
		{"stream, too slow", nil, streams, true, 1500, 504, 1500 * time.Millisecond},
		{"longer than configured", nil, slow(1000*time.Second, answers), false, 999000, 504, 300 * time.Second},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				engines := []*fakeEngine{{serve: tt.decode}}
				decision := abi.PlanAggregate
				if tt.prefill != nil {
					decision = abi.PlanDisaggregate
					engines = []*fakeEngine{
						{name: "p0", role: "prefill", connector: "vllm-nixl", serve: tt.prefill},
						{name: "d0", role: "decode", connector: "vllm-nixl", serve: tt.decode},
					}
				}
				w := newWorld(t, setup{engines: engines, config: func(c *config.Config) { c.Retry.Attempts = 1 }})
				w.local.SetDecider(&planner{answer: abi.PlanAnswer{Decision: decision, LimitMillis: tt.limit}})
				begin := time.Now()
				a := w.post(completionsPath, completions(tt.stream))
				if took := time.Since(begin); a.status != tt.status || took != tt.took {
					t.Errorf("after %v: %+v", took, a)
				}
				for _, i := range w.registry.Snapshot().Instances {
					if n := i.Breaker.Failures(); n != 0 && tt.limit < 300000 {
						t.Errorf("failures of %s: got %d", i.Spec.Name, n)
					}
				}
			})
		})
	}
}

func TestPlanRejects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{engines: []*fakeEngine{{}}})
		w.local.SetDecider(&planner{answer: abi.PlanAnswer{Decision: abi.PlanReject, Status: 429}})
		a := w.post(completionsPath, completions(false))
		if a.status != 429 || a.header.Get("Retry-After") == "" || !strings.Contains(a.body, "rejected_by_policy") {
			t.Errorf("%+v", a)
		}
		w.outcome(telemetry.OutcomeNoTarget)
	})
}

// Filters read facts from the request's context, and write notes there.
func TestStreamInfo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		info := new(abi.StreamInfo)
		var first abi.StreamFacts
		o := setup{engines: []*fakeEngine{
			{name: "p0", role: "prefill", connector: "vllm-nixl", serve: func(c *engineConn, nth int) {
				time.Sleep(time.Millisecond)
				prefillAnswers(c, nth)
			}},
			{name: "d0", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) {
				time.Sleep(2 * time.Millisecond)
				c.json(200, `{"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}`)
			}},
		}}
		o.options = func(d *Options) {
			d.Wrap = func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					info.AddNote("seen")
					h.ServeHTTP(headSpy{w, func() { first = info.Facts() }}, r.WithContext(abi.WithStreamInfo(r.Context(), info)))
				})
			}
		}
		w := newWorld(t, o)
		if a := w.post(completionsPath, completions(false), "X-Request-Id", "mine"); a.status != 200 {
			t.Fatalf("%+v", a)
		}
		e := w.explained()
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
		legs := w.logged.String()
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

// Policies that need the prompt get it as raw JSON. The others do not get it.
func TestPromptOnRequest(t *testing.T) {
	for _, tt := range []struct {
		needs abi.Needs
		want  string
	}{{0, ""}, {abi.NeedPrompt, `"héllo \n"`}} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, setup{needs: tt.needs, engines: []*fakeEngine{{serve: func(c *engineConn, _ int) { c.json(200, unary) }}}})
			if a := w.post(completionsPath, `{"model":"m","prompt":"héllo \n","max_tokens":3}`); a.status != 200 {
				t.Fatalf("%+v", a)
			}
			if got := w.decider.asked.Load().(abi.RequestFacts).Prompt; got != tt.want {
				t.Errorf("needs %d: got prompt %q, want %q", tt.needs, got, tt.want)
			}
		})
	}
}
