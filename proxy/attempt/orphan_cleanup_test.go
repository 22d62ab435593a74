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
			r.cut()
			if tt.stepsDown {
				synctest.Wait()
				r.server.StandBy()
			}
			time.Sleep(5 * time.Second)
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
