package proxy

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
)

const (
	queueFull = `{"object":"error","message":"The request queue is full.","type":"503","param":null,"code":503}`
)

// refusing answers every request with that status, header lines and body.
func refusing(status int, body string, lines ...string) func(*engineConn, int) {
	return func(c *engineConn, _ int) {
		head := fmt.Sprintf("HTTP/1.1 %d %s\r\nContent-Length: %d\r\n", status, http.StatusText(status), len(body))
		c.send(head + strings.Join(append(lines, "\r\n"), "\r\n") + body)
	}
}

// TestRefusalReachesClient: an engine that refuses requests for lack of room, or blames them, is
// asked once for each. The client gets the engine's answer with its header lines, and no circuit
// opens.
func TestRefusalReachesClient(t *testing.T) {
	streamed := func(event string) func(*engineConn, int) {
		return func(c *engineConn, _ int) { c.stream("data: "+event+"\n\n", "data: [DONE]\n\n") }
	}
	for _, tt := range []struct {
		name   string
		stream bool
		serve  func(*engineConn, int)
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
		{"coded", false, refusing(429, gzipped("slow"), "Content-Encoding: gzip", "Content-Type: text/plain"), 429, gzipped("slow"), map[string]string{"Content-Encoding": "gzip", "Content-Type": "text/plain"}},
		{"401", false, refusing(401, `{}`, `WWW-Authenticate: Bearer realm="x"`), 401, `{}`, map[string]string{"Www-Authenticate": `Bearer realm="x"`}},
		{"403", false, refusing(403, `{}`), 403, `{}`, nil},
		{"404", false, refusing(404, `{}`), 404, `{}`, nil},
		{"413", false, refusing(413, `{}`), 413, `{}`, nil},
		{"422", false, refusing(422, `{}`), 422, `{}`, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := &fakeEngine{serve: tt.serve}
				w := newWorld(t, setup{engines: []*fakeEngine{e}})
				const requests = 8
				for range requests {
					a := ask(t.Context(), w.client, "POST", "http://proxy"+completionsPath, completions(tt.stream), "Accept-Encoding", "gzip")
					if a.status != tt.status || a.body != tt.body {
						t.Fatalf("got %d %q", a.status, a.body)
					}
					for name, want := range tt.lines {
						if got := a.header.Get(name); got != want {
							t.Errorf("%s: got %q, want %q", name, got, want)
						}
					}
				}
				if n := len(e.seen()); n != requests {
					t.Errorf("the engine got %d requests, want %d", n, requests)
				}
				if i := w.registry.Snapshot().Instance("e"); i.Breaker.Failures() != 0 || i.Breaker.Circuit(time.Now()) != circuit.Closed {
					t.Errorf("%d failures count", i.Breaker.Failures())
				}
			})
		})
	}
}

// TestOverloadedLegs: a leg that is refused for lack of room runs on another engine, if there is
// one. Prefill never computes twice, and the KV of a refused decode is freed.
func TestOverloadedLegs(t *testing.T) {
	full := refusing(503, queueFull, "Content-Type: application/json", "Retry-After: 2")
	for _, tt := range []struct {
		name             string
		prefill, decode  []func(*engineConn, int)
		status, prefills int
	}{
		{"prefill is full", []func(*engineConn, int){full}, []func(*engineConn, int){nil}, 503, 0},
		{"one prefill is full", []func(*engineConn, int){full, nil}, []func(*engineConn, int){nil}, 200, 1},
		{"decode is full", []func(*engineConn, int){nil}, []func(*engineConn, int){full}, 503, 1},
		{"one decode is full", []func(*engineConn, int){nil}, []func(*engineConn, int){full, nil}, 200, 1},
		{"all are full", []func(*engineConn, int){full, full}, []func(*engineConn, int){full, full}, 503, 0},
		{"all decodes are full", []func(*engineConn, int){nil, nil}, []func(*engineConn, int){full, full}, 503, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var engines []*fakeEngine
				var prefills, cleanups atomic.Int32
				add := func(role string, serves []func(*engineConn, int), good func(*engineConn, int)) {
					for n, serve := range serves {
						e := &fakeEngine{name: fmt.Sprint(role, n), role: role, connector: "vllm-nixl"}
						e.serve = func(c *engineConn, nth int) {
							if strings.HasSuffix(c.leg.header.Get("X-Request-Id"), "-cleanup") {
								cleanups.Add(1)
								c.json(200, doneAnswer)
							} else if serve != nil {
								serve(c, nth)
							} else {
								good(c, nth)
							}
						}
						engines = append(engines, e)
					}
				}
				add("prefill", tt.prefill, func(c *engineConn, _ int) {
					prefills.Add(1)
					c.json(200, strings.Replace(nixlAnswer, `"p.test"`, fmt.Sprintf(`%q,"remote_request_id":"r"`, c.e.name+".test"), 1))
				})
				add("decode", tt.decode, func(c *engineConn, _ int) { c.json(200, doneAnswer) })
				w := newWorld(t, setup{engines: engines})
				a := w.post(completionsPath, completions(false))
				if a.status != tt.status || tt.status == 503 && (a.body != queueFull || a.header.Get("Retry-After") != "2") {
					t.Errorf("got %d %s %v", a.status, a.body, a.header)
				}
				time.Sleep(time.Minute)
				if n := int(prefills.Load()); n != tt.prefills {
					t.Errorf("prefill computed %d times, want %d", n, tt.prefills)
				}
				if want := tt.status == 503 && tt.prefills == 1; (cleanups.Load() > 0) != want {
					t.Errorf("%d clean-ups", cleanups.Load())
				}
				for _, i := range w.registry.Snapshot().Instances {
					if n := i.Breaker.Failures(); n != 0 {
						t.Errorf("%s has %d failures", i.Spec.Name, n)
					}
				}
				if pairs := w.registry.Pairs(); len(pairs) > 0 && pairs[0].State == "broken" {
					t.Errorf("pairs: %+v", pairs)
				}
			})
		})
	}
}

// TestOverloadedConcurrentLegs: one of two legs that run at the same time is refused for lack of
// room. The client gets the refusal, both engines abort the request, and no circuit opens.
func TestOverloadedConcurrentLegs(t *testing.T) {
	hold := func(c *engineConn) { c.hold() }
	full := func(c *engineConn) { refusing(503, queueFull)(c, 0) }
	inside := func(c *engineConn) { c.stream(`data: {"error":`+queueFull+"}\n\n", "data: [DONE]\n\n") }
	for _, tt := range []struct {
		name            string
		stream          bool
		prefill, decode func(*engineConn)
		body            string
	}{
		{"prefill", false, full, hold, queueFull},
		{"decode", false, hold, full, queueFull},
		{"prefill of a stream", true, full, hold, queueFull},
		{"decode of a stream", true, hold, full, queueFull},
		{"in the stream of decode", true, hold, inside, `{"error":` + queueFull + `}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				serve := func(leg func(*engineConn)) func(*engineConn, int) {
					return func(c *engineConn, _ int) {
						if c.leg.path == "/abort_request" {
							c.json(200, "{}")
							return
						}
						leg(c)
					}
				}
				p := &fakeEngine{name: "p", role: "prefill", connector: "sglang", serve: serve(tt.prefill)}
				d := &fakeEngine{name: "d", role: "decode", connector: "sglang", serve: serve(tt.decode)}
				w := newWorld(t, setup{engines: []*fakeEngine{p, d}})
				for range 8 {
					if a := w.post(completionsPath, completions(tt.stream)); a.status != 503 || a.body != tt.body {
						t.Fatalf("got %d %s", a.status, a.body)
					}
				}
				time.Sleep(time.Minute)
				for _, e := range []*fakeEngine{p, d} {
					legs, aborts := 0, 0
					for _, l := range e.seen() {
						if l.path == "/abort_request" {
							aborts++
						} else {
							legs++
						}
					}
					if legs > 8 || aborts == 0 { // the leg that is not refused may end before it is sent
						t.Errorf("%s got %d legs and %d aborts", e.name, legs, aborts)
					}
					if n := w.registry.Snapshot().Instance(e.name).Breaker.Failures(); n != 0 {
						t.Errorf("%s has %d failures", e.name, n)
					}
				}
			})
		})
	}
}

// TestWaitsForARestart: the only engine ends and comes back. All requests wait for it, those that
// it was serving too: the retry does not go to an engine that has just refused the connection.
func TestWaitsForARestart(t *testing.T) {
	for _, requests := range []int{1, 60} {
		synctest.Test(t, func(t *testing.T) {
			cut := make(chan struct{})
			e := &fakeEngine{serve: func(c *engineConn, nth int) {
				if nth <= requests {
					<-cut
					c.hangUp()
					return
				}
				c.json(200, doneAnswer)
			}}
			w := newWorld(t, setup{engines: []*fakeEngine{e}, config: func(c *config.Config) {
				c.Limits.NoEngineTimeout = config.Duration(time.Minute)
				c.Health = config.Default().Health
			}})
			answers := make(chan answer, 2*requests)
			send := func() { answers <- w.post(completionsPath, completions(false)) }
			for range requests {
				go send()
			}
			time.Sleep(time.Second)
			e.end()
			close(cut)
			for range requests {
				go send()
			}
			time.Sleep(20 * time.Second)
			if n := len(answers); n != 0 {
				t.Errorf("%d requests were answered without an engine: %+v", n, <-answers)
			}
			e.begin()
			for range 2 * requests {
				if a := <-answers; a.status != 200 {
					t.Fatalf("got %d %s", a.status, a.body)
				}
			}
		})
	}
}
