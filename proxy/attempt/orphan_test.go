package attempt_test

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// shared is the Numbers of a worker that shares its coordinator's registry.
type shared struct{ *engine.Registry }

func (shared) Number(i *engine.Instance) (uint32, bool) { return i.ID, true }

func (s shared) Instance(n uint32) *engine.Instance {
	for _, i := range s.Snapshot().Instances {
		if i.ID == n {
			return i
		}
	}
	return nil
}

// remote connects the exchanges of a world to their coordinator over a pipe. cut closes
// the pipe: for the coordinator this is the death of the exchanges' process.
type remote struct {
	client *fleet.Client
	server *fleet.Server
	cut    func()
	stop   func() // waits for both goroutines
}

// die cuts the pipe and waits until the coordinator has freed what it can. The coordinator may step
// down at once.
func (r *remote) die(stepsDown bool) {
	r.cut()
	if stepsDown {
		synctest.Wait()
		r.server.StandBy()
	}
	time.Sleep(5 * time.Second)
}

func newRemote(t *testing.T, d *proxy.Options, orphan func([]byte)) *remote {
	t.Helper()
	ids, err := disaggid.New(1, 1)
	if err != nil {
		t.Fatal(err)
	}
	native := &world.Decider{}
	l := proxytest.NewPipeListener()
	var mu sync.Mutex
	var conns []net.Conn
	dead := false
	r := &remote{
		server: fleet.NewServer(fleet.ServerOptions{Local: d.Coordinator.(*coordinator.Local), Log: d.Log, OnOrphan: orphan}),
		client: fleet.NewClient(fleet.ClientOptions{
			Dial: func(context.Context) (net.Conn, error) {
				mu.Lock()
				defer mu.Unlock()
				if dead {
					return nil, net.ErrClosed
				}
				c, err := l.Dial()
				conns = append(conns, c)
				return c, err
			},
			Fallback: coordinator.NewLocal(d.Registry, native, native, coordinator.State{}, ids, d.Metrics),
			Mirror:   shared{d.Registry}, Log: d.Log, Observer: d.Metrics,
		}),
	}
	d.Coordinator = r.client
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { r.client.Run(ctx) })
	running.Go(func() {
		if err := r.server.Serve(ctx, l); err != nil {
			t.Error(err)
		}
	})
	r.cut = func() {
		mu.Lock()
		defer mu.Unlock()
		dead = true
		for _, c := range conns {
			c.Close()
		}
	}
	r.stop = func() { cancel(); running.Wait() }
	return r
}

// TestADeadProcessOwesNothing: if a process dies between prefill's answer and decode's
// read, the coordinator frees prefill's blocks. At any other time the coordinator has
// nothing to free. Decode reads the blocks until it has handled the end of its connection.
func TestADeadProcessOwesNothing(t *testing.T) {
	for _, tt := range []struct {
		name         string
		decodeBegins bool
		stepsDown    bool // the coordinator steps down at once
		frees        int
	}{{"before decode's answer", false, false, 1}, {"before decode's answer and the end of the term", false, true, 1}, {"while decode streams", true, false, 0}} {
		world.Run(t, tt.name, func(t *testing.T) {
			var r *remote
			var w *world.World
			freed := make(chan time.Time, 2)
			decode := &world.Engine{Name: "d", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, nth int) {
				switch {
				case nth > 1:
					freed <- time.Now()
					c.Send(world.StreamHead) // for the call that the coordinator aborts at once
					c.Hold()
				case tt.decodeBegins:
					c.Send(world.StreamHead)
					c.Chunks(`data: {"choices":[{"text":"x"}]}` + "\n\n")
					c.Hold()
				default:
					c.Hold()
				}
			}}
			w = world.New(t, world.Setup{
				Engines: []*world.Engine{
					{Name: "p", Role: "prefill", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.NIXLAnswer) }},
					decode,
				},
				Options: func(d *proxy.Options) {
					r = newRemote(t, d, func(owed []byte) {
						if err := w.CleanUp(owed); err != nil {
							t.Error(err)
						}
					})
				},
			})
			defer r.stop()
			synctest.Wait()
			ctx, hangUp := context.WithCancel(t.Context())
			var asked sync.WaitGroup
			asked.Go(func() {
				world.Ask(ctx, w.Client, "POST", "http://proxy"+world.CompletionsPath, world.Completions(true))
			})
			time.Sleep(time.Second)
			if n := len(decode.Seen()); n != 1 || w.Local.Open() != 1 {
				t.Fatalf("got %d decode legs and %d leases", n, w.Local.Open())
			}
			died := time.Now()
			r.die(tt.stepsDown)
			legs := decode.Seen()
			if len(legs)-1 != tt.frees || w.Local.Open() != 0 {
				t.Fatalf("the coordinator made %d calls and holds %d leases, want %d and 0", len(legs)-1, w.Local.Open(), tt.frees)
			}
			if tt.frees == 1 {
				if after := (<-freed).Sub(died); after < cleanup.Yield {
					t.Errorf("the blocks were freed %v after the death", after)
				}
			}
			if tt.frees == 1 && !strings.Contains(legs[1].Body, `"remote_block_ids":[1]`) {
				t.Errorf("the encoded clean-up contains the text: %s", legs[1].Body)
			}
			if n := w.Metric("pdproxy_kv_cleanups_total", "vllm-nixl", "abort_decode"); n != float64(tt.frees) {
				t.Errorf("got %v counted clean-ups", n)
			}
			hangUp()
			asked.Wait()
		})
	}
}

// TestCleanUp: a process makes the clean-up calls of another process, to the engines that
// the calls name.
func TestCleanUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &world.Engine{Name: "p0", Role: "prefill", Connector: "vllm-nixl", Serve: world.PrefillAnswers}
		d := &world.Engine{Name: "d0", Role: "decode", Connector: "vllm-nixl", Key: "secret", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
		w := world.New(t, world.Setup{Engines: []*world.Engine{p, d}})
		target := func(name string) engine.Target { return engine.Target{Instance: w.Registry.Snapshot().Instance(name)} }
		call := connector.Cleanup{
			Phase: abi.Decode, AnyTarget: true, Hosts: []string{"p0.test"}, Until: connector.UntilHead, How: "abort_decode",
			Leg: connector.Leg{Path: "/v1/completions", Header: []connector.Field{{Name: "X-Request-Id", Value: "leg-cleanup"}}, Body: []byte(`{"prompt":[0]}`)},
		}
		job := &cleanup.Job{RequestID: "r", Connector: "vllm-nixl", Limit: time.Second}
		job.Add([]connector.Cleanup{call}, target("p0"), target("d0"))
		if err := w.CleanUp(job.Encode()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * cleanup.Yield)
		synctest.Wait()
		if legs := d.Seen(); len(legs) != 1 || legs[0].Path != "/v1/completions" || legs[0].Body != `{"prompt":[0]}` ||
			legs[0].Header.Get("X-Request-Id") != "leg-cleanup" || legs[0].Header.Get("Authorization") != "Bearer secret" {
			t.Errorf("decode got %+v", legs)
		}
		if n := w.Metric("pdproxy_kv_cleanups_total", "vllm-nixl", "abort_decode"); n != 1 {
			t.Errorf("got %v clean-ups", n)
		}
	})
}

// pushAnswer is the answer of a prefill engine in push mode.
var pushAnswer = strings.Replace(world.NIXLAnswer, `"remote_engine_id":"e"`, `"remote_engine_id":"push"`, 1)

// TestADeadProcessLeavesNoWaitingDecode: if a process dies while prefill computes for a decode engine
// that waits without end (push mode), the coordinator sends the prefill leg again. At any other time
// it sends nothing. A process that runs sends the leg itself.
func TestADeadProcessLeavesNoWaitingDecode(t *testing.T) {
	for _, tt := range []struct {
		name           string
		prefillAnswers bool
		decodeBegins   bool
		leaves         bool // the client leaves before the process dies
		stepsDown      bool // the coordinator steps down at once
		size           int  // of the prompt, in bytes
		again          int  // prefill legs that are sent again
		byWorker       bool
	}{
		{name: "while prefill computes", again: 1},
		{name: "while prefill computes, and the term ends", stepsDown: true, again: 1},
		{name: "while prefill computes a prompt that is too long for the coordinator", size: cleanup.MaxEncoded},
		{name: "while prefill computes a prompt that is nearly too long", size: cleanup.MaxEncoded - 4<<10, again: 1},
		{name: "after prefill's answer", prefillAnswers: true},
		{name: "after the start of decode's answer", decodeBegins: true},
		{name: "after the client has left", leaves: true, again: 1, byWorker: true},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			var r *remote
			var w *world.World
			taken := 0
			arrived := make(chan time.Time, 2)
			prefill := &world.Engine{Name: "p", Role: "prefill", Connector: "vllm-nixl-push", Serve: func(c *world.Conn, nth int) {
				if nth > 1 {
					arrived <- time.Now()
				} else if !tt.prefillAnswers {
					c.Hold()
					return
				}
				c.JSON(200, pushAnswer)
			}}
			decode := &world.Engine{Name: "d", Role: "decode", Connector: "vllm-nixl-push", Serve: func(c *world.Conn, _ int) {
				if tt.decodeBegins {
					c.Send(world.StreamHead)
					c.Chunks(`data: {"choices":[{"text":"x"}]}` + "\n\n")
				}
				c.Hold()
			}}
			w = world.New(t, world.Setup{Engines: []*world.Engine{prefill, decode}, Options: func(d *proxy.Options) {
				r = newRemote(t, d, func(owed []byte) {
					taken++
					if err := w.CleanUp(owed); err != nil {
						t.Error(err)
					}
				})
			}})
			defer r.stop()
			synctest.Wait()
			ctx, hangUp := context.WithCancel(t.Context())
			defer hangUp()
			var asked sync.WaitGroup
			body := strings.Replace(world.Completions(true), `"prompt":"`, `"prompt":"`+strings.Repeat("x", tt.size), 1)
			if len(body) < tt.size {
				t.Fatalf("got a body of %d bytes", len(body))
			}
			asked.Go(func() { world.Ask(ctx, w.Client, "POST", "http://proxy"+world.CompletionsPath, body) })
			time.Sleep(time.Second)
			if len(prefill.Seen()) != 1 || len(decode.Seen()) != 1 || w.Local.Open() != 1 {
				t.Fatalf("got %d and %d legs and %d leases", len(prefill.Seen()), len(decode.Seen()), w.Local.Open())
			}
			ended := time.Now()
			if tt.leaves {
				hangUp()
				time.Sleep(cleanup.Yield / 2)
			}
			r.die(tt.stepsDown)
			legs := prefill.Seen()
			if len(legs)-1 != tt.again || w.Local.Open() != 0 {
				t.Fatalf("prefill got %d legs again, and the coordinator holds %d leases, want %d and 0", len(legs)-1, w.Local.Open(), tt.again)
			}
			if n := w.Cleaned("prefill_again"); n != float64(tt.again) {
				t.Errorf("got %v counted clean-ups", n)
			}
			if byWorker := tt.again == 1 && taken == 0; taken > tt.again || byWorker != tt.byWorker {
				t.Errorf("the coordinator got %d clean-ups", taken)
			}
			if tt.again == 1 {
				if after := (<-arrived).Sub(ended); after < cleanup.Yield {
					t.Errorf("the leg was sent again %v after the end of the first", after)
				}
				if legs[1].Path != legs[0].Path || legs[1].Body != legs[0].Body || legs[1].Header.Get("X-Request-Id") != legs[0].Header.Get("X-Request-Id") {
					t.Errorf("the second leg differs: %s %v", legs[1].Path, legs[1].Header)
				}
			}
			hangUp()
			asked.Wait()
		})
	}
}
