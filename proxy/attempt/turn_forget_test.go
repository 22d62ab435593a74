package attempt_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// keeping is a world whose decode engine retains the KV of each turn.
type keeping struct {
	*world.World
	mu        sync.Mutex
	forgotten []time.Time       // times at which prefill was asked to make decode free a turn; guarded by mu
	together  int               // decode answers after it has received this number of legs
	pulls     bool              // prefill closes the connection of a leg that pulls the KV of an earlier turn
	hangs     bool              // prefill does not answer such a leg before the proxy closes the connection
	closed    time.Time         // when the proxy closed it; guarded by mu
	late      bool              // prefill answers such a leg after timeouts.prefill
	away      time.Time         // until then prefill makes decode free no KV
	answering func()            // is called before decode answers; nil: nothing
	stream    func(*world.Conn) // sends decode's stream; nil: that of a response
	holder    *world.Engine     // decode
}

func newKeeping(t *testing.T, together int, options ...func(*proxy.Options)) *keeping {
	k := &keeping{together: together}
	var legs sync.WaitGroup
	legs.Add(together)
	prefill := func(c *world.Conn, _ int) {
		switch {
		case strings.HasSuffix(c.Leg.Header.Get("X-Request-Id"), "-forget"):
			if time.Now().Before(k.away) {
				c.HangUp()
				return
			}
			k.mu.Lock()
			k.forgotten = append(k.forgotten, time.Now())
			k.mu.Unlock()
			c.Send(world.StreamHead)
			c.Chunks("data: {\"choices\":[{\"text\":\"x\"}]}\n\n")
			c.Hold()
		case strings.Contains(c.Leg.Body, `"remote_engine_id":"d"`):
			k.pulls = true
			switch {
			case k.hangs:
				c.Hold()
				k.mu.Lock()
				k.closed = time.Now()
				k.mu.Unlock()
			case k.late:
				time.Sleep(time.Duration(config.Default().Timeouts.Prefill) + time.Second)
				c.JSON(200, world.NamedAnswer)
			default:
				c.HangUp()
			}
		default:
			c.JSON(200, world.NamedAnswer)
		}
	}
	decode := func(c *world.Conn, nth int) {
		if nth <= together {
			legs.Done()
			legs.Wait()
		}
		if k.answering != nil {
			k.answering()
		}
		switch {
		case !strings.Contains(c.Leg.Body, `"stream":true`):
			k.decode(c, nth)
		case k.stream != nil:
			k.stream(c)
		default:
			c.Stream("event: response.output_text.delta\ndata: {\"delta\":\"x\"}\n\n",
				fmt.Sprintf("event: response.completed\ndata: {\"response\":{\"output\":%q,%s}}\n\n", strings.Repeat("x", 2<<20), retainedKV))
		}
	}
	k.holder = &world.Engine{Name: "d", Role: "decode", Connector: "vllm-nixl", Bidirectional: true, Blocks: 16, Serve: decode}
	k.World = world.New(t, world.Setup{Options: func(o *proxy.Options) {
		for _, change := range options {
			change(o)
		}
	}, Engines: []*world.Engine{
		{Name: "p", Role: "prefill", Connector: "vllm-nixl", Bidirectional: true, Blocks: 16, Serve: prefill}, k.holder,
	}, Config: func(c *config.Config) { c.Retry.Attempts, c.Health = 1, quickProbes }})
	time.Sleep(time.Second) // the proxy has probed all engines
	return k
}

// quickProbes detects within a second that an engine does not respond.
var quickProbes = config.Health{
	Interval: config.Duration(100 * time.Millisecond), Timeout: config.Duration(200 * time.Millisecond),
	SuspectInterval: config.Duration(50 * time.Millisecond), UnhealthyAfter: 3, HealthyAfter: 3,
}

// decode answers a leg, and retains the KV of its three tokens.
func (*keeping) decode(c *world.Conn, _ int) {
	_, rest, _ := strings.Cut(c.Leg.Body, `"prompt":`)
	prompt, _, _ := strings.Cut(rest, "]")
	c.JSON(200, fmt.Sprintf(`{"choices":[{"text":"x","finish_reason":"length","prompt_token_ids":%s],"token_ids":[9]}],%s}`, prompt, retainedKV))
}

// retainedKV is the member of decode's answer that names the KV of a turn.
const retainedKV = `"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_block_ids":[[1]],"remote_num_tokens":3,` +
	`"remote_engine_id":"d","remote_request_id":"r","remote_host":"d.test","remote_port":1}`

// sendTurn sends one turn of a conversation.
func (k *keeping) sendTurn(prompt string) world.Answer {
	return k.Post(world.CompletionsPath, fmt.Sprintf(`{"model":"m","session_id":"c","prompt":%s,"max_tokens":5}`, prompt))
}

// freed returns the times at which the KV of turns was freed.
func (k *keeping) freed() []time.Time {
	synctest.Wait()
	k.mu.Lock()
	defer k.mu.Unlock()
	return append([]time.Time(nil), k.forgotten...)
}

// TestTurnsAreFreed: decode frees the KV of a turn if no later turn can use it.
func TestTurnsAreFreed(t *testing.T) {
	world.Run(t, "another turn takes its place", func(t *testing.T) {
		k := newKeeping(t, 2)
		var asked sync.WaitGroup
		for _, prompt := range []string{"[1,2,3]", "[4,5,6]"} {
			asked.Go(func() {
				if a := k.sendTurn(prompt); a.Status != 200 {
					t.Errorf("got status %d: %s", a.Status, a.Body)
				}
			})
		}
		asked.Wait()
		if n := k.Metric("pdproxy_turn_kv_total", "kept"); n != 2 || len(k.freed()) != 1 {
			t.Errorf("got %v retained turns and %d freed turns", n, len(k.freed()))
		}
	})
	world.Run(t, "the conversation is another one", func(t *testing.T) {
		k := newKeeping(t, 0)
		for freed, prompt := range []string{"[1,2,3]", "[4,5,6]"} {
			if a := k.sendTurn(prompt); a.Status != 200 || len(k.freed()) != freed {
				t.Errorf("got status %d: %s; %d freed turns, want %d", a.Status, a.Body, len(k.freed()), freed)
			}
		}
	})
	world.Run(t, "prefill is away for a minute", func(t *testing.T) {
		k := newKeeping(t, 0)
		k.away = time.Now().Add(time.Minute)
		for _, prompt := range []string{"[1,2,3]", "[4,5,6]"} {
			if a := k.sendTurn(prompt); a.Status != 200 {
				t.Fatalf("got status %d: %s", a.Status, a.Body)
			}
		}
		time.Sleep(90 * time.Second)
		if n := len(k.freed()); n != 1 {
			t.Errorf("got %d freed turns, want 1", n)
		}
	})
	world.Run(t, "decode does not respond for a minute", func(t *testing.T) {
		k := newKeeping(t, 0)
		if a := k.sendTurn("[1,2,3]"); a.Status != 200 {
			t.Fatalf("got status %d: %s", a.Status, a.Body)
		}
		resume := k.holder.Stop()
		time.Sleep(time.Minute)
		if !k.Registry.Snapshot().Instance("d").Unresponsive() {
			t.Fatal("the proxy has not detected that decode does not respond")
		}
		resume()
		time.Sleep(time.Minute)
		if a := k.sendTurn("[1,2,3,9,7]"); a.Status != 200 || k.pulls || len(k.freed()) != 1 {
			t.Errorf("got status %d: %s; pulled %v, %d freed turns", a.Status, a.Body, k.pulls, len(k.freed()))
		}
	})
	world.Run(t, "a stream names it in a very large event", func(t *testing.T) {
		k := newKeeping(t, 0)
		a := k.Post("/v1/responses", `{"model":"m","input":"hi","stream":true}`)
		if a.Status != 200 || len(a.Body) < 2<<20 || strings.Contains(a.Body, "d.test") || len(k.freed()) != 1 {
			t.Errorf("got status %d and %d bytes, %d freed turns; the client got the parameters: %v", a.Status, len(a.Body), len(k.freed()), strings.Contains(a.Body, "d.test"))
		}
	})
	world.Run(t, "the client does not get the answer", func(t *testing.T) {
		k := newKeeping(t, 0)
		taken := int64(0)
		k.answering = func() { // the memory is enough for the answer, but not for its public form
			taken = k.Memory.Limit() - k.Memory.Used() - 4200
			k.Memory.Take(taken)
		}
		if a := k.sendTurn("[1,2,3]"); a.Status != 503 || len(k.freed()) != 1 {
			t.Errorf("got status %d: %s; %d freed turns", a.Status, a.Body, len(k.freed()))
		}
		if n := k.Cleaned("abort_decode"); n != 0 {
			t.Errorf("got %v clean-ups of blocks that decode has read", n)
		}
		k.Memory.Release(taken)
	})
}

// TestTurnsThatPrefillReads: a prefill leg that failed may still read the KV of a turn.
// The KV is not freed during that time.
func TestTurnsThatPrefillReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKeeping(t, 0)
		if a := k.sendTurn("[1,2,3]"); a.Status != 200 {
			t.Fatalf("got status %d: %s", a.Status, a.Body)
		}
		a := k.sendTurn("[1,2,3,9,7]")
		failed := time.Now()
		time.Sleep(10 * cleanup.Yield)
		freed := k.freed()
		if a.Status != 502 || !k.pulls || len(freed) != 1 || freed[0].Sub(failed) < cleanup.Yield {
			t.Errorf("got status %d, pulled %v; KV freed at %v, prefill failed at %v", a.Status, k.pulls, freed, failed)
		}
	})
}

// TestTurnsThatLatePrefillReads: prefill has not answered in time, and the proxy still waits
// for the late answer. Prefill may begin to read the KV of the turn until the proxy closes the
// connection. If prefill answers late, it has read the KV, and nothing is left to free.
func TestTurnsThatLatePrefillReads(t *testing.T) {
	for name, frees := range map[string]int{"it never answers": 1, "it answers": 0} {
		world.Run(t, name, func(t *testing.T) {
			k := newKeeping(t, 0)
			k.hangs, k.late = frees == 1, frees == 0
			if a := k.sendTurn("[1,2,3]"); a.Status != 200 {
				t.Fatalf("got status %d: %s", a.Status, a.Body)
			}
			a := k.sendTurn("[1,2,3,9,7]")
			time.Sleep(time.Minute)
			freed := k.freed()
			k.mu.Lock()
			defer k.mu.Unlock()
			if a.Status != 504 || !k.pulls || len(freed) != frees {
				t.Fatalf("got status %d, pulled %v; KV freed at %v", a.Status, k.pulls, freed)
			}
			if frees > 0 && (k.closed.IsZero() || freed[0].Sub(k.closed) < cleanup.Yield) {
				t.Errorf("KV freed at %v, the leg was closed at %v", freed, k.closed)
			}
		})
	}
}

// TestTurnsThatASilentPrefillReads: the client leaves while the prefill engine that pulls the KV
// of a turn does not respond. It may read the KV when it resumes, so the proxy frees the KV only
// after that, also by another prefill engine.
func TestTurnsThatASilentPrefillReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &keeping{}
		proceed := func() {}
		prefill := func(c *world.Conn, _ int) {
			forgets := strings.HasSuffix(c.Leg.Header.Get("X-Request-Id"), "-forget")
			if !forgets && strings.Contains(c.Leg.Body, `"remote_engine_id":"d"`) {
				k.mu.Lock()
				k.pulls, proceed = true, sync.OnceFunc(c.E.Stop())
				k.mu.Unlock()
			}
			<-c.E.Stopped()
			if !forgets {
				c.JSON(200, strings.Replace(world.NamedAnswer, "p.test", c.E.Host(), 1))
				return
			}
			k.mu.Lock()
			k.forgotten = append(k.forgotten, time.Now())
			k.mu.Unlock()
			c.Send(world.StreamHead)
			c.Chunks(world.EventA)
			c.Hold()
		}
		k.World = world.New(t, world.Setup{Engines: []*world.Engine{
			{Name: "p0", Role: "prefill", Connector: "vllm-nixl", Bidirectional: true, Blocks: 16, Serve: prefill},
			{Name: "p1", Role: "prefill", Connector: "vllm-nixl", Bidirectional: true, Blocks: 16, Serve: prefill},
			{Name: "d", Role: "decode", Connector: "vllm-nixl", Bidirectional: true, Blocks: 16, Serve: k.decode},
		}, Config: func(c *config.Config) {
			c.Retry.Attempts, c.Health = 1, quickProbes
		}})
		time.Sleep(time.Second) // the proxy has probed all engines
		if a := k.sendTurn("[1,2,3]"); a.Status != 200 {
			t.Fatalf("got status %d: %s", a.Status, a.Body)
		}
		ctx, leave := context.WithTimeout(t.Context(), 5*time.Second)
		defer leave()
		world.Ask(ctx, k.Client, "POST", "http://proxy"+world.CompletionsPath, `{"model":"m","session_id":"c","prompt":[1,2,3,9,7],"max_tokens":5}`)
		time.Sleep(12 * time.Second)
		if freed := k.freed(); !k.pulls || len(freed) > 0 {
			t.Errorf("pulled %v; KV freed at %v, before the engine resumed", k.pulls, freed)
		}
		back := time.Now()
		proceed()
		time.Sleep(5 * time.Second)
		if freed := k.freed(); len(freed) != 1 || freed[0].Sub(back) < cleanup.Yield {
			t.Errorf("KV freed at %v, the engine resumed at %v", freed, back)
		}
	})
}

// TestTurnOfAnotherProcess: one process of a fleet has the record of a turn's KV, and another
// process frees the KV. The call goes to the prefill engine that the clean-up names. If that engine
// has gone, the call goes to another suitable one. No other bytes decode as such a clean-up.
func TestTurnOfAnotherProcess(t *testing.T) {
	for _, tt := range []struct {
		name, prefill string
		bidirectional bool
		how           string
		calls         int
	}{
		{"by the same prefill", "p0", true, "forget_turn", 1},
		{"by another prefill", "gone", true, "forget_turn", 1},
		{"by nobody", "gone", false, "engine_timeout", 0},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			p := &world.Engine{Name: "p0", Role: "prefill", Connector: "vllm-nixl", Bidirectional: tt.bidirectional, Serve: func(c *world.Conn, _ int) {
				c.Send(world.StreamHead)
				c.Chunks(`data: {"choices":[{"text":"x"}]}` + "\n\n")
				c.Hold()
			}}
			d := &world.Engine{Name: "d0", Role: "decode", Connector: "vllm-nixl"}
			w := world.New(t, world.Setup{Engines: []*world.Engine{p, d}})
			holder := engine.Target{Instance: w.Registry.Snapshot().Instance("d0")}
			prefill := targetNamed(tt.prefill)
			if known := w.Registry.Snapshot().Instance(tt.prefill); known != nil {
				prefill.Instance = known
			}
			forget := connector.Cleanup{
				Phase: abi.Prefill, Until: connector.UntilEvent, How: "forget_turn",
				Leg: connector.Leg{Path: "/v1/completions", Body: []byte(`{"prompt":[0]}`)},
			}
			job := cleanup.Retained(cleanup.Job{RequestID: "r", Connector: "vllm-nixl", Limit: time.Second}, forget, prefill, targetNamed("of that name"))
			told := &fleet.RetainedKV{
				Holder: holder, Since: holder.Since(), Host: holder.Host, Params: []byte(`{"remote_host":"d0"}`), Forget: job.Append(nil),
			}
			if err := w.ForgetTurn(told); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if legs := p.Seen(); len(legs) != tt.calls || tt.calls > 0 && legs[0].Body != `{"prompt":[0]}` {
				t.Errorf("prefill got %+v", legs)
			}
			if n := w.Metric("pdproxy_kv_cleanups_total", "vllm-nixl", tt.how); n != 1 {
				t.Errorf("got %v counted clean-ups", n)
			}
			for n := range told.Forget {
				short := *told
				short.Forget = told.Forget[:n]
				if w.ForgetTurn(&short) == nil {
					t.Fatalf("the first %d of %d bytes decode as a clean-up", n, len(told.Forget))
				}
			}
			job.Add([]connector.Cleanup{forget}, prefill, holder)
			told.Forget = job.Append(nil)
			if w.ForgetTurn(told) == nil {
				t.Error("two joined clean-ups decode as that of a turn")
			}
		})
	}
}

func targetNamed(name string) engine.Target {
	return engine.Target{Instance: &engine.Instance{Spec: config.Engine{Name: name}}}
}
