package conformance

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/dev/usage"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// isCleanup reports whether a leg is a clean-up of the vllm-nixl connector.
func isCleanup(l testbed.Leg) bool {
	return strings.HasSuffix(l.Header.Get("X-Request-Id"), "-cleanup")
}

// drain stops the proxy before the test's end, and returns the drain's error.
func (f *fleet) drain() error {
	f.drained = true
	return f.end()
}

// startScripted starts a proxy before scripted engines.
func startScripted(t *testing.T, connector string, change func(*config.Config), engines ...*testbed.Engine) *fleet {
	t.Helper()
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Server.DrainTimeout = config.Duration(5 * time.Second)
	cfg.Health.Interval, cfg.Health.Timeout = config.Duration(100*time.Millisecond), config.Duration(2*time.Second)
	cfg.Server.ExposePlacement = true
	for _, e := range engines {
		e.Start()
		t.Cleanup(e.Close)
		spec := config.DefaultEngine()
		spec.Name, spec.URL, spec.Role, spec.Connector, spec.HealthPath = e.Name, e.URL(), e.Role, connector, "/health"
		spec.InsecureSkipVerify = e.TLS
		if e.Spec != nil {
			e.Spec(&spec)
		}
		cfg.Engines = append(cfg.Engines, spec)
	}
	if change != nil {
		change(&cfg)
	}
	f := &fleet{t: t, connector: connector, base: measure()}
	f.alone = startEngine(t, enginesim.Config{Connector: enginesim.ConnectorVLLMNixl, Role: enginesim.RoleBoth})
	f.startNode(&cfg, nil)
	f.waitReady()
	return f
}

const completionPath = "/v1/completions"

// plainCompletion returns a simple completion request.
func plainCompletion(stream bool) string {
	return fmt.Sprintf(`{"model":"sim","prompt":"hi","max_tokens":5,"stream":%t}`, stream)
}

// pinnedAnswer is a vllm-nixl prefill answer that pins a block.
const pinnedAnswer = `{"id":"x","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":"length"}],` +
	`"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],` +
	`"remote_engine_id":"p","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}}`

// event returns one event of a completion's stream.
func event(text string) string {
	return fmt.Sprintf("data: {\"choices\":[{\"index\":0,\"text\":%q,\"finish_reason\":null}]}\n\n", text)
}

// says returns a handler that answers every leg with a status and a body.
func says(status int, body string, header ...string) func(http.ResponseWriter, testbed.Leg) {
	return func(w http.ResponseWriter, _ testbed.Leg) {
		w.Header().Set("Content-Type", "application/json")
		for i := 0; i < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(status)
		io.WriteString(w, body)
	}
}

// streams returns a handler that answers every leg with the pieces of an event
// stream, each flushed.
func streams(pieces ...string) func(http.ResponseWriter, testbed.Leg) {
	return func(w http.ResponseWriter, _ testbed.Leg) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, p := range pieces {
			io.WriteString(w, p)
			w.(http.Flusher).Flush()
		}
	}
}

// hangs does not answer a leg until the proxy cancels it.
func hangs(_ http.ResponseWriter, leg testbed.Leg) { <-leg.Context().Done() }

// writeFile writes a file for the test and returns its path.
func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// both returns an engine that serves whole requests.
func both(name string, serve func(http.ResponseWriter, testbed.Leg)) *testbed.Engine {
	return &testbed.Engine{Name: name, Role: "both", Serve: serve}
}

// No engine receives the proxy's own API keys, in any header.
func TestProxyKeysReachNoEngine(t *testing.T) {
	e := both("e", says(200, `{"choices":[{"text":"x"}]}`))
	// The SHA-256 of "secret".
	keys := writeFile(t, "keys", "alice 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b\n")
	f := startScripted(t, "none", func(c *config.Config) { c.Server.Auth.KeysFile = keys }, e)
	for name, value := range map[string]string{"X-Api-Key": "secret", "Authorization": "Bearer secret"} {
		if a := f.post(context.Background(), f.url, completionPath, plainCompletion(false), name, value); a.status != 200 {
			t.Fatalf("%s: status %d: %s", name, a.status, a.body)
		}
	}
	for _, leg := range e.Seen(nil) {
		for name, values := range leg.Header {
			if strings.Contains(strings.Join(values, " "), "secret") {
				t.Errorf("the engine received the key in %s", name)
			}
		}
	}
}

// A clean-up that goes to another engine of the group carries that engine's key.
func TestCleanupCarriesTheKeyOfWhoIsCalled(t *testing.T) {
	var served atomic.Bool // from now on the engine only answers clean-ups
	decode := func(name string) *testbed.Engine {
		path := writeFile(t, name, "key-of-"+name)
		return &testbed.Engine{Name: name, Role: "decode", Spec: func(c *config.Engine) { c.APIKeyFile = path }, Serve: func(w http.ResponseWriter, leg testbed.Leg) {
			if served.Load() {
				says(200, `{}`)(w, leg)
				return
			}
			says(500, `{}`)(w, leg)
		}}
	}
	d0, d1 := decode("d0"), decode("d1")
	p := &testbed.Engine{Name: "p0", Role: "prefill", Serve: says(200, pinnedAnswer)}
	f := startScripted(t, "vllm-nixl", func(c *config.Config) {
		c.Retry.Attempts = 1
		c.Timeouts.Cleanup = config.Duration(200 * time.Millisecond)
	}, p, d0, d1)
	f.try(completionPath, plainCompletion(false))
	for _, d := range []*testbed.Engine{d0, d1} {
		f.eventually(d.Name+" gets a clean-up", func() bool { return len(d.Seen(isCleanup)) > 0 })
		for _, leg := range d.Seen(nil) {
			if got := leg.Header.Get("Authorization"); got != "Bearer key-of-"+d.Name {
				t.Errorf("key of the clean-up at %s: got %q", d.Name, got)
			}
		}
	}
	served.Store(true)
}

// An engine rejects the key that the proxy has for it. That is a problem of the
// operator, not of the client: another engine answers.
func TestRefusedKeyIsNotTheClientsFault(t *testing.T) {
	path := writeFile(t, "key", "stale")
	refuse := both("e0", says(401, `{"error":"Unauthorized"}`))
	refuse.Spec = func(c *config.Engine) { c.APIKeyFile = path }
	good := both("e1", says(200, `{"choices":[{"text":"x"}]}`))
	f := startScripted(t, "none", nil, refuse, good)
	f.eventually("the rejecting engine has got a leg", func() bool { // the first engine is chosen at random
		if a := f.try(completionPath, plainCompletion(false)); a.status != 200 {
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
		return len(refuse.Seen(nil)) > 0
	})
}

// The client gets an engine's 401 to the client's own key.
func TestRefusedClientKeyIsRelayed(t *testing.T) {
	e := both("e", says(401, `{"error":"Unauthorized"}`))
	f := startScripted(t, "none", nil, e)
	a := f.post(context.Background(), f.url, completionPath, plainCompletion(false), "Authorization", "Bearer wrong")
	if a.status != 401 || a.body != `{"error":"Unauthorized"}` || len(e.Seen(nil)) != 1 {
		t.Fatalf("got status %d after %d legs: %s", a.status, len(e.Seen(nil)), a.body)
	}
}

// An engine's rejection is relayed unchanged: without a body, with a large one,
// with its Retry-After.
func TestRefusalsAreRelayed(t *testing.T) {
	large := `{"detail":"` + strings.Repeat("x", 200<<10) + `"}`
	for _, tt := range []struct {
		name   string
		serve  func(http.ResponseWriter, testbed.Leg)
		status int
		body   string
		after  string
		legs   int
	}{
		{"no body", says(404, ""), 404, "", "", 1},
		{"large body", says(400, large), 400, large, "", 1},
		{"retry after", says(429, `{"busy":true}`, "Retry-After", "7"), 429, `{"busy":true}`, "7", 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := both("e", tt.serve)
			f := startScripted(t, "none", nil, e)
			a := f.try(completionPath, plainCompletion(false))
			if a.status != tt.status || a.body != tt.body || a.header.Get("Retry-After") != tt.after {
				t.Errorf("got status %d, Retry-After %q, %d bytes of body", a.status, a.header.Get("Retry-After"), len(a.body))
			}
			if n := len(e.Seen(nil)); n != tt.legs {
				t.Errorf("got %d legs, want %d", n, tt.legs)
			}
		})
	}
}

// An answer without content is a failed leg, whatever its status.
func TestEmptyAnswersAreTriedAgain(t *testing.T) {
	for name, serve := range map[string]func(http.ResponseWriter, testbed.Leg){
		"200 without a body": says(200, ""),
		"204":                says(204, ""),
		"302":                says(302, "", "Location", "/elsewhere"),
		"aborted":            says(200, `{"choices":[{"text":"","finish_reason":"abort"}]}`),
		"only comments":      streams(": hello\n\n"),
	} {
		for _, stream := range []bool{false, true} {
			if name == "only comments" && !stream {
				continue
			}
			t.Run(fmt.Sprintf("%s, stream %t", name, stream), func(t *testing.T) {
				bad := both("e0", serve)
				good := both("e1", streams(event("x"), "data: [DONE]\n\n"))
				if !stream {
					good.Serve = says(200, `{"choices":[{"text":"x"}]}`)
				}
				f := startScripted(t, "none", nil, bad, good)
				for n := 0; n < 3 || n < 60 && len(bad.Seen(nil)) == 0; n++ { // an idle engine is chosen at random
					if a := f.try(completionPath, plainCompletion(stream)); a.status != 200 || a.text != "x" {
						t.Fatalf("got status %d: %q", a.status, a.body)
					}
				}
				if len(bad.Seen(nil)) == 0 || f.metric("pdproxy_retries_total") == 0 {
					t.Error("the bad engine got no request")
				}
			})
		}
	}
}

// timeouts.first_byte applies to the first event. Comments that keep the
// connection alive do not count.
func TestCommentsAreNoFirstByte(t *testing.T) {
	e := both("e", func(w http.ResponseWriter, leg testbed.Leg) {
		w.Header().Set("Content-Type", "text/event-stream")
		for leg.Context().Err() == nil {
			io.WriteString(w, ": keep-alive\n\n")
			w.(http.Flusher).Flush()
			select {
			case <-leg.Context().Done():
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	f := startScripted(t, "none", func(c *config.Config) {
		c.Retry.Attempts = 1
		c.Timeouts.FirstByte = config.Duration(300 * time.Millisecond)
	}, e)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if a := f.post(ctx, f.url, completionPath, plainCompletion(true)); a.status != 504 {
		t.Fatalf("got status %d, err %v: %s", a.status, a.err, a.body)
	}
}

// A stream that closes normally in the middle of an event is broken. The client
// gets a readable error event, which is not joined to the incomplete event.
func TestStreamEndsInsideAnEvent(t *testing.T) {
	e := both("e", streams(event("whole"), `data: {"choices":[{"te`))
	f := startScripted(t, "none", nil, e)
	a := f.try(completionPath, plainCompletion(true))
	if a.errors != 1 || a.done || a.text != "whole" || strings.Contains(a.body, `[{"te`) {
		t.Fatalf("%d error events, done %v: %q", a.errors, a.done, a.body)
	}
}

// The last event may lack its blank line: the answer is complete.
func TestStreamEndsWithoutABlankLine(t *testing.T) {
	e := both("e", streams(event("whole"), "data: [DONE]"))
	f := startScripted(t, "none", nil, e)
	a := f.try(completionPath, plainCompletion(true))
	if a.err != nil || a.errors != 0 || !strings.HasSuffix(strings.TrimSpace(a.body), "data: [DONE]") {
		t.Fatalf("%d error events, err %v: %q", a.errors, a.err, a.body)
	}
}

// speak opens a connection to the proxy and writes one raw request.
func (f *fleet) speak(body string) *net.TCPConn {
	f.t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
	if err != nil {
		f.t.Fatal(err)
	}
	fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: proxy\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", completionPath, len(body), body)
	return c.(*net.TCPConn)
}

// A client that closes its sending side during a stream counts as gone. The
// rest that it reads must not look like a complete answer.
func TestHalfClosedClientGetsNoWholeStream(t *testing.T) {
	e := both("e", func(w http.ResponseWriter, leg testbed.Leg) {
		streams(event("one"))(w, leg)
		<-leg.Context().Done()
	})
	f := startScripted(t, "none", nil, e)
	c := f.speak(plainCompletion(true))
	defer c.Close()
	r := bufio.NewReader(c)
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := resp.Body.Read(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	c.CloseWrite()
	if rest, err := io.ReadAll(resp.Body); err == nil {
		t.Fatalf("the stream ended like a complete one: %q", rest)
	}
	f.eventually("the outcome is counted", func() bool { return f.metric("pdproxy_exchanges_total", `outcome="cancelled"`) == 1 })
}

// A client that no longer reads counts as gone, even if its connection remains
// open.
func TestClientThatDoesNotReadIsCancelled(t *testing.T) {
	text := event(strings.Repeat("x", 32<<10))
	e := both("e", func(w http.ResponseWriter, leg testbed.Leg) {
		w.Header().Set("Content-Type", "text/event-stream")
		for leg.Context().Err() == nil {
			if _, err := io.WriteString(w, text); err != nil {
				return
			}
		}
	})
	f := startScripted(t, "none", func(c *config.Config) { c.Server.WriteTimeout = config.Duration(200 * time.Millisecond) }, e)
	c := f.speak(plainCompletion(true))
	defer c.Close()
	f.eventually("the outcome is counted", func() bool { return f.metric("pdproxy_exchanges_total") == 1 })
	if f.metric("pdproxy_exchanges_total", `outcome="cancelled"`) != 1 {
		t.Error("the outcome is not cancelled")
	}
}

// A leg whose retry the budget rejects is counted once.
func TestRefusedRetryIsCountedOnce(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{config: func(c *config.Config) {
		c.Retry.Budget, c.Retry.MinBudget = 0, 0
		c.Health.UnhealthyAfter = 1 << 20
		c.Circuit.Failures = 1 << 20
	}})
	f.decode[0].SetFault("1:500", 0, "") // an engine that refuses connections would get no leg
	failed := 0
	for range 200 { // each request goes to one of two decode engines
		if a := f.try(chatPath, chat("budget", 5, false)); a.status >= 500 {
			failed++
		}
		if failed == 3 {
			break
		}
	}
	if n := f.metric("pdproxy_fallbacks_total", `what="retry"`, `reason="budget"`); failed != 3 || n != 3 {
		t.Errorf("%v refusals are counted for %d failed requests", n, failed)
	}
}

// A retry waits for the abort of the old attempt on the engines that can be
// reached. It does not wait for other engines.
func TestRetryDoesNotWaitForADeadEngine(t *testing.T) {
	for _, role := range []string{enginesim.RolePrefill, enginesim.RoleDecode} {
		t.Run(role, func(t *testing.T) {
			f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{
				engine: slow(enginesim.RoleDecode, 20000),
				config: func(c *config.Config) { c.Health.UnhealthyAfter = 1 << 20 },
			})
			body := chat(long, 40, false)
			got := make(chan answer, 1)
			ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second) // half the time limit of a clean-up
			defer cancel()
			engines := f.decode
			if role == enginesim.RolePrefill {
				engines = f.prefill
				for _, p := range f.prefill {
					p.SetFault("", 0, "prefill")
				}
			}
			go func() { got <- f.post(ctx, f.url, chatPath, body) }()
			var busy *enginesim.Engine
			f.eventually("an engine works", func() bool {
				for _, e := range engines {
					if e.State().RequestsRunning > 0 {
						busy = e
					}
				}
				return busy != nil
			})
			for _, p := range f.prefill {
				p.SetFault("", 0, "")
			}
			busy.Kill()
			f.right(<-got, chatPath, body)
		})
	}
}

// An engine that fails its probes may be alive and hold blocks of an ended
// exchange. They are freed anyway.
func TestCleanupOfAnUnhealthyEngine(t *testing.T) {
	p := &testbed.Engine{Name: "p0", Role: "prefill", Serve: says(200, pinnedAnswer)}
	d := &testbed.Engine{Name: "d0", Role: "decode"}
	d.Serve = func(w http.ResponseWriter, leg testbed.Leg) {
		if isCleanup(leg) {
			streams(event("x"))(w, leg)
			return
		}
		hangs(w, leg)
	}
	f := startScripted(t, "vllm-nixl", func(c *config.Config) { c.Health.UnhealthyAfter = 1 }, p, d)
	ctx, leave := context.WithCancel(context.Background())
	gone := make(chan answer, 1)
	go func() { gone <- f.post(ctx, f.url, completionPath, plainCompletion(true)) }()
	f.eventually("decode has received the leg", func() bool { return len(d.Seen(nil)) == 1 })
	p.Sick.Store(true)
	f.eventually("prefill is unhealthy", func() bool { return f.engineState("p0") == "unhealthy" })
	leave()
	<-gone
	f.eventually("the clean-up is sent", func() bool { return len(d.Seen(isCleanup)) == 1 })
}

// A running prefill step cannot be stopped. vLLM pins the blocks anyway, and
// drops the answer that names them if the connection has closed, even on one
// side only. So the proxy keeps reading for a while.
func TestClientLeavesAShortPrefill(t *testing.T) {
	for _, begun := range []bool{false, true} {
		t.Run(fmt.Sprintf("answer begun %t", begun), func(t *testing.T) {
			left := make(chan struct{})
			hungUp := make(chan bool, 1)
			p := &testbed.Engine{Name: "p0", Role: "prefill", Serve: func(w http.ResponseWriter, leg testbed.Leg) {
				if begun {
					io.WriteString(w, pinnedAnswer[:20])
					w.(http.Flusher).Flush()
				}
				<-left
				select {
				case <-leg.Context().Done():
				case <-time.After(400 * time.Millisecond): // the proxy would close the connection here
				}
				hungUp <- leg.Context().Err() != nil
				if begun {
					io.WriteString(w, pinnedAnswer[20:])
				} else {
					io.WriteString(w, pinnedAnswer)
				}
			}}
			d := &testbed.Engine{Name: "d0", Role: "decode", Serve: streams(event("x"), "data: [DONE]\n\n")}
			f := startScripted(t, "vllm-nixl", nil, p, d)
			ctx, leave := context.WithCancel(context.Background())
			gone := make(chan answer, 1)
			go func() { gone <- f.post(ctx, f.url, completionPath, plainCompletion(true)) }()
			f.eventually("prefill has received the leg", func() bool { return len(p.Seen(nil)) == 1 })
			time.Sleep(100 * time.Millisecond) // so that the proxy knows that it has sent the leg
			leave()
			<-gone
			time.Sleep(100 * time.Millisecond) // so that the proxy knows that the client has left: no metric shows this
			close(left)
			if <-hungUp {
				t.Error("the proxy closed the connection before the answer")
			}
			f.eventually("the clean-up is sent", func() bool { return len(d.Seen(isCleanup)) == 1 })
			if n := len(d.Seen(nil)); n != 1 {
				t.Errorf("decode got %d legs", n)
			}
		})
	}
}

// A drain that cuts exchanges reports it to the clients, in every phase. The
// proxy frees the engines' memory of these exchanges before it ends.
func TestDrainTellsClientsInEveryPhase(t *testing.T) {
	for _, phase := range []string{"queue", "prefill", "decode"} {
		t.Run(phase, func(t *testing.T) {
			p := &testbed.Engine{Name: "p0", Role: "prefill", Serve: says(200, pinnedAnswer)}
			d := &testbed.Engine{Name: "d0", Role: "decode", Serve: func(w http.ResponseWriter, leg testbed.Leg) {
				if isCleanup(leg) {
					streams(event("x"))(w, leg)
					return
				}
				hangs(w, leg)
			}}
			busy, running := d, 1
			if phase == "prefill" {
				p.Serve, busy = hangs, p
			}
			f := startScripted(t, "vllm-nixl", func(c *config.Config) {
				c.Server.DrainTimeout = 0
				c.Limits.MaxReading = 100 // the bodies may arrive at the same time
				c.Limits.MaxExchanges = 1
			}, p, d)
			f.oneEntry() // so that the second request waits
			got := make(chan answer, 2)
			post := func() { got <- f.try(completionPath, plainCompletion(true)) }
			go post()
			f.eventually("the engine has received the leg", func() bool { return len(busy.Seen(nil)) > 0 })
			if phase == "queue" {
				go post()
				running = 2
				f.eventually("the second waits", func() bool {
					var rows []struct{ Flow string }
					f.admin("/v1/exchanges", &rows)
					return len(rows) == 2
				})
			}
			if err := f.drain(); err == nil {
				t.Error("drain reports no error")
			}
			for range running {
				if a := <-got; a.status != 503 || !strings.Contains(a.body, "draining") {
					t.Errorf("got status %d, err %v: %s", a.status, a.err, a.body)
				}
			}
			if phase == "decode" && len(d.Seen(isCleanup)) == 0 {
				t.Error("the proxy ended before its clean-up")
			}
		})
	}
}

// The limit on a client's open requests includes the waiting ones.
func TestClientCapCountsTheQueue(t *testing.T) {
	e := both("e", hangs)
	f := startScripted(t, "none", func(c *config.Config) {
		c.Limits.MaxReading = 100 // the bodies may arrive at the same time
		c.Limits.MaxExchanges, c.Limits.PerClient, c.Limits.QueueTimeout = 1, 2, config.Duration(500*time.Millisecond)
	}, e)
	f.oneEntry() // each worker has a separate cap
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	got := make(chan answer, 5)
	for range 5 {
		go func() { got <- f.post(ctx, f.url, completionPath, plainCompletion(true)) }()
	}
	counts := map[int]int{}
	for range 4 {
		counts[(<-got).status]++
	}
	if counts[429] != 3 || counts[503] != 1 {
		t.Errorf("got %v, want three rejected at once and one rejected after its wait", counts)
	}
	leave()
	<-got
}

// The time in the queue does not count for the client: its body has the whole
// server.read_timeout.
func TestReadTimeoutBeginsBehindTheQueue(t *testing.T) {
	release := make(chan struct{})
	e := both("e", func(w http.ResponseWriter, leg testbed.Leg) {
		<-release
		says(200, `{"choices":[{"text":"x"}]}`)(w, leg)
	})
	f := startScripted(t, "none", func(c *config.Config) {
		c.Limits.MaxReading = 100 // the bodies may arrive at the same time
		c.Limits.MaxExchanges = 1
		c.Server.ReadTimeout = config.Duration(2 * time.Second)
	}, e)
	f.oneEntry() // so that one request waits
	got := make(chan answer, 2)
	body := strings.Replace(plainCompletion(false), `"hi"`, `"`+strings.Repeat("hi ", 100<<10)+`"`, 1) // more than the proxy reads ahead
	for range 2 {
		go func() { got <- f.try(completionPath, body) }()
	}
	f.eventually("one runs and one waits", func() bool {
		var rows []struct {
			AgeMS float64 `json:"age_ms"`
		}
		f.admin("/v1/exchanges", &rows)
		return len(rows) == 2 && rows[1].AgeMS > 2100
	})
	close(release)
	for range 2 {
		if a := <-got; a.status != 200 {
			t.Errorf("got status %d: %s", a.status, a.body)
		}
	}
}

// An engine that breaks its protocol with a 200 is ejected like a failing one.
func TestBadPrefillAnswersOpenTheCircuit(t *testing.T) {
	bad := &testbed.Engine{Name: "p0", Role: "prefill", Serve: says(200, `{"error":{"message":"no"}}`)}
	f := startScripted(t, "trtllm", func(c *config.Config) {
		c.Circuit.Failures, c.Circuit.OpenFor = 2, config.Duration(time.Hour)
		c.Retry.Attempts, c.Retry.Budget = 2, 1
		c.Policy.Place = "round_robin"
	}, bad,
		&testbed.Engine{Name: "p1", Role: "prefill", Serve: says(200, `{"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}`)},
		&testbed.Engine{Name: "d0", Role: "decode", Serve: says(200, `{}`)})
	for range 8 {
		if a := f.try(completionPath, plainCompletion(false)); a.status != 200 {
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
	}
	if n := len(bad.Seen(nil)); n != 2 {
		t.Errorf("got %d legs at the engine, want 2", n)
	}
}

// A client's own object that looks like an engine's abort does not count as one.
func TestMetadataIsNoAbort(t *testing.T) {
	created := "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"metadata\":{\"finish_reason\":\"abort\"}}}\n\n"
	done := "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"metadata\":{\"finish_reason\":\"abort\"}}}\n\n"
	e := both("e", streams(created, done))
	f := startScripted(t, "none", nil, e)
	a := f.try("/v1/responses", `{"model":"sim","input":"hi","stream":true,"metadata":{"finish_reason":"abort"}}`)
	if a.status != 200 || a.body != created+done || len(e.Seen(nil)) != 1 {
		t.Fatalf("got status %d after %d legs: %s", a.status, len(e.Seen(nil)), a.body)
	}
	f.eventually("the outcome is counted", func() bool { return f.metric("pdproxy_exchanges_total", `outcome="ok"`) == 1 })
}

// A model may have engines with two connectors. A route that only one connector
// supports finds its engines.
func TestRouteOfOneConnectorOfTwo(t *testing.T) {
	e0 := both("e0", says(200, "{}"))
	e0.Spec = func(c *config.Engine) { c.Connector = "sglang" }
	e1 := both("e1", says(200, `{"output":[]}`))
	f := startScripted(t, "vllm-nixl", func(c *config.Config) { c.Policy.Place = "round_robin" }, e0, e1)
	for range 4 {
		if a := f.try("/inference/v1/generate", `{"model":"sim","token_ids":[1],"sampling_params":{}}`); a.status != 200 {
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
	}
	if n := len(e0.Seen(nil)); n != 0 {
		t.Errorf("%d legs reached the engine that does not know the route", n)
	}
}

// A request that cannot be split goes whole to an engine that can serve it, and
// never to the decode engine of another connector, which cannot.
func TestUnsplitRequestMeetsItsOwnConnector(t *testing.T) {
	engines := []*testbed.Engine{
		{Name: "p0", Role: "prefill", Serve: says(200, pinnedAnswer)},
		{Name: "s0", Role: "decode", Serve: says(500, `{}`)},
		{Name: "d0", Role: "decode", Serve: says(200, `{"choices":[{"text":"x"}]}`)},
		{Name: "s1", Role: "prefill", Serve: says(500, `{}`)},
	}
	for _, s := range []*testbed.Engine{engines[1], engines[3]} {
		s.Spec = func(c *config.Engine) { c.Connector = "sglang" }
	}
	f := startScripted(t, "vllm-nixl", func(c *config.Config) { c.Policy.Place = "round_robin" }, engines...)
	for range 6 {
		if a := f.try(completionPath, `{"model":"sim","prompt":"hi","n":2}`); a.status != 200 {
			t.Errorf("got status %d: %s", a.status, a.body)
		}
	}
	if n := len(engines[1].Seen(nil)) + len(engines[3].Seen(nil)); n != 0 {
		t.Errorf("%d legs reached the other connector", n)
	}
}

// An engine whose streams end in error events is ejected like an engine that
// fails before its first event.
func TestErrorEventsOpenTheCircuit(t *testing.T) {
	bad := both("e0", streams(event("x"), "data: {\"error\":{\"message\":\"no\",\"code\":500}}\n\n", "data: [DONE]\n\n"))
	good := both("e1", streams(event("x"), "data: [DONE]\n\n"))
	f := startScripted(t, "none", func(c *config.Config) {
		c.Circuit.Failures, c.Circuit.OpenFor = 2, config.Duration(time.Hour)
		c.Policy.Place = "round_robin"
	}, bad, good)
	broken := 0
	for range 8 {
		broken += f.try(completionPath, plainCompletion(true)).errors
	}
	if len(bad.Seen(nil)) != 2 || broken != 2 {
		t.Errorf("got %d legs at the engine and %d broken streams, want 2", len(bad.Seen(nil)), broken)
	}
	if f.metric("pdproxy_leg_errors_total", `engine="e0"`) != 2 || f.metric("pdproxy_broken_streams_total") != 2 {
		t.Error("the failures are not counted")
	}
}

// An open stream holds no memory of its request.
func TestOpenStreamsHoldNoRequest(t *testing.T) {
	release := make(chan struct{})
	p := &testbed.Engine{Name: "p0", Role: "prefill", Serve: says(200, pinnedAnswer)}
	d := &testbed.Engine{Name: "d0", Role: "decode"}
	d.Serve = func(w http.ResponseWriter, _ testbed.Leg) {
		streams(event("x"))(w, testbed.Leg{})
		<-release
		streams("data: [DONE]\n\n")(w, testbed.Leg{})
	}
	f := startScripted(t, "vllm-nixl", nil, p, d)
	const count, size = 24, 1 << 20
	body := strings.Replace(plainCompletion(true), `"hi"`, `"`+strings.Repeat("x", size)+`"`, 1)
	before := usage.Heap()
	var open []*http.Response
	for range count {
		req, err := http.NewRequest(http.MethodPost, f.url+completionPath, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := f.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := resp.Body.Read(make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
		open = append(open, resp)
		for _, e := range []*testbed.Engine{p, d} { // they keep the requests that they receive
			e.Forget()
		}
	}
	if grown := usage.Heap() - before; grown > count*size/4 {
		t.Errorf("%d open streams hold %d bytes", count, grown)
	}
	close(release)
	for _, resp := range open {
		readRest(resp)
	}
}

// When decode cannot load the KV, either side may be the cause. The retry
// avoids both engines.
func TestRetryLeavesBothEnginesOfABrokenPair(t *testing.T) {
	p0 := &testbed.Engine{Name: "p0", Role: "prefill", Serve: says(200, strings.Replace(pinnedAnswer, `"remote_engine_id":"p"`, `"remote_engine_id":"broken"`, 1))}
	p1 := &testbed.Engine{Name: "p1", Role: "prefill", Serve: says(200, pinnedAnswer)}
	decode := func(name string) *testbed.Engine {
		return &testbed.Engine{Name: name, Role: "decode", Serve: func(w http.ResponseWriter, leg testbed.Leg) {
			if strings.Contains(leg.Text, `"broken"`) {
				says(500, `{}`)(w, leg)
				return
			}
			says(200, `{"choices":[{"text":"x"}]}`)(w, leg)
		}}
	}
	inTurn := func(c *config.Config) { c.Retry.Attempts, c.Policy.Place = 2, "round_robin" }
	f := startScripted(t, "vllm-nixl", inTurn, p0, p1, decode("d0"), decode("d1"))
	for range 3 {
		if a := f.try(completionPath, plainCompletion(false)); a.status != 200 {
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
	}
	if len(p0.Seen(nil)) == 0 {
		t.Error("the broken engine got no request")
	}
}

// Engines behind TLS and a path prefix get their legs and clean-ups there.
func TestEnginesBehindTLSAndAPath(t *testing.T) {
	p := &testbed.Engine{Name: "p0", Role: "prefill", Serve: says(200, pinnedAnswer), TLS: true, Prefix: "/pre/fill"}
	d := &testbed.Engine{Name: "d0", Role: "decode", TLS: true, Prefix: "/d"}
	d.Serve = func(w http.ResponseWriter, leg testbed.Leg) {
		if strings.Contains(leg.Text, "refuse") {
			says(400, `{"no":true}`)(w, leg)
			return
		}
		streams(event("x"), "data: [DONE]\n\n")(w, leg)
	}
	f := startScripted(t, "vllm-nixl", nil, p, d)
	if a := f.try(completionPath, plainCompletion(true)); a.text != "x" || !a.done {
		t.Errorf("got status %d: %s", a.status, a.body)
	}
	if a := f.try(completionPath, strings.Replace(plainCompletion(true), `"hi"`, `"refuse"`, 1)); a.status != 400 {
		t.Errorf("got status %d: %s", a.status, a.body)
	}
	f.eventually("the clean-up is sent", func() bool { return len(d.Seen(isCleanup)) == 1 })
}

// A connection without a request does not make a drain unclean.
func TestDrainWithoutExchangesIsClean(t *testing.T) {
	f := startScripted(t, "none", func(c *config.Config) { c.Server.DrainTimeout = 0 }, both("e", says(200, "{}")))
	c, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := f.drain(); err != nil {
		t.Error(err)
	}
}
