package attempt_test

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// faulty is a connector whose named methods panic.
type faulty struct {
	connector.Connector
	in string
}

func (f faulty) panicIn(place string) {
	if f.in == place {
		panic("faulty")
	}
}

func (f faulty) Serves(api openai.API) bool {
	f.panicIn("Serves")
	return f.Connector.Serves(api)
}

func (f faulty) Pairable(r *openai.Request) error {
	f.panicIn("Pairable")
	return f.Connector.Pairable(r)
}

func (f faulty) Prefill(a *connector.Attempt, dst []byte) (connector.Leg, error) {
	f.panicIn("Prefill")
	return f.Connector.Prefill(a, dst)
}

func (f faulty) ReadPrefill(a *connector.Attempt, body []byte) (connector.Handoff, error) {
	f.panicIn("ReadPrefill")
	return f.Connector.ReadPrefill(a, body)
}

func (f faulty) Decode(a *connector.Attempt, h *connector.Handoff, dst []byte) (connector.Leg, error) {
	f.panicIn("Decode")
	return f.Connector.Decode(a, h, dst)
}

// Wherever an exchange panics, its client gets an error, and the exchange leaves no
// lease, no leg and no place in a queue. world.New asserts the latter.
func TestPanicLeavesNothingBehind(t *testing.T) {
	answers := map[string]string{
		"vllm-nixl": `{"choices":[]}`,
		"sglang":    `{"choices":[{"text":"x","finish_reason":"length"}]}`,
	}
	for name, answer := range answers {
		for _, in := range []string{"Pairable", "Prefill", "ReadPrefill", "Decode"} {
			world.Run(t, name+" "+in, func(t *testing.T) {
				serve := func(c *world.Conn, _ int) { c.JSON(200, answer) }
				w := world.New(t, world.Setup{Engines: []*world.Engine{
					{Name: "p0", Role: "prefill", Connector: name, Serve: serve},
					{Name: "d0", Role: "decode", Connector: name, Serve: func(c *world.Conn, nth int) {
						if in == "ReadPrefill" {
							c.Hold() // until the failure of prefill cancels the leg
							return
						}
						serve(c, nth)
					}},
				}})
				inner, _ := connector.ByName(name)
				w.SetConnectors(append(connector.All(), faulty{inner, in}))
				a := w.Post(world.CompletionsPath, world.Completions(false))
				if a.Err == nil && a.Status != 500 {
					t.Errorf("got status %d: %s", a.Status, a.Body)
				}
				w.Outcome(telemetry.OutcomeInternal)
			})
		}
	}
}

// panickingClient is a client whose first call panics one second after it began, unless its engine
// has answered before.
type panickingClient struct {
	upstream.Client
	over *atomic.Bool
}

func (c panickingClient) Do(ctx context.Context, req *upstream.Request) (*upstream.Response, error) {
	if c.over.Swap(true) {
		return c.Client.Do(ctx, req)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if resp, err := c.Client.Do(ctx, req); err == nil {
		resp.Close()
	}
	panic("faulty")
}

// panickingWriter is a client's connection that panics when the given piece of a stream is written.
type panickingWriter struct {
	http.ResponseWriter
	at string
}

func (w panickingWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w panickingWriter) Write(p []byte) (int, error) {
	if string(p) == w.at {
		panic("faulty")
	}
	return w.ResponseWriter.Write(p)
}

// panickingCoordinator panics when it is asked for another decode engine.
type panickingCoordinator struct{ coordinator.Coordinator }

func (c panickingCoordinator) Place(ctx context.Context, ask *coordinator.PlacementRequest) (*coordinator.Placement, error) {
	if !ask.Prefill.IsZero() {
		panic("faulty")
	}
	return c.Coordinator.Place(ctx, ask)
}

// Wherever an attempt panics while it waits, it frees everything: the KV on the engines, the lease,
// the memory, and its place on the pair. world.New asserts that no lease and no memory is left.
func TestPanicWhileAnAttemptWaits(t *testing.T) {
	isCleanup := func(leg world.Leg) bool { return strings.HasSuffix(leg.Header.Get("X-Request-Id"), "-cleanup") }
	for name, tt := range map[string]struct {
		connector string
		hangs     string // this engine receives its leg and does not answer, and the call of the leg panics
		write     string // the relay panics when it writes this
		refuses   bool   // decode refuses its leg, and the search for another engine panics
		computes  bool   // prefill has not answered when the relay panics
		cleanup   string // the label of the clean-up calls; "": there are none
		calls     int
	}{
		"for prefill's answer":     {connector: "vllm-nixl", hangs: "p0"}, // prefill frees the blocks of a call that has ended before its answer
		"for decode's head":        {connector: "vllm-nixl", hangs: "d0", cleanup: "abort_decode", calls: 1},
		"for another decode":       {connector: "vllm-nixl", refuses: true, cleanup: "abort_decode", calls: 1},
		"in the relay":             {connector: "vllm-nixl", write: world.EventB},
		"for concurrent prefill":   {connector: "sglang", hangs: "p0", cleanup: "abort_rid", calls: 2},
		"for concurrent decode":    {connector: "sglang", hangs: "d0", cleanup: "abort_rid", calls: 2},
		"in a relay with two legs": {connector: "sglang", write: world.EventB, cleanup: "abort_rid", calls: 1}, // on decode, which may still generate
		"in a relay with prefill":  {connector: "sglang", write: world.EventB, computes: true, cleanup: "abort_rid", calls: 2},
	} {
		world.Run(t, name, func(t *testing.T) {
			engines := []*world.Engine{
				{Name: "p0", Role: "prefill", Connector: tt.connector, Serve: func(c *world.Conn, nth int) {
					switch {
					case strings.Contains(c.Leg.Path, "abort"):
						c.JSON(200, "{}")
					case tt.hangs == "p0" || tt.connector == "sglang" && tt.hangs != "" || tt.computes:
						c.Hold()
					case tt.connector == "sglang":
						c.JSON(200, `{"choices":[{"text":"x","finish_reason":"length"}]}`)
					default:
						world.PrefillAnswers(c, nth)
					}
				}},
				{Name: "d0", Role: "decode", Connector: tt.connector, Serve: func(c *world.Conn, _ int) {
					switch {
					case strings.Contains(c.Leg.Path, "abort"):
						c.JSON(200, "{}")
					case isCleanup(c.Leg):
						c.Send(world.StreamHead)
						c.Hold()
					case tt.hangs != "":
						c.Hold()
					case tt.refuses:
						c.Send("HTTP/1.1 503 x\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
					default:
						c.Send(world.StreamHead)
						c.Chunks(world.EventA)
						time.Sleep(time.Millisecond) // until the proxy has read prefill's answer
						c.Chunks(world.EventB, world.Done)
						c.Send("0\r\n\r\n")
					}
				}},
			}
			var over atomic.Bool
			w := world.New(t, world.Setup{Engines: engines,
				Clients: func(name string, c upstream.Client) upstream.Client {
					if name == tt.hangs {
						return panickingClient{c, &over}
					}
					return c
				},
				Options: func(o *proxy.Options) {
					if tt.refuses {
						o.Coordinator = panickingCoordinator{o.Coordinator}
					}
					if tt.write != "" {
						o.Wrap = func(h http.Handler) http.Handler {
							return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { h.ServeHTTP(panickingWriter{w, tt.write}, r) })
						}
					}
				}})
			if a := w.Post(world.CompletionsPath, world.Completions(true)); a.Err == nil && a.Status != 500 {
				t.Errorf("got status %d: %s", a.Status, a.Body)
			}
			w.Outcome(telemetry.OutcomeInternal)
			time.Sleep(time.Minute) // for the clean-up
			synctest.Wait()
			if all, n := w.Metric("pdproxy_kv_cleanups_total"), w.Cleaned(tt.cleanup); all != float64(tt.calls) || tt.calls > 0 && n != all {
				t.Errorf("got %v clean-ups, %v of them %s; want %d", all, n, tt.cleanup, tt.calls)
			}
			for _, e := range engines {
				n := 0
				for _, leg := range e.Seen() {
					if strings.Contains(leg.Path, "abort") || isCleanup(leg) {
						n++
					}
				}
				if n > 1 {
					t.Errorf("%s got %d clean-ups", e.Name, n)
				}
			}
			known := w.Registry.Snapshot()
			p, d := engine.Target{Instance: known.Instance("p0")}, engine.Target{Instance: known.Instance("d0")}
			if s := w.Registry.Pair(p, d).State(); s == abi.PairWarming {
				t.Error("the pair still counts the attempt")
			}
			w.Settled()
		})
	}
}

// An exchange that panics when its wait for an engine has brought a placement leaves the line of its
// model. world.New asserts that it leaves no lease.
func TestPanicEndsTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, e, back := world.EmptyWorld(t, time.Hour, nil)
		inner, _ := connector.ByName(e.Spec().Connector)
		w.SetConnectors(append(connector.All(), faulty{inner, "Serves"}))
		ended := make(chan world.Answer)
		go func() { ended <- w.Post(world.CompletionsPath, world.Asking("m")) }()
		synctest.Wait()
		if n := w.Metric("pdproxy_requests_waiting", "m"); n != 1 {
			t.Fatalf("%v requests wait", n)
		}
		back()
		if a := <-ended; a.Err == nil && a.Status != 500 {
			t.Errorf("got status %d: %s", a.Status, a.Body)
		}
		if n := w.Waiting(); n != 0 {
			t.Errorf("%d requests wait after the panic", n)
		}
		if n := w.Metric("pdproxy_requests_waiting", "m"); n != 0 {
			t.Errorf("%v waiting requests are counted after the panic", n)
		}
		w.Outcome(telemetry.OutcomeInternal)
	})
}

// If both legs run at the same time, each leg may time out because of the other engine.
// So the next attempt uses two other engines.
func TestHungDecodeIsLeftWithItsPair(t *testing.T) {
	const answer = `{"choices":[{"text":"x","finish_reason":"length"}]}`
	for range 8 { // the place policy chooses at random
		synctest.Test(t, func(t *testing.T) {
			hung := &world.Engine{Name: "d0", Role: "decode", Connector: "sglang", Serve: func(c *world.Conn, _ int) { c.Hold() }}
			serve := func(c *world.Conn, _ int) {
				time.Sleep(time.Millisecond) // until decode has received its leg
				if holds(hung, c.Leg) {
					c.Hold() // decode never reads the KV
					return
				}
				c.JSON(200, answer)
			}
			w := world.New(t, world.Setup{
				Config: func(c *config.Config) {
					c.Timeouts.Prefill, c.Timeouts.FirstByte = config.Duration(time.Second), config.Duration(2*time.Second)
				},
				Engines: []*world.Engine{
					{Name: "p0", Role: "prefill", Connector: "sglang", Serve: serve},
					{Name: "p1", Role: "prefill", Connector: "sglang", Serve: serve},
					hung,
					{Name: "d1", Role: "decode", Connector: "sglang", Serve: func(c *world.Conn, _ int) { c.JSON(200, answer) }},
				},
			})
			if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 {
				t.Errorf("got status %d: %s", a.Status, a.Body)
			}
			time.Sleep(time.Second) // until the proxy has received prefill's late answer
			if n := len(w.Explained().Legs); n > 4 {
				t.Errorf("got %d legs: the hung engine received two", n)
			}
		})
	}
}

// holds reports whether the engine has received the other leg of a pair.
func holds(e *world.Engine, leg world.Leg) bool {
	_, room, _ := strings.Cut(leg.Body, `"bootstrap_room":`)
	room, _, _ = strings.Cut(room, ",")
	for _, mine := range e.Seen() {
		if strings.Contains(mine.Body, `"bootstrap_room":`+room) {
			return true
		}
	}
	return false
}
