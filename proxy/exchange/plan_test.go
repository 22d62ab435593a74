package exchange_test

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// planner is a Decider whose plan answer a test gives.
type planner struct {
	world.Decider
	answer abi.PlanAnswer
}

func (p *planner) Plan(context.Context, *abi.PlanFacts) (abi.PlanAnswer, string, bool) {
	return p.answer, "planner", true
}

// The plan policy can limit the time of an attempt until the client's first byte, over
// all legs. At the limit no engine is charged with a failure.
func TestPlanLimit(t *testing.T) {
	slow := func(d time.Duration, then func(*world.Conn, int)) func(*world.Conn, int) {
		return func(c *world.Conn, nth int) { time.Sleep(d); then(c, nth) }
	}
	answers := func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }
	streams := func(c *world.Conn, _ int) {
		c.Send(world.StreamHead)
		c.Chunks(": wait\n\n")
		time.Sleep(2 * time.Second)
		c.Chunks(world.EventA)
		time.Sleep(10 * time.Second) // the limit applies to the first byte
		c.Chunks(world.Done)
		c.Send("0\r\n\r\n")
	}
	tests := []struct {
		name            string
		prefill, decode func(*world.Conn, int) // no prefill: aggregated
		stream          bool
		limit           uint32
		status          int
		took            time.Duration
	}{
		{"in time", slow(2*time.Second, world.PrefillAnswers), slow(2*time.Second, answers), false, 5000, 200, 4 * time.Second},
		{"together too slow", slow(3*time.Second, world.PrefillAnswers), slow(3*time.Second, answers), false, 5000, 504, 5 * time.Second},
		{"prefill too slow", slow(9*time.Second, world.PrefillAnswers), answers, false, 5000, 504, 5 * time.Second},
		{"aggregated", nil, slow(9*time.Second, answers), false, 5000, 504, 5 * time.Second},
		{"stream, in time", nil, streams, true, 5000, 200, 12 * time.Second},
		{"stream, too slow", nil, streams, true, 1500, 504, 1500 * time.Millisecond},
		{"longer than configured", nil, slow(1000*time.Second, answers), false, 999000, 504, 300 * time.Second},
	}
	for _, tt := range tests {
		world.Run(t, tt.name, func(t *testing.T) {
			engines := []*world.Engine{{Serve: tt.decode}}
			decision := abi.PlanAggregate
			if tt.prefill != nil {
				decision = abi.PlanDisaggregate
				engines = []*world.Engine{
					{Name: "p0", Role: "prefill", Connector: "vllm-nixl", Serve: tt.prefill},
					{Name: "d0", Role: "decode", Connector: "vllm-nixl", Serve: tt.decode},
				}
			}
			w := world.New(t, world.Setup{Engines: engines, Config: func(c *config.Config) { c.Retry.Attempts = 1 }})
			w.Local.SetDecider(&planner{answer: abi.PlanAnswer{Decision: decision, LimitMillis: tt.limit}})
			begin := time.Now()
			a := w.Post(world.CompletionsPath, world.Completions(tt.stream))
			if took := time.Since(begin); a.Status != tt.status || took != tt.took {
				t.Errorf("after %v: %+v", took, a)
			}
			for _, i := range w.Registry.Snapshot().Instances {
				if n := i.Breaker.Failures(); n != 0 && tt.limit < 300000 {
					t.Errorf("failures of %s: got %d", i.Spec.Name, n)
				}
			}
		})
	}
}

func TestPlanRejects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := world.New(t, world.Setup{Engines: []*world.Engine{{}}})
		w.Local.SetDecider(&planner{answer: abi.PlanAnswer{Decision: abi.PlanReject, Status: 429}})
		a := w.Post(world.CompletionsPath, world.Completions(false))
		if a.Status != 429 || a.Header.Get("Retry-After") == "" || !strings.Contains(a.Body, "rejected_by_policy") {
			t.Errorf("%+v", a)
		}
		w.Outcome(telemetry.OutcomeNoTarget)
	})
}

// holdingWorld is a world whose plan policy holds all requests until release is called, each
// for at most limit.
func holdingWorld(t *testing.T, limit time.Duration) (w *world.World, asked *atomic.Int64, release func()) {
	t.Helper()
	e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
	w = world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) {
		c.Limits.QueueTimeout, c.Limits.DeadlineHeader = config.Duration(20*time.Second), "X-Deadline"
	}})
	var released atomic.Bool
	asked = new(atomic.Int64)
	w.Decider.Hold = func(*abi.PlanFacts) (bool, time.Duration) {
		asked.Add(1)
		return !released.Load(), limit
	}
	return w, asked, func() { released.Store(true) }
}

// TestHold: a request that the plan policy holds waits, and is served when the policy lets it go.
func TestHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, asked, release := holdingWorld(t, 0)
		got := make(chan world.Answer, 1)
		go func() { got <- w.Post(world.CompletionsPath, world.Completions(false)) }()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if n := w.Metric("pdproxy_requests_waiting", "m", "policy"); n != 1 {
			t.Errorf("%v requests are shown as held, want 1", n)
		}
		if n := asked.Load(); n < 10 || n > 20 {
			t.Errorf("the policy was asked %d times in 10 s, want about once a second", n)
		}
		release()
		if a := <-got; a.Status != 200 {
			t.Errorf("got %d %s", a.Status, a.Body)
		}
		if n := w.Metric("pdproxy_requests_waiting", "m", "policy"); n != 0 {
			t.Errorf("%v requests are shown as held after the end", n)
		}
		if e := w.Explained(); !strings.Contains(strings.Join(e.Notes, "\n"), "the plan policy held the request for 1") {
			t.Errorf("explain has the notes %q", e.Notes)
		}
	})
}

// TestHoldEnds: the wait ends at the limit of the policy, of the configuration, or of the request.
func TestHoldEnds(t *testing.T) {
	for _, tt := range []struct {
		name     string
		limit    time.Duration
		deadline string
		want     time.Duration
		code     string
	}{
		{"limit of the policy", 700 * time.Millisecond, "", 700 * time.Millisecond, "held_by_policy"},
		{"queue_timeout", 0, "", 20 * time.Second, "held_by_policy"},
		{"queue_timeout is less", time.Hour, "", 20 * time.Second, "held_by_policy"},
		{"deadline", time.Hour, "300", 300 * time.Millisecond, "deadline_exceeded"},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			w, _, _ := holdingWorld(t, tt.limit)
			began := time.Now()
			a := w.Post(world.CompletionsPath, world.Completions(false), "X-Deadline", tt.deadline)
			if took := time.Since(began); took != tt.want || a.Status != 503 || !strings.Contains(a.Body, `"code":"`+tt.code+`"`) || a.Header.Get("Retry-After") == "" {
				t.Errorf("%d %v %s after %v", a.Status, a.Header, a.Body, took)
			}
			if n := w.Metric("pdproxy_shed_total", tt.code); n != 1 {
				t.Errorf("%v requests are counted as shed", n)
			}
		})
	}
}

// TestHeldClientLeaves: a held request ends when its client leaves, and its place is free.
func TestHeldClientLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, asked, release := holdingWorld(t, 0)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		if a := world.Ask(ctx, w.Client, "POST", "http://proxy"+world.CompletionsPath, world.Completions(false)); a.Err == nil {
			t.Errorf("the client that left got %d", a.Status)
		}
		synctest.Wait()
		before := asked.Load()
		time.Sleep(5 * time.Second)
		if n := asked.Load() - before; n != 0 {
			t.Errorf("the policy was asked %d times after the client had left", n)
		}
		if n := w.Metric("pdproxy_requests_waiting", "m", "policy"); n != 0 {
			t.Errorf("%v requests are shown as held", n)
		}
		release()
		if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 {
			t.Errorf("the next request: %d", a.Status)
		}
	})
}

// TestHeldWhileDraining: a drain ends the wait of held requests with 503.
func TestHeldWhileDraining(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, _ := holdingWorld(t, 0)
		got := make(chan world.Answer, 1)
		go func() { got <- w.Post(world.CompletionsPath, world.Completions(false)) }()
		time.Sleep(time.Second)
		w.Drain()
		if a := <-got; a.Status != 503 || !strings.Contains(a.Body, `"code":"draining"`) {
			t.Errorf("%d %s", a.Status, a.Body)
		}
		if a := w.Get("/health"); a.Status != 503 || !strings.Contains(a.Body, "the proxy drains") {
			t.Errorf("GET /health: %d %s", a.Status, a.Body)
		}
	})
}

// Policies that need the prompt get it as raw JSON. The others do not get it.
func TestPromptOnRequest(t *testing.T) {
	for _, tt := range []struct {
		needs abi.Needs
		want  string
	}{{0, ""}, {abi.NeedPrompt, `"héllo \n"`}} {
		synctest.Test(t, func(t *testing.T) {
			w := world.New(t, world.Setup{Needs: tt.needs, Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}})
			if a := w.Post(world.CompletionsPath, `{"model":"m","prompt":"héllo \n","max_tokens":3}`); a.Status != 200 {
				t.Fatalf("%+v", a)
			}
			if got := w.Decider.Asked.Load().(abi.RequestFacts).Prompt; got != tt.want {
				t.Errorf("needs %d: got prompt %q, want %q", tt.needs, got, tt.want)
			}
		})
	}
}

// TestIdentityForPolicies: policies that need the identity learn the client, the tenant and the
// class of a request. The others get none of them.
func TestIdentityForPolicies(t *testing.T) {
	for _, tt := range []struct {
		name   string
		needs  abi.Needs
		config func(*config.Config)
		want   abi.Identity
	}{
		{"not needed", 0, classes(true), abi.Identity{}},
		{"without classes", abi.NeedIdentity, nil, abi.Identity{Client: abi.ClientID("b"), Tenant: abi.LabelID("a")}},
		{"with classes", abi.NeedIdentity, classes(true), abi.Identity{Client: abi.ClientID("b"), Tenant: abi.LabelID("a"), Class: abi.LabelID("batch")}},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			w := world.New(t, world.Setup{Needs: tt.needs, Config: tt.config, Engines: []*world.Engine{e}, Keys: world.TenantLine("a", "rpm=9") + world.TenantLine("b", "tenant=a")})
			if a := w.Post(world.CompletionsPath, world.Completions(false), "Authorization", "Bearer b-key", "X-Priority", "batch"); a.Status != 200 {
				t.Fatalf("%+v", a)
			}
			if got := w.Decider.Asked.Load().(abi.RequestFacts).Identity; got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}

// TestTraitsForPolicies: policies that need the traits learn the adapter, the cache salt, tools and
// media of a request. The salt's text is not among them.
func TestTraitsForPolicies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
		w := world.New(t, world.Setup{Needs: abi.NeedTraits, Engines: []*world.Engine{e}})
		traits := func(body string) abi.Traits {
			if a := w.Post("/v1/chat/completions", body); a.Status != 200 {
				t.Fatalf("%+v", a)
			}
			return w.Decider.Asked.Load().(abi.RequestFacts).Traits
		}
		if got := traits(`{"model":"m","messages":[{"role":"user","content":"x"}]}`); got != (abi.Traits{}) {
			t.Errorf("without traits: %+v", got)
		}
		got := traits(`{"model":"m","cache_salt":"s","lora_path":"l","tools":[{}],"messages":[{"role":"user","content":[{"type":"image_url"},{"type":"input_audio"}]}]}`)
		if got.Salt == 0 || got.Adapter != "l" || !got.Tools || !got.Images || !got.Audio {
			t.Errorf("with all traits: %+v", got)
		}
		if other := traits(`{"model":"m","cache_salt":"t","messages":[{"role":"user","content":"x"}]}`); other.Salt == 0 || other.Salt == got.Salt {
			t.Errorf("two salts have the hashes %x and %x", got.Salt, other.Salt)
		}
	})
}

// TestHeadersForPolicies: a request carries the headers that policies declare, and no other,
// if a policy needs headers.
func TestHeadersForPolicies(t *testing.T) {
	for _, needs := range []abi.Needs{0, abi.NeedTraits, abi.NeedHeaders} {
		synctest.Test(t, func(t *testing.T) {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			w := world.New(t, world.Setup{Needs: needs, Engines: []*world.Engine{e}})
			if a := w.Post(world.CompletionsPath, world.Completions(false), "X-Tier", "gold", "X-Other", "1", "Authorization", "Bearer key"); a.Status != 200 {
				t.Fatalf("%+v", a)
			}
			var want []abi.RequestHeader
			if needs == abi.NeedHeaders {
				want = []abi.RequestHeader{{Name: "x-tier", Value: "gold", Present: true}}
			}
			if got := w.Decider.Asked.Load().(abi.RequestFacts).Headers; !slices.Equal(got, want) {
				t.Errorf("needs %v: got %+v, want %+v", needs.Names(), got, want)
			}
		})
	}
}
