package proxy

import (
	"fmt"
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
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// bodyOf is a request whose body has n bytes.
func bodyOf(n int) string {
	const around = `{"model":"m","prompt":"","max_tokens":5}`
	return `{"model":"m","prompt":"` + strings.Repeat("a", n-len(around)) + `","max_tokens":5}`
}

func within(limit config.ByteSize) func(*config.Config) {
	return func(c *config.Config) { c.Limits.BufferMemory = limit }
}

// An announced length takes no memory before the bytes arrive.
func TestAnnouncedBodiesTakeNoMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{engines: []*fakeEngine{{}}})
		var conns []net.Conn
		for range 50 {
			conn, err := w.public.Dial()
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, conn)
			fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n{", completionsPath, 16<<20)
		}
		synctest.Wait()
		if n := w.bodies.Reading(); n != len(conns) {
			t.Errorf("got %d bodies in progress, want %d", n, len(conns))
		}
		if n := w.memory.Used(); n > int64(len(conns))*buffer.FirstRead {
			t.Errorf("got %d bytes of memory for %d received bytes", n, len(conns))
		}
		if n := w.metric("pdproxy_buffer_bytes"); n != float64(w.memory.Used()) {
			t.Errorf("pdproxy_buffer_bytes: got %v, want %d", n, w.memory.Used())
		}
		for _, c := range conns {
			c.Close()
		}
	})
}

// If the memory for a request is in use, the proxy rejects the request with a status for
// retries. If the request exceeds the whole memory, the status differs. The proxy serves
// both requests when the memory suffices.
func TestBodyWithoutMemory(t *testing.T) {
	const limit = 8 << 20
	tests := []struct {
		name   string
		taken  int64 // by others
		size   int
		sized  bool
		status int
		code   string
	}{
		{"fits", 0, 1 << 20, true, 200, ""},
		{"fits, of unknown size", 0, 1 << 20, false, 200, ""},
		{"not now", limit - 1<<20, 1 << 20, true, 503, "memory_limit"},
		{"not now, of unknown size", limit - 1<<20, 1 << 20, false, 503, "memory_limit"},
		{"not a byte", limit, 100, true, 503, "memory_limit"},
		{"never", 0, limit + 1, true, 413, "body_too_large"},
		{"never, of unknown size", 0, limit + 1, false, 413, "body_too_large"},
		{"never, together with the memory of the leg", 0, limit - 1<<16, true, 413, "body_too_large"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, setup{engines: []*fakeEngine{{serve: func(c *engineConn, _ int) { c.json(200, unary) }}}, config: within(limit)})
				w.memory.Take(tt.taken)
				var body io.Reader = strings.NewReader(bodyOf(tt.size))
				if !tt.sized {
					body = io.MultiReader(body)
				}
				resp, err := w.client.Post("http://proxy"+completionsPath, "application/json", body)
				if err != nil {
					t.Fatal(err)
				}
				text, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				if resp.StatusCode != tt.status || !strings.Contains(string(text), tt.code) {
					t.Errorf("got status %d, want %d: %.300s", resp.StatusCode, tt.status, text)
				}
				shed := 0.0
				if tt.status == 503 {
					shed = 1
					if resp.Header.Get("Retry-After") == "" {
						t.Error("no Retry-After")
					}
				}
				if n := w.metric("pdproxy_shed_total", tt.code); n != shed {
					t.Errorf("got %v counted refusals, want %v", n, shed)
				}
				w.memory.Release(tt.taken)
				synctest.Wait()
			})
		})
	}
}

// If the memory for an answer is missing, the exchange ends, and no engine is charged
// with a failure.
func TestAnswerWithoutMemory(t *testing.T) {
	const size = 1 << 20
	long := `{"choices":[{"text":"` + strings.Repeat("a", size) + `"}],"kv_transfer_params":{"do_remote_prefill":true}}`
	tests := map[string]struct {
		connector string
		serve     func(c *engineConn, nth int)
		stream    bool
	}{
		"whole":        {"", func(c *engineConn, _ int) { c.json(200, long) }, false},
		"refusal":      {"", func(c *engineConn, _ int) { c.json(400, long) }, false},
		"first event":  {"", func(c *engineConn, _ int) { c.stream(strings.Repeat(": "+strings.Repeat("c", 4000)+"\n\n", 10)) }, true},
		"prefill":      {"vllm-nixl", func(c *engineConn, _ int) { c.json(200, long) }, false},
		"beside":       {"sglang", func(c *engineConn, _ int) { c.json(200, long) }, false},
		"inside event": {"", func(c *engineConn, _ int) { c.stream(eventA, "data: "+long[:size/2], long[size/2:]) }, true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				engines := []*fakeEngine{{name: "e", serve: tt.serve}, {name: "f", serve: tt.serve}}
				if tt.connector != "" {
					engines = []*fakeEngine{{name: "p", role: "prefill", connector: tt.connector, serve: tt.serve}, {name: "d", role: "decode", connector: tt.connector, serve: tt.serve}}
				}
				w := newWorld(t, setup{engines: engines, config: func(c *config.Config) {
					c.Limits.BufferMemory = 1 << 20
					c.Circuit.Failures = 1
				}})
				taken := w.memory.Limit() - 32<<10 // room for the request and the first part of an answer
				w.memory.Take(taken)
				a := w.post(completionsPath, completions(tt.stream))
				began := name == "inside event" // the client has received the first event
				switch {
				case began:
					if !strings.Contains(a.body, "stream_broken") {
						t.Errorf("%+v", a)
					}
				case a.status != 503 || !strings.Contains(a.body, "memory_limit") || a.header.Get("Retry-After") == "":
					t.Errorf("got status %d: %.300s", a.status, a.body)
				}
				if n := w.metric("pdproxy_shed_total", "memory_limit"); n != 1 {
					t.Errorf("got %v counted refusals", n)
				}
				if n := w.metric("pdproxy_retries_total"); n != 0 {
					t.Errorf("got %v retries", n)
				}
				for _, i := range w.registry.Snapshot().Instances {
					if i.Breaker.Failures() != 0 {
						t.Errorf("got %d failures of %s, want 0", i.Breaker.Failures(), i.Spec.Name)
					}
				}
				if !began {
					w.outcome(telemetry.OutcomeShed)
				}
				w.memory.Release(taken)
				synctest.Wait()
			})
		})
	}
}

// TestLastEventWithoutMemory: the memory for the last event of a stream is missing. The read
// that completes this event also has the closing event. The client gets an error event, because it
// has not received the last event.
func TestLastEventWithoutMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w *world
		taken := int64(0)
		event := `data: {"choices":[{"text":"` + strings.Repeat("b", 4900) + "\"}]}\n\n"
		e := &fakeEngine{serve: func(c *engineConn, _ int) {
			c.send(streamHead)
			c.chunks(eventA, event[:3900])
			time.Sleep(time.Millisecond) // the proxy holds the first part
			taken = w.memory.Limit() - w.memory.Used()
			w.memory.Take(taken)
			c.chunks(event[3900:] + done)
			c.send("0\r\n\r\n")
		}}
		w = newWorld(t, setup{engines: []*fakeEngine{e}, config: func(c *config.Config) { c.Limits.BufferMemory = 1 << 20 }})
		if a := w.post(completionsPath, completions(true)); a.body != eventA+broken {
			t.Errorf("got %.300q, error %v", a.body, a.err)
		}
		w.outcome(telemetry.OutcomeBroken)
		w.memory.Release(taken)
		synctest.Wait()
	})
}

// The proxy rejects an answer above the limit before it takes more memory than the limit.
func TestAnswerTakesNoMoreThanItMay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		piece := strings.Repeat("a", 1<<20)
		var w *world
		var most atomic.Int64
		e := &fakeEngine{serve: func(c *engineConn, _ int) {
			c.send("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
			for range 70 {
				c.send(piece)
				most.Store(max(most.Load(), w.memory.Used()))
			}
			c.hangUp()
		}}
		w = newWorld(t, setup{engines: []*fakeEngine{e}, config: func(c *config.Config) {
			c.Limits.BufferMemory, c.Retry.Attempts = 1<<30, 1
		}})
		if a := w.post(completionsPath, completions(false)); a.status != 502 {
			t.Errorf("got status %d: %.300s", a.status, a.body)
		}
		if most := most.Load(); most > buffer.MaxAnswer+buffer.MaxAnswer/2+1<<20 { // including the copy when a buffer of half the size grows
			t.Errorf("limit of the answer %d bytes: the proxy took %d bytes", buffer.MaxAnswer, most)
		}
	})
}

// The total time of a whole answer is limited, even if parts of it arrive regularly.
func TestWholeAnswerThatDrips(t *testing.T) {
	drip := func(head string) func(c *engineConn, nth int) {
		return func(c *engineConn, _ int) {
			io.WriteString(c, head)
			for {
				if _, err := io.WriteString(c, " "); err != nil {
					c.hangUp()
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
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var engines []*fakeEngine
				if tt.connector == "" {
					engines = []*fakeEngine{{serve: drip(tt.head)}}
				} else {
					engines = []*fakeEngine{{name: "p", role: "prefill", connector: tt.connector, serve: drip(tt.head)},
						{name: "d", role: "decode", connector: tt.connector, serve: func(c *engineConn, _ int) { c.hold() }}}
				}
				w := newWorld(t, setup{engines: engines, config: func(c *config.Config) {
					c.Timeouts.FirstByte, c.Timeouts.Prefill = config.Duration(10*time.Second), config.Duration(7*time.Second)
					c.Retry.Attempts, c.Timeouts.Cleanup = 1, config.Duration(time.Second)
				}})
				begin := time.Now()
				a := w.post(completionsPath, completions(tt.stream))
				took := time.Since(begin)
				if a.status != 504 || took < tt.limit || took > tt.limit+cleanup.PrefillLinger+time.Second {
					t.Errorf("got status %d after %v, want 504 after %v: %s", a.status, took, tt.limit, a.body)
				}
			})
		})
	}
}

// If the proxy's host cannot open a connection to an engine, the proxy is at fault, not
// the engine.
func TestDialWithoutDescriptors(t *testing.T) {
	full := &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", syscall.EMFILE)}
	for _, c := range []string{"", "vllm-nixl", "sglang", "vllm-moriio"} {
		t.Run("connector "+c, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				engines := []*fakeEngine{{name: "e", dialing: full}, {name: "f", dialing: full}}
				if c != "" {
					engines = []*fakeEngine{{name: "p", role: "prefill", connector: c, dialing: full}, {name: "d", role: "decode", connector: c, dialing: full}}
				}
				w := newWorld(t, setup{engines: engines})
				for range 10 {
					a := w.post(completionsPath, completions(true))
					if a.status != 503 || !strings.Contains(a.body, "proxy_overloaded") || a.header.Get("Retry-After") == "" {
						t.Fatalf("%+v", a)
					}
				}
				if n := w.metric("pdproxy_shed_total", "proxy_overloaded"); n != 10 {
					t.Errorf("got %v requests counted as shed, want 10", n)
				}
				if n := w.metric("pdproxy_leg_errors_total") + w.metric("pdproxy_retries_total"); n != 0 {
					t.Errorf("got %v failures of engines and retries", n)
				}
				for _, i := range w.registry.Snapshot().Instances {
					if i.Breaker.Failures() != 0 || i.State() != engine.Ready {
						t.Errorf("%s: got %d failures, %v", i.Spec.Name, i.Breaker.Failures(), i.State())
					}
				}
			})
		})
	}
}

// The proxy ends a stream whose event never ends, even if parts of the event arrive
// regularly.
func TestEventThatDrips(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) {
			c.send(streamHead)
			c.chunks(eventA, "data: ")
			for {
				if _, err := io.WriteString(c, "1\r\na\r\n"); err != nil {
					c.hangUp()
					return
				}
				time.Sleep(29 * time.Second)
			}
		}}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, config: func(c *config.Config) { c.Timeouts.StreamIdle = config.Duration(30 * time.Second) }})
		begin := time.Now()
		a := w.post(completionsPath, completions(true))
		if took := time.Since(begin); !strings.Contains(a.body, "stream_broken") || took > 60*time.Second {
			t.Errorf("after %v: %+v", took, a)
		}
		w.outcome(telemetry.OutcomeBroken)
	})
}
