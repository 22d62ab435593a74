package conformance

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/journal"
)

// knowing describes a fleet whose engines publish their KV blocks, and a proxy
// that places by them.
func knowing(t *testing.T, connector, place string) fleetOptions {
	return fleetOptions{
		prefill: 2, decode: 1,
		engine: func(_ string, _ int, c *enginesim.Config) {
			if kindOf(connector) != enginesim.ConnectorTRTLLM {
				ranks := max(1, c.Ranks)
				first := testbed.Ports(t, 2*ranks)
				c.KVEvents.Endpoint = fmt.Sprintf("tcp://127.0.0.1:%d", first)
				c.KVEvents.Replay = fmt.Sprintf("tcp://127.0.0.1:%d", first+ranks)
			}
		},
		config: func(c *config.Config) {
			c.Policy.Place = place
			for i := range c.Engines {
				if kindOf(connector) == enginesim.ConnectorTRTLLM {
					c.Engines[i].KVEvents = "poll"
				}
			}
		},
	}
}

// startKnowing starts a fleet whose proxy knows the cached blocks.
func startKnowing(t *testing.T, connector, place string) *fleet {
	t.Helper()
	return startFleet(t, connector, knowing(t, connector, place))
}

// prompt returns a completion whose prompt is n token ids from first on, so
// that the number of its blocks is known.
func prompt(first, n int) string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprint(5 + (first+i*7)%240)
	}
	return fmt.Sprintf(`{"model":"sim","prompt":[%s],"max_tokens":4,"ignore_eos":true}`, strings.Join(ids, ","))
}

const completionsPath = "/v1/completions"

// explained sends a request with that body and returns the proxy's explanation.
func (f *fleet) explained(id, body string) journal.Explanation {
	f.t.Helper()
	a := f.post(context.Background(), f.url, completionsPath, body, "X-Request-Id", id)
	if a.status != 200 {
		f.t.Fatalf("got status %d: %s", a.status, a.body)
	}
	f.right(a, completionsPath, body)
	var e journal.Explanation
	f.eventually("the request is explained", func() bool {
		e = journal.Explanation{}
		f.admin("/v1/explain/"+id, &e)
		return e.RequestID == id
	})
	return e
}

// held returns the number of leading tokens of the request that the proxy
// assumed on each prefill engine.
func held(e journal.Explanation) map[string]int {
	tokens := make(map[string]int)
	for _, c := range e.Candidates {
		if c.Facts["role"] == "prefill" {
			number := func(name string) int { v, _ := c.Facts[name].(float64); return int(v) }
			tokens[c.Engine] = (number("blocks_gpu") + number("blocks_cpu") + number("blocks_disk")) * number("block_tokens")
		}
	}
	return tokens
}

// prefilledBy returns the engine that computed the request's prompt.
func prefilledBy(e journal.Explanation) string {
	for _, l := range e.Legs {
		if l.Phase == "prefill" && l.Error == "" {
			return l.Engine
		}
	}
	return ""
}

// byEvents returns the number of blocks in the index that come from the
// engines' events.
func (f *fleet) byEvents() float64 { return f.metric("pdproxy_kv_index_blocks", `by="event"`) }

// TestRequestsGoWhereTheirBlocksAre: the engines' events, in each protocol's
// own form, say where a prompt's blocks are, and a policy sends the next
// request there.
func TestRequestsGoWhereTheirBlocksAre(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := startKnowing(t, connector, "kv_aware")
		first := f.explained("first", prompt(0, 20*16))
		for engine, tokens := range held(first) {
			if tokens != 0 {
				t.Errorf("according to the index %s holds %d tokens of a new prompt", engine, tokens)
			}
		}
		home := prefilledBy(first)
		f.eventually("the blocks' events are in", func() bool { return f.byEvents() >= 20 })
		for i := range 4 {
			next := f.explained(fmt.Sprintf("next-%d", i), prompt(0, 24*16+i))
			tokens := held(next)
			if tokens[home] < 20*16 || tokens[home] > 24*16 {
				t.Errorf("according to the index %s holds %d tokens, want at least 320: %v", home, tokens[home], tokens)
			}
			if got := prefilledBy(next); got != home {
				t.Errorf("a prompt that %s holds was placed on %s: %v", home, got, tokens)
			}
			f.eventually("the blocks' events are in", func() bool { return f.byEvents() >= 24 })
		}
		other := f.explained("other", prompt(100, 20*16))
		for engine, tokens := range held(other) {
			if tokens != 0 {
				t.Errorf("according to the index %s holds %d tokens of another prompt", engine, tokens)
			}
		}
		cached := int64(0)
		for _, p := range f.prefill {
			cached += p.State().CachedTokens
		}
		if cached < 4*20*16 {
			t.Errorf("the engines found %d tokens in their caches, want at least %d", cached, 4*20*16)
		}
		if n := f.metric("pdproxy_kv_distrust"); n != 0 {
			t.Error("the check of the index reports an engine")
		}
	})
}

// TestTroubleIsNamed: a fault of an index is detected within 100 requests, and
// the report names the engine and the reason.
func TestTroubleIsNamed(t *testing.T) {
	for reason, spoil := range map[string]func(*enginesim.Engine) error{
		"tokenizer_mismatch": func(e *enginesim.Engine) error { e.SetWrongTokens(true); return nil },
		"missing_events":     func(e *enginesim.Engine) error { return e.SetKVEventFault(enginesim.KVEventsStop, -1) },
	} {
		t.Run(reason, func(t *testing.T) { testTroubleIsNamed(t, reason, spoil) })
	}
}

func testTroubleIsNamed(t *testing.T, reason string, spoil func(*enginesim.Engine) error) {
	f := startKnowing(t, enginesim.ConnectorVLLMNixl, "kv_aware")
	for i := range 2 { // both engines publish their block size
		f.try(chatPath, chat(fmt.Sprintf("%d: %s", i, long), 4, false))
	}
	f.eventually("the blocks' events are in", func() bool { return f.byEvents() > 0 })
	for _, e := range f.engines() {
		if err := spoil(e); err != nil {
			t.Fatal(err)
		}
	}
	distrusted := func(reason string) bool {
		return f.metric("pdproxy_kv_distrust", `reason="`+reason+`"`) > 0
	}
	for i := range 100 {
		a := f.try(chatPath, chat(fmt.Sprintf("%s and question number %d is another one", long, i), 4, false))
		if a.status != 200 {
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
		if distrusted(reason) {
			return
		}
	}
	t.Errorf("no %s after 100 requests", reason)
}

// TestARestartedEngineHoldsNothing: the index drops the blocks of an engine
// that restarts as a new process, and learns them anew.
func TestARestartedEngineHoldsNothing(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		o := knowing(t, connector, "kv_aware")
		configure := o.config
		o.config = func(c *config.Config) {
			configure(c)
			// An SGLang decode engine keeps the ports of the ended prefill process, so the proxy's
			// own trial of the pair holds its lease for this time.
			c.Timeouts.Handshake = config.Duration(time.Second)
		}
		f := startFleet(t, connector, o)
		first := f.explained("first", prompt(0, 20*16))
		known, home := 0.0, 0
		f.eventually("the blocks' events are in", func() bool {
			// Decode's events arrive later, on a busy machine more than 300 ms. If they came after this
			// wait, they would take the place of the forgotten ones in the sum.
			before := known
			time.Sleep(time.Second)
			known = f.byEvents()
			return known >= 20 && known == before
		})
		if prefilledBy(first) == "p1" {
			home = 1
		}
		old := f.prefill[home]
		c := enginesim.Config{
			Connector: f.connector, Role: enginesim.RolePrefill, Listen: old.Addr(), Lease: time.Minute, BootstrapPort: old.BootstrapPort(),
			KVEvents: enginesim.KVEventsConfig{Endpoint: old.KVEventsEndpoint(), Replay: old.KVEventsReplay()},
		}
		c.TRTLLM.DisconnectPoll, c.TRTLLM.KVTransferTimeout = 20*time.Millisecond, 2*time.Second
		old.Kill()
		old.Close() // waits until its ports are free
		name := fmt.Sprint("p", home)
		// Not every engine reports a new identity. The others take longer to
		// start than the probes take to notice the end.
		f.eventually(name+" has ended, as its probes have found", func() bool { return f.engineState(name) == "unhealthy" })
		f.prefill[home] = startEngine(t, c)
		f.waitReady()
		f.eventually("the blocks of "+name+" are forgotten", func() bool { return f.byEvents() <= known-20 })
		again := f.explained("again", prompt(0, 20*16))
		if tokens := held(again)[name]; tokens != 0 {
			t.Errorf("according to the index %s holds %d tokens", name, tokens)
		}
		f.eventually("the events of the new process are in", func() bool { return f.byEvents() >= known })
		if next := f.explained("next", prompt(0, 20*16)); held(next)[prefilledBy(next)] == 0 {
			t.Errorf("no blocks were learned after the restart: %v", held(next))
		}
	})
}

// TestShortPromptsStayWhole: two legs are used only where they are faster.
func TestShortPromptsStayWhole(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		if connector == enginesim.ConnectorVLLMStore {
			return // the speed of a directory depends on the load of the machine
		}
		speed := func(c *enginesim.Config) { c.PrefillUsPerToken = 200 }
		whole := enginesim.Config{Connector: kindOf(connector), Role: enginesim.RoleBoth, Lease: time.Minute}
		speed(&whole)
		both := startEngine(t, whole)
		f := startFleet(t, connector, fleetOptions{
			prefill: 1, decode: 1,
			engine: func(_ string, _ int, c *enginesim.Config) { speed(c) },
			config: func(c *config.Config) {
				c.Policy.Plan, c.Policy.Place = "pd_auto", "pair_aware"
				// One leg is charged 0.5 ms more for a short prompt, which is
				// less than any handover takes. For a long prompt it is charged
				// 750 ms more, which is more than a handover takes on a busy
				// machine.
				c.Policy.Params = map[string]map[string]float64{"pd_auto": {"stream_micros": 250}}
				c.Engines = append(c.Engines, engineSpec("b0", "both", kindOf(connector), both))
			},
		})
		f.decode = append(f.decode, both)
		for _, tt := range []struct {
			tokens int
			flow   string
		}{{2, "aggregated"}, {3000, "two legs"}} {
			flows := make(map[string]int)
			for i := range 6 {
				e := f.explained(fmt.Sprintf("r-%d-%d", tt.tokens, i), prompt(11*i, tt.tokens))
				if e.Flow != "aggregated" {
					e.Flow = "two legs"
				}
				for _, l := range e.Legs {
					if l.Error != "" {
						t.Errorf("%s on %s failed: %s", l.Phase, l.Engine, l.Error)
					}
				}
				flows[e.Flow]++
			}
			if flows[tt.flow] != 6 {
				t.Errorf("prompts of %d tokens: %v, want %s", tt.tokens, flows, tt.flow)
			}
		}
	})
}
