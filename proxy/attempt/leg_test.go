package attempt_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// One engine gives an unusual answer, and the other engine works. The table has the
// client's answer, and whether the proxy sent a leg to the other engine.
func TestUnaryAnswers(t *testing.T) {
	say := func(head, body string) func(*world.Conn, int) {
		return func(c *world.Conn, _ int) { c.Send("HTTP/1.1 " + head + "\r\n\r\n" + body); c.HangUp() }
	}
	refuse := func(status int) func(*world.Conn, int) {
		return func(c *world.Conn, _ int) {
			c.Send(fmt.Sprintf("HTTP/1.1 %d x\r\nContent-Type: text/plain\r\nRetry-After: 7\r\nServer: e\r\nContent-Length: 2\r\n\r\nno", status))
		}
	}
	tests := []struct {
		name    string
		stream  bool
		serve   func(*world.Conn, int)
		status  int
		body    string
		ctype   string
		retried string
	}{
		{"plain", false, func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }, 200, world.Unary, "application/json", ""},
		{"until the end of the connection", false, say("200 OK\r\nContent-Type: application/json\r\nConnection: close", world.Unary), 200, world.Unary, "application/json", ""},
		{"of another kind", false, say("200 OK\r\nContent-Type: text/html\r\nContent-Length: 3", "<p>"), 200, "<p>", "text/html", ""},
		{"whole answer to a stream request", true, func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }, 200, world.Unary, "application/json", ""},
		{"stream as the answer to a whole request", false, func(c *world.Conn, _ int) { c.Stream(world.EventA, world.Done) }, 200, world.EventA + world.Done, "text/event-stream; charset=utf-8", ""},
		{"201", false, func(c *world.Conn, _ int) { c.JSON(201, "{}") }, 201, "{}", "application/json", ""},
		{"204", false, say("204 No Content", ""), 200, world.Unary, "application/json", "empty_answer"},
		{"empty", false, say("200 OK\r\nContent-Length: 0", ""), 200, world.Unary, "application/json", "empty_answer"},
		{"aborted", false, func(c *world.Conn, _ int) { c.JSON(200, `{"choices":[{"finish_reason":"abort"}]}`) }, 200, world.Unary, "application/json", "aborted"},
		{"cut in the middle", false, say("200 OK\r\nContent-Length: 500", world.Unary), 200, world.Unary, "application/json", "body"},
		{"larger than the limit", false, say(fmt.Sprintf("200 OK\r\nContent-Length: %d", buffer.MaxAnswer+1), ""), 200, world.Unary, "application/json", "reset"},
		{"grows past the limit", false, func(c *world.Conn, _ int) {
			c.Send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
			piece := strings.Repeat("x", 1<<20)
			for range buffer.MaxAnswer>>20 + 1 {
				c.Chunks(piece)
			}
			c.HangUp()
		}, 200, world.Unary, "application/json", "reset"},
		{"no HTTP", false, say("what", ""), 200, world.Unary, "application/json", "head"},
		{"hangs up", false, func(c *world.Conn, _ int) { c.HangUp() }, 200, world.Unary, "application/json", "head"},
		{"hangs", false, func(c *world.Conn, _ int) { c.Hold() }, 200, world.Unary, "application/json", "timeout"},
		{"hangs in the middle", false, func(c *world.Conn, _ int) { c.Send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab"); c.Hold() }, 200, world.Unary, "application/json", "timeout"},
		{"400", false, refuse(400), 400, "no", "text/plain", ""},
		{"404", false, refuse(404), 404, "no", "text/plain", ""},
		{"422 to a stream request", true, refuse(422), 422, "no", "text/plain", ""},
		{"401 for the client's key", false, refuse(401), 401, "no", "text/plain", ""},
		{"408", false, refuse(408), 200, world.Unary, "application/json", "status_408"},
		{"429", false, refuse(429), 200, world.Unary, "application/json", "status_429"},
		{"500", false, refuse(500), 200, world.Unary, "application/json", "status_500"},
		{"503", false, refuse(503), 200, world.Unary, "application/json", "status_503"},
		{"302", false, refuse(302), 200, world.Unary, "application/json", "status_302"},
		{"refusal cut in the middle", false, say("400 Bad\r\nContent-Length: 9", "no"), 200, world.Unary, "application/json", "body"},
	}
	for _, tt := range tests {
		world.Run(t, tt.name, func(t *testing.T) {
			good := &world.Engine{Name: "e1", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{{Name: "e0", Serve: tt.serve}, good}})
			a := w.Post(world.CompletionsPath, world.Completions(tt.stream), "X-Request-Id", "mine")
			if a.Err != nil || a.Status != tt.status || a.Body != tt.body || a.Header.Get("Content-Type") != tt.ctype {
				t.Errorf("got status %d, %v, error %v: %.200q", a.Status, a.Header, a.Err, a.Body)
			}
			if a.Header.Get("X-Request-Id") != "mine" {
				t.Errorf("request id %q", a.Header.Get("X-Request-Id"))
			}
			if got := a.Header.Get("Retry-After"); (got == "7") != (a.Status/100 == 4) {
				t.Errorf("Retry-After %q", got)
			}
			if n := w.Metric("pdproxy_retries_total", tt.retried); n != btof(tt.retried != "") || len(good.Seen()) != int(n) {
				t.Errorf("got %v retries for %s, and %d requests on the other engine", n, tt.retried, len(good.Seen()))
			}
			if strings.HasPrefix(a.Body, `{"choices":[{"text"`) {
				if row := w.Ended()[0]; row.PromptTokens != 2 || row.OutputTokens != 2 {
					t.Errorf("usage %+v", row)
				}
			}
		})
	}
}

// If no engine can serve the request, the error names the failed leg and its engine.
func TestEveryEngineFails(t *testing.T) {
	status := func(n int) func(*world.Conn, int) {
		return func(c *world.Conn, _ int) {
			c.Send(fmt.Sprintf("HTTP/1.1 %d x\r\nContent-Length: 2\r\n\r\nno", n))
		}
	}
	tests := []struct {
		name     string
		e0, e1   *world.Engine
		attempts int
		status   int
		text     string
		outcome  telemetry.Outcome
		tries    [2]int
	}{
		{"500", &world.Engine{Serve: status(500)}, &world.Engine{Serve: status(503)}, 3, 502, `the decode leg on engine \"e0\" failed (status_500)`, telemetry.OutcomeEngineError, [2]int{2, 1}},
		{"one attempt", &world.Engine{Serve: status(500)}, &world.Engine{Serve: status(500)}, 1, 502, `on engine \"e0\"`, telemetry.OutcomeEngineError, [2]int{1, 0}},
		{"time-out", &world.Engine{Serve: func(c *world.Conn, _ int) { c.Hold() }}, &world.Engine{Serve: func(c *world.Conn, _ int) { c.Hold() }}, 2, 504, `the decode leg on engine \"e1\" timed out (timeout)`, telemetry.OutcomeTimeout, [2]int{1, 1}},
		{"429 of the engines", &world.Engine{Serve: status(429)}, &world.Engine{Serve: status(429)}, 2, 429, "no", telemetry.OutcomeEngineError, [2]int{1, 1}},
		{"401 for the proxy's key", &world.Engine{Serve: status(401), Key: "k0"}, &world.Engine{Serve: status(401), Key: "k1"}, 2, 502, "status_401", telemetry.OutcomeEngineError, [2]int{1, 1}},
		{"connections are refused", &world.Engine{Refuse: true}, &world.Engine{Refuse: true}, 2, 502, `(dial)`, telemetry.OutcomeEngineError, [2]int{0, 0}},
	}
	for _, tt := range tests {
		world.Run(t, tt.name, func(t *testing.T) {
			e0, e1 := tt.e0, tt.e1
			e0.Name, e1.Name = "e0", "e1"
			w := world.New(t, world.Setup{Engines: []*world.Engine{e0, e1}, Config: func(c *config.Config) { c.Retry.Attempts = tt.attempts }})
			a := w.Post(world.CompletionsPath, world.Completions(false))
			if a.Status != tt.status || !strings.Contains(a.Body, tt.text) {
				t.Errorf("got status %d: %s", a.Status, a.Body)
			}
			if got := [2]int{len(e0.Seen()), len(e1.Seen())}; got != tt.tries {
				t.Errorf("got tries %v, want %v", got, tt.tries)
			}
			w.Outcome(tt.outcome)
			if log := w.Logged.String(); strings.Contains(log, `"prompt"`) || strings.Contains(log, "k0") || !strings.Contains(log, "request failed") {
				t.Errorf("logged: %s", log)
			}
		})
	}
}

// The bytes of a leg: the client's header lines and body without the proxy's own fields,
// the engine's API key, and a leg id instead of the client's id.
func TestLegLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Key: "engine-key", Ranks: 2, Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}})
		body := `{"model":"m","prompt":"hi","kv_transfer_params":{"do_remote_prefill":true},"rid":"r","x":{"kept":1.50}}`
		a := w.Post(world.CompletionsPath, body,
			"Authorization", "Bearer client-key", "X-Request-Id", "mine", "X-Custom", "a", "X-Custom", "b", "Content-Type", "application/vnd.own+json; charset=utf-8",
			"X-Data-Parallel-Rank", "7", "X-Override-Priority", "1", "Accept-Encoding", "gzip", "Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
		if a.Status != 200 {
			t.Fatalf("got status %d: %s", a.Status, a.Body)
		}
		leg := e.Seen()[0]
		if leg.Body != `{"model":"m","prompt":"hi","x":{"kept":1.50}}` {
			t.Errorf("got body %s", leg.Body)
		}
		want := map[string]string{
			"Authorization": "Bearer engine-key", "X-Custom": "a,b", "Content-Type": "application/json", "X-Data-Parallel-Rank": "0",
			"Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "X-Override-Priority": "", "Accept-Encoding": "", "Connection": "",
		}
		for name, value := range want {
			if got := strings.Join(leg.Header[http.CanonicalHeaderKey(name)], ","); got != value {
				t.Errorf("%s: %q, want %q", name, got, value)
			}
		}
		if id := leg.Header.Get("X-Request-Id"); len(id) != 32 || id == "mine" {
			t.Errorf("leg id %q", id)
		}
		if n := w.Metric("pdproxy_leg_duration_seconds", "decode", "none"); n != 1 {
			t.Errorf("got %v timed legs", n)
		}
	})
}

// A request with two legs: prefill's parameters reach decode byte for byte, and the
// explanation contains both legs.
func TestTwoLegs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &world.Engine{Name: "p0", Role: "prefill", Connector: "vllm-nixl", Serve: world.PrefillAnswers}
		d := &world.Engine{Name: "d0", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.Stream(world.EventA, world.Done) }}
		w := world.New(t, world.Setup{Engines: []*world.Engine{p, d}})
		a := w.Post(world.CompletionsPath, world.Completions(true))
		if a.Status != 200 || a.Body != world.EventA+world.Done {
			t.Fatalf("got status %d: %s", a.Status, a.Body)
		}
		for name, want := range map[string]string{"X-Pdproxy-Prefill": "p0", "X-Pdproxy-Decode": "d0", "X-Pdproxy-Flow": "prefill_first"} {
			if got := a.Header.Get(name); got != want {
				t.Errorf("%s: %q", name, got)
			}
		}
		if leg := d.Seen()[0]; !strings.Contains(leg.Body, `"kv_transfer_params":`+world.KVParams) || leg.Header.Get("X-Request-Id") != p.Seen()[0].Header.Get("X-Request-Id") {
			t.Errorf("decode received %s %v", leg.Body, leg.Header)
		}
		e := w.Explained()
		if e.Flow != "prefill_first" || e.DisaggID == 0 || e.Policy != "native" || len(e.Candidates) != 2 || len(e.Legs) != 2 || e.Legs[0].Phase != "prefill" || e.Legs[1].Engine != "d0" || len(e.Fallbacks) != 0 {
			t.Errorf("explained as %+v", e)
		}
	})
}

// If the proxy never reached the decode engine, another decode engine uses the same
// blocks of prefill. If the engine may have read the blocks, the proxy starts a new
// attempt.
func TestDecodeMoves(t *testing.T) {
	for _, reached := range []bool{false, true} {
		world.Run(t, fmt.Sprintf("reached %v", reached), func(t *testing.T) {
			p := &world.Engine{Name: "p0", Role: "prefill", Connector: "vllm-nixl", Serve: world.PrefillAnswers}
			d0 := &world.Engine{Name: "d0", Role: "decode", Connector: "vllm-nixl", Refuse: !reached, Serve: func(c *world.Conn, _ int) { c.HangUp() }}
			d1 := &world.Engine{Name: "d1", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{p, d0, d1}})
			if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 || a.Body != world.Unary {
				t.Fatalf("got status %d: %s", a.Status, a.Body)
			}
			if n := len(p.Seen()); n != int(1+btof(reached)) {
				t.Errorf("got %d prefills", n)
			}
			if n := w.Metric("pdproxy_retries_total", "decode"); n != 1 {
				t.Errorf("got %v retries", n)
			}
			time.Sleep(time.Minute) // for the clean-up
			synctest.Wait()
			if n := w.Metric("pdproxy_kv_cleanups_total", "vllm-nixl", "abort_decode"); n != btof(reached) {
				t.Errorf("got %v clean-ups", n)
			}
		})
	}
}

// Answers of prefill that end the attempt, or cause a fallback.
func TestPrefillAnswers(t *testing.T) {
	tests := []struct {
		name     string
		prefill  string
		status   int
		fallback string
		reason   string
	}{
		{"no params", `{"choices":[]}`, 200, "no_kv_params", ""},
		{"no JSON", `what`, 502, "", "bad_answer"},
		{"params of another type", `{"kv_transfer_params":3}`, 502, "", "bad_answer"},
	}
	for _, tt := range tests {
		world.Run(t, tt.name, func(t *testing.T) {
			p := &world.Engine{Name: "p0", Role: "prefill", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, tt.prefill) }}
			d := &world.Engine{Name: "d0", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{p, d}, Config: func(c *config.Config) { c.Retry.Attempts = 1 }})
			a := w.Post(world.CompletionsPath, world.Completions(false))
			if a.Status != tt.status {
				t.Fatalf("got status %d: %s", a.Status, a.Body)
			}
			e := w.Explained()
			if tt.fallback != "" && (len(e.Fallbacks) != 1 || e.Fallbacks[0] != journal.ExplainedFallback{What: "kv_transfer", Reason: tt.fallback} || w.Metric("pdproxy_fallbacks_total", "kv_transfer", tt.fallback) != 1) {
				t.Errorf("got fallbacks %+v", e.Fallbacks)
			}
			if e.Legs[0].Error != tt.reason {
				t.Errorf("error of prefill: got %q", e.Legs[0].Error)
			}
		})
	}
}

// The time of a whole answer does not count as the time to the first token.
func TestFirstByteTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := world.New(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, nth int) {
			if nth == 0 {
				c.Stream(world.EventA, world.Done)
				return
			}
			c.JSON(200, world.Unary)
		}}}})
		for _, stream := range []bool{true, false, false} {
			if a := w.Post(world.CompletionsPath, world.Completions(stream)); a.Status != 200 {
				t.Fatalf("%+v", a)
			}
		}
		if first, whole := w.Metric("pdproxy_time_to_first_token_seconds"), w.Metric("pdproxy_whole_answer_seconds"); first != 1 || whole != 2 {
			t.Errorf("got the times of %v streams and %v whole answers, want 1 and 2", first, whole)
		}
	})
}
