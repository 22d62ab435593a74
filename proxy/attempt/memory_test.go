package attempt_test

import (
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// If the memory for an answer is missing, the exchange ends, and no engine is charged
// with a failure.
func TestAnswerWithoutMemory(t *testing.T) {
	const size = 1 << 20
	long := `{"choices":[{"text":"` + strings.Repeat("a", size) + `"}],"kv_transfer_params":{"do_remote_prefill":true}}`
	tests := map[string]struct {
		connector string
		serve     func(c *world.Conn, nth int)
		stream    bool
	}{
		"whole":        {"", func(c *world.Conn, _ int) { c.JSON(200, long) }, false},
		"refusal":      {"", func(c *world.Conn, _ int) { c.JSON(400, long) }, false},
		"first event":  {"", func(c *world.Conn, _ int) { c.Stream(strings.Repeat(": "+strings.Repeat("c", 4000)+"\n\n", 10)) }, true},
		"prefill":      {"vllm-nixl", func(c *world.Conn, _ int) { c.JSON(200, long) }, false},
		"beside":       {"sglang", func(c *world.Conn, _ int) { c.JSON(200, long) }, false},
		"inside event": {"", func(c *world.Conn, _ int) { c.Stream(world.EventA, "data: "+long[:size/2], long[size/2:]) }, true},
	}
	for name, tt := range tests {
		world.Run(t, name, func(t *testing.T) {
			engines := []*world.Engine{{Name: "e", Serve: tt.serve}, {Name: "f", Serve: tt.serve}}
			if tt.connector != "" {
				engines = []*world.Engine{{Name: "p", Role: "prefill", Connector: tt.connector, Serve: tt.serve}, {Name: "d", Role: "decode", Connector: tt.connector, Serve: tt.serve}}
			}
			w := world.New(t, world.Setup{Engines: engines, Config: func(c *config.Config) {
				c.Limits.BufferMemory = 1 << 20
				c.Circuit.Failures = 1
			}})
			taken := w.Memory.Limit() - 32<<10 // room for the request and the first part of an answer
			w.Memory.Take(taken)
			a := w.Post(world.CompletionsPath, world.Completions(tt.stream))
			began := name == "inside event" // the client has received the first event
			switch {
			case began:
				if !strings.Contains(a.Body, "stream_broken") {
					t.Errorf("%+v", a)
				}
			case a.Status != 503 || !strings.Contains(a.Body, "memory_limit") || a.Header.Get("Retry-After") == "":
				t.Errorf("got status %d: %.300s", a.Status, a.Body)
			}
			if n := w.Metric("pdproxy_shed_total", "memory_limit"); n != 1 {
				t.Errorf("got %v counted refusals", n)
			}
			if n := w.Metric("pdproxy_retries_total"); n != 0 {
				t.Errorf("got %v retries", n)
			}
			for _, i := range w.Registry.Snapshot().Instances {
				if i.Breaker.Failures() != 0 {
					t.Errorf("got %d failures of %s, want 0", i.Breaker.Failures(), i.Spec.Name)
				}
			}
			if !began {
				w.Outcome(telemetry.OutcomeShed)
			}
			w.Memory.Release(taken)
			synctest.Wait()
		})
	}
}

// TestLastEventWithoutMemory: the memory for the last event of a stream is missing. The read
// that completes this event also has the closing event. The client gets an error event, because it
// has not received the last event.
func TestLastEventWithoutMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w *world.World
		taken := int64(0)
		event := `data: {"choices":[{"text":"` + strings.Repeat("b", 4900) + "\"}]}\n\n"
		e := &world.Engine{Serve: func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			c.Chunks(world.EventA, event[:3900])
			time.Sleep(time.Millisecond) // the proxy holds the first part
			taken = w.Memory.Limit() - w.Memory.Used()
			w.Memory.Take(taken)
			c.Chunks(event[3900:] + world.Done)
			c.Send("0\r\n\r\n")
		}}
		w = world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) { c.Limits.BufferMemory = 1 << 20 }})
		if a := w.Post(world.CompletionsPath, world.Completions(true)); a.Body != world.EventA+world.Broken {
			t.Errorf("got %.300q, error %v", a.Body, a.Err)
		}
		w.Outcome(telemetry.OutcomeBroken)
		w.Memory.Release(taken)
		synctest.Wait()
	})
}

// The proxy rejects an answer above the limit before it takes more memory than the limit.
func TestAnswerTakesNoMoreThanItMay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		piece := strings.Repeat("a", 1<<20)
		var w *world.World
		var most atomic.Int64
		e := &world.Engine{Serve: func(c *world.Conn, _ int) {
			c.Send("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
			for range 70 {
				c.Send(piece)
				most.Store(max(most.Load(), w.Memory.Used()))
			}
			c.HangUp()
		}}
		w = world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) {
			c.Limits.BufferMemory, c.Retry.Attempts = 1<<30, 1
		}})
		if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 502 {
			t.Errorf("got status %d: %.300s", a.Status, a.Body)
		}
		if most := most.Load(); most > buffer.MaxAnswer+buffer.MaxAnswer/2+1<<20 { // including the copy when a buffer of half the size grows
			t.Errorf("limit of the answer %d bytes: the proxy took %d bytes", buffer.MaxAnswer, most)
		}
	})
}

// The total time of a whole answer is limited, even if parts of it arrive regularly.
func TestWholeAnswerThatDrips(t *testing.T) {
	drip := func(head string) func(c *world.Conn, nth int) {
		return func(c *world.Conn, _ int) {
			io.WriteString(c, head)
			for {
				if _, err := io.WriteString(c, " "); err != nil {
					c.HangUp()
					return
				}
				time.Sleep(3 * time.Second)
			}
		}
	}
	const sized = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
	tests := []struct {
		name, connector string
		head            string
		stream          bool
		slow            abi.Phase
		limit           time.Duration
	}{
		{"whole", "", sized, false, abi.Decode, 10 * time.Second},
		{"refusal", "", "HTTP/1.1 400 Bad Request\r\nContent-Length: 1000\r\n\r\n", false, abi.Decode, 10 * time.Second},
		{"whole answer to a stream request", "", sized, true, abi.Decode, 10 * time.Second},
		{"first event", "", "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: ", true, abi.Decode, 10 * time.Second},
		{"head", "", "HTTP/1.1 200 OK\r\nX-A: ", true, abi.Decode, 10 * time.Second},
		{"prefill, nixl", "vllm-nixl", sized, false, abi.Prefill, 7 * time.Second},
		{"prefill, sglang", "sglang", sized, false, abi.Prefill, 7 * time.Second},
		{"prefill, push", "vllm-nixl-push", sized, false, abi.Prefill, 7 * time.Second},
		{"prefill, moriio", "vllm-moriio", sized, false, abi.Prefill, 7 * time.Second},
		{"prefill, trtllm", "trtllm", sized, false, abi.Prefill, 7 * time.Second},
	}
	for _, tt := range tests {
		world.Run(t, tt.name, func(t *testing.T) {
			var engines []*world.Engine
			if tt.connector == "" {
				engines = []*world.Engine{{Serve: drip(tt.head)}}
			} else {
				engines = []*world.Engine{{Name: "p", Role: "prefill", Connector: tt.connector, Serve: drip(tt.head)},
					{Name: "d", Role: "decode", Connector: tt.connector, Serve: func(c *world.Conn, _ int) { c.Hold() }}}
			}
			w := world.New(t, world.Setup{Engines: engines, Config: func(c *config.Config) {
				c.Timeouts.FirstByte, c.Timeouts.Prefill = config.Duration(10*time.Second), config.Duration(7*time.Second)
				c.Retry.Attempts, c.Timeouts.Cleanup = 1, config.Duration(time.Second)
			}})
			begin := time.Now()
			a := w.Post(world.CompletionsPath, world.Completions(tt.stream))
			took := time.Since(begin)
			if a.Status != 504 || took < tt.limit || took > tt.limit+cleanup.PrefillLinger+time.Second {
				t.Errorf("got status %d after %v, want 504 after %v: %s", a.Status, took, tt.limit, a.Body)
			}
		})
	}
}

// If the proxy's host cannot open a connection to an engine, the proxy is at fault, not
// the engine.
func TestDialWithoutDescriptors(t *testing.T) {
	full := &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", syscall.EMFILE)}
	for _, c := range []string{"", "vllm-nixl", "sglang", "vllm-moriio"} {
		world.Run(t, "connector "+c, func(t *testing.T) {
			engines := []*world.Engine{{Name: "e", Dialing: full}, {Name: "f", Dialing: full}}
			if c != "" {
				engines = []*world.Engine{{Name: "p", Role: "prefill", Connector: c, Dialing: full}, {Name: "d", Role: "decode", Connector: c, Dialing: full}}
			}
			w := world.New(t, world.Setup{Engines: engines})
			for range 10 {
				a := w.Post(world.CompletionsPath, world.Completions(true))
				if a.Status != 503 || !strings.Contains(a.Body, "proxy_overloaded") || a.Header.Get("Retry-After") == "" {
					t.Fatalf("%+v", a)
				}
			}
			if n := w.Metric("pdproxy_shed_total", "proxy_overloaded"); n != 10 {
				t.Errorf("got %v requests counted as shed, want 10", n)
			}
			if n := w.Metric("pdproxy_leg_errors_total") + w.Metric("pdproxy_retries_total"); n != 0 {
				t.Errorf("got %v failures of engines and retries", n)
			}
			for _, i := range w.Registry.Snapshot().Instances {
				if i.Breaker.Failures() != 0 || i.State() != engine.Ready {
					t.Errorf("%s: got %d failures, %v", i.Spec.Name, i.Breaker.Failures(), i.State())
				}
			}
		})
	}
}

// The proxy ends a stream whose event never ends, even if parts of the event arrive
// regularly.
func TestEventThatDrips(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			c.Chunks(world.EventA, "data: ")
			for {
				if _, err := io.WriteString(c, "1\r\na\r\n"); err != nil {
					c.HangUp()
					return
				}
				time.Sleep(29 * time.Second)
			}
		}}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) { c.Timeouts.StreamIdle = config.Duration(30 * time.Second) }})
		begin := time.Now()
		a := w.Post(world.CompletionsPath, world.Completions(true))
		if took := time.Since(begin); !strings.Contains(a.Body, "stream_broken") || took > 60*time.Second {
			t.Errorf("after %v: %+v", took, a)
		}
		w.Outcome(telemetry.OutcomeBroken)
	})
}
