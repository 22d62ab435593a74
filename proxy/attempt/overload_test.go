package attempt_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

const (
	queueFull = `{"object":"error","message":"The request queue is full.","type":"503","param":null,"code":503}`
)

// refusing answers every request with that status, header lines and body.
func refusing(status int, body string, lines ...string) func(*world.Conn, int) {
	return func(c *world.Conn, _ int) {
		head := fmt.Sprintf("HTTP/1.1 %d %s\r\nContent-Length: %d\r\n", status, http.StatusText(status), len(body))
		c.Send(head + strings.Join(append(lines, "\r\n"), "\r\n") + body)
	}
}

// TestRefusalReachesClient: an engine that refuses requests for lack of room, or blames them, is
// asked once for each. The client gets the engine's answer with its header lines, and no circuit
// opens.
func TestRefusalReachesClient(t *testing.T) {
	streamed := func(event string) func(*world.Conn, int) {
		return func(c *world.Conn, _ int) { c.Stream("data: "+event+"\n\n", "data: [DONE]\n\n") }
	}
	for _, tt := range []struct {
		name   string
		stream bool
		serve  func(*world.Conn, int)
		status int
		body   string
		lines  map[string]string
	}{
		{"429", false, refusing(429, `{"error":"slow"}`, "Content-Type: application/json", "Retry-After: 7", "X-Should-Retry: true", "x-ratelimit-remaining-requests: 0"), 429, `{"error":"slow"}`,
			map[string]string{"Retry-After": "7", "X-Should-Retry": "true", "X-Ratelimit-Remaining-Requests": "0"}},
		{"429 for a stream", true, refusing(429, `{"error":"slow"}`, "Retry-After: 7"), 429, `{"error":"slow"}`, map[string]string{"Retry-After": "7"}},
		{"queue full", false, refusing(503, queueFull, "Content-Type: application/json"), 503, queueFull, map[string]string{"Content-Type": "application/json"}},
		{"queue full, in a stream", true, streamed(`{"error":` + queueFull + `}`), 503, `{"error":` + queueFull + `}`, nil},
		{"429 in a stream", true, streamed(`{"error":{"message":"slow","code":429}}`), 429, `{"error":{"message":"slow","code":429}}`, nil},
		{"503 with a time", false, refusing(503, "", "Retry-After: 3"), 503, "", map[string]string{"Retry-After": "3"}},
		{"coded", false, refusing(429, proxytest.Gzipped("slow"), "Content-Encoding: gzip", "Content-Type: text/plain"), 429, proxytest.Gzipped("slow"), map[string]string{"Content-Encoding": "gzip", "Content-Type": "text/plain"}},
		{"401", false, refusing(401, `{}`, `WWW-Authenticate: Bearer realm="x"`), 401, `{}`, map[string]string{"Www-Authenticate": `Bearer realm="x"`}},
		{"403", false, refusing(403, `{}`), 403, `{}`, nil},
		{"404", false, refusing(404, `{}`), 404, `{}`, nil},
		{"413", false, refusing(413, `{}`), 413, `{}`, nil},
		{"422", false, refusing(422, `{}`), 422, `{}`, nil},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			e := &world.Engine{Serve: tt.serve}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}})
			const requests = 8
			for range requests {
				a := world.Ask(t.Context(), w.Client, "POST", "http://proxy"+world.CompletionsPath, world.Completions(tt.stream), "Accept-Encoding", "gzip")
				if a.Status != tt.status || a.Body != tt.body {
					t.Fatalf("got %d %q", a.Status, a.Body)
				}
				for name, want := range tt.lines {
					if got := a.Header.Get(name); got != want {
						t.Errorf("%s: got %q, want %q", name, got, want)
					}
				}
			}
			if n := len(e.Seen()); n != requests {
				t.Errorf("the engine got %d requests, want %d", n, requests)
			}
			if i := w.Registry.Snapshot().Instance("e"); i.Breaker.Failures() != 0 || i.Breaker.Circuit(time.Now()) != circuit.Closed {
				t.Errorf("%d failures count", i.Breaker.Failures())
			}
		})
	}
}

// TestOverloadedLegs: a leg that is refused for lack of room runs on another engine, if there is
// one. Prefill never computes twice, and the KV of a refused decode is freed.
func TestOverloadedLegs(t *testing.T) {
	full := refusing(503, queueFull, "Content-Type: application/json", "Retry-After: 2")
	for _, tt := range []struct {
		name             string
		prefill, decode  []func(*world.Conn, int)
		status, prefills int
	}{
		{"prefill is full", []func(*world.Conn, int){full}, []func(*world.Conn, int){nil}, 503, 0},
		{"one prefill is full", []func(*world.Conn, int){full, nil}, []func(*world.Conn, int){nil}, 200, 1},
		{"decode is full", []func(*world.Conn, int){nil}, []func(*world.Conn, int){full}, 503, 1},
		{"one decode is full", []func(*world.Conn, int){nil}, []func(*world.Conn, int){full, nil}, 200, 1},
		{"all are full", []func(*world.Conn, int){full, full}, []func(*world.Conn, int){full, full}, 503, 0},
		{"all decodes are full", []func(*world.Conn, int){nil, nil}, []func(*world.Conn, int){full, full}, 503, 1},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			var engines []*world.Engine
			var prefills, cleanups atomic.Int32
			add := func(role string, serves []func(*world.Conn, int), good func(*world.Conn, int)) {
				for n, serve := range serves {
					e := &world.Engine{Name: fmt.Sprint(role, n), Role: role, Connector: "vllm-nixl"}
					e.Serve = func(c *world.Conn, nth int) {
						if strings.HasSuffix(c.Leg.Header.Get("X-Request-Id"), "-cleanup") {
							cleanups.Add(1)
							c.JSON(200, world.DoneAnswer)
						} else if serve != nil {
							serve(c, nth)
						} else {
							good(c, nth)
						}
					}
					engines = append(engines, e)
				}
			}
			add("prefill", tt.prefill, func(c *world.Conn, _ int) {
				prefills.Add(1)
				c.JSON(200, strings.Replace(world.NIXLAnswer, `"p.test"`, fmt.Sprintf(`%q,"remote_request_id":"r"`, c.E.Name+".test"), 1))
			})
			add("decode", tt.decode, func(c *world.Conn, _ int) { c.JSON(200, world.DoneAnswer) })
			w := world.New(t, world.Setup{Engines: engines})
			a := w.Post(world.CompletionsPath, world.Completions(false))
			if a.Status != tt.status || tt.status == 503 && (a.Body != queueFull || a.Header.Get("Retry-After") != "2") {
				t.Errorf("got %d %s %v", a.Status, a.Body, a.Header)
			}
			time.Sleep(time.Minute)
			if n := int(prefills.Load()); n != tt.prefills {
				t.Errorf("prefill computed %d times, want %d", n, tt.prefills)
			}
			if want := tt.status == 503 && tt.prefills == 1; (cleanups.Load() > 0) != want {
				t.Errorf("%d clean-ups", cleanups.Load())
			}
			for _, i := range w.Registry.Snapshot().Instances {
				if n := i.Breaker.Failures(); n != 0 {
					t.Errorf("%s has %d failures", i.Spec.Name, n)
				}
			}
			if pairs := w.Registry.Pairs(); len(pairs) > 0 && pairs[0].State == "broken" {
				t.Errorf("pairs: %+v", pairs)
			}
		})
	}
}

// TestFullEnginesGetNoRequests: engines of a small limit refuse what is above it. Placement remembers
// this for a moment, so few requests need a retry, and none ends with an error while another
// engine has room. The full engines are used up to their limits.
func TestFullEnginesGetNoRequests(t *testing.T) {
	for _, pairs := range []bool{false, true} {
		world.Run(t, fmt.Sprintf("pairs %v", pairs), func(t *testing.T) {
			const (
				rate, seconds = 40, 10
				full          = 2                   // engines
				limit         = 2                   // requests of each
				took          = time.Second / 2     // of an answer
				wanted        = limit * seconds * 2 // answers of a full engine that is always used up to its limit
			)
			var refused, served atomic.Int32
			engines := []*world.Engine{}
			for n := range full + 1 {
				var running atomic.Int32
				e := &world.Engine{Name: fmt.Sprint("d", n), Serve: func(c *world.Conn, _ int) {
					defer running.Add(-1)
					if running.Add(1) > limit && n < full {
						refused.Add(1)
						refusing(503, queueFull, "Content-Type: application/json")(c, 0)
						return
					}
					time.Sleep(took)
					if n < full {
						served.Add(1)
					}
					c.JSON(200, world.DoneAnswer)
				}}
				if pairs {
					e.Role, e.Connector = "decode", "vllm-nixl"
				}
				engines = append(engines, e)
			}
			if pairs {
				engines = append(engines, &world.Engine{Name: "p", Role: "prefill", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) {
					c.JSON(200, world.NIXLAnswer)
				}})
			}
			w := world.New(t, world.Setup{Engines: engines})
			answers := make(chan world.Answer, rate*seconds)
			for range rate * seconds {
				go func() { answers <- w.Post(world.CompletionsPath, world.Completions(false)) }()
				time.Sleep(time.Second / rate)
			}
			for range rate * seconds {
				if a := <-answers; a.Status != 200 {
					t.Fatalf("got %d %s", a.Status, a.Body)
				}
			}
			if n := refused.Load(); n == 0 || n > 2*full*seconds {
				t.Errorf("%d of %d requests were refused", n, rate*seconds)
			}
			if n := served.Load(); n < full*wanted*3/4 {
				t.Errorf("the full engines served %d requests, at most %d are possible", n, full*wanted)
			}
		})
	}
}

// TestOverloadedConcurrentLegs: one of two legs that run at the same time is refused for lack of
// room. The client gets the refusal, both engines abort the request, and no circuit opens.
func TestOverloadedConcurrentLegs(t *testing.T) {
	hold := func(c *world.Conn) { c.Hold() }
	full := func(c *world.Conn) { refusing(503, queueFull)(c, 0) }
	inside := func(c *world.Conn) { c.Stream(`data: {"error":`+queueFull+"}\n\n", "data: [DONE]\n\n") }
	for _, tt := range []struct {
		name            string
		stream          bool
		prefill, decode func(*world.Conn)
		body            string
	}{
		{"prefill", false, full, hold, queueFull},
		{"decode", false, hold, full, queueFull},
		{"prefill of a stream", true, full, hold, queueFull},
		{"decode of a stream", true, hold, full, queueFull},
		{"in the stream of decode", true, hold, inside, `{"error":` + queueFull + `}`},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			serve := func(leg func(*world.Conn)) func(*world.Conn, int) {
				return world.Aborting(func(c *world.Conn, _ int) {
					leg(c)
				})
			}
			p := &world.Engine{Name: "p", Role: "prefill", Connector: "sglang", Serve: serve(tt.prefill)}
			d := &world.Engine{Name: "d", Role: "decode", Connector: "sglang", Serve: serve(tt.decode)}
			w := world.New(t, world.Setup{Engines: []*world.Engine{p, d}})
			for range 8 {
				if a := w.Post(world.CompletionsPath, world.Completions(tt.stream)); a.Status != 503 || a.Body != tt.body {
					t.Fatalf("got %d %s", a.Status, a.Body)
				}
			}
			time.Sleep(time.Minute)
			for _, e := range []*world.Engine{p, d} {
				legs, aborts := 0, 0
				for _, l := range e.Seen() {
					if l.Path == "/abort_request" {
						aborts++
					} else {
						legs++
					}
				}
				if legs > 8 || aborts == 0 { // the leg that is not refused may end before it is sent
					t.Errorf("%s got %d legs and %d aborts", e.Name, legs, aborts)
				}
				if n := w.Registry.Snapshot().Instance(e.Name).Breaker.Failures(); n != 0 {
					t.Errorf("%s has %d failures", e.Name, n)
				}
			}
		})
	}
}

// TestWaitsForARestart: the only engine ends and comes back. All requests wait for it, those that
// it was serving too: the retry does not go to an engine that has just refused the connection.
func TestWaitsForARestart(t *testing.T) {
	for _, requests := range []int{1, 60} {
		synctest.Test(t, func(t *testing.T) {
			cut := make(chan struct{})
			e := &world.Engine{Serve: func(c *world.Conn, nth int) {
				if nth <= requests {
					<-cut
					c.HangUp()
					return
				}
				c.JSON(200, world.DoneAnswer)
			}}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) {
				c.Limits.NoEngineTimeout = config.Duration(time.Minute)
				c.Health = config.Default().Health
			}})
			answers := make(chan world.Answer, 2*requests)
			send := func() { answers <- w.Post(world.CompletionsPath, world.Completions(false)) }
			for range requests {
				go send()
			}
			time.Sleep(time.Second)
			e.End()
			close(cut)
			for range requests {
				go send()
			}
			time.Sleep(20 * time.Second)
			if n := len(answers); n != 0 {
				t.Errorf("%d requests were answered without an engine: %+v", n, <-answers)
			}
			e.Begin()
			for range 2 * requests {
				if a := <-answers; a.Status != 200 {
					t.Fatalf("got %d %s", a.Status, a.Body)
				}
			}
		})
	}
}
