package proxy

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

const unary = `{"choices":[{"text":"ab","finish_reason":"length"}],"usage":{"prompt_tokens":2,"completion_tokens":2}}`

// One engine gives an unusual answer, and the other engine works. The table has the
// client's answer, and whether the proxy sent a leg to the other engine.
func TestUnaryAnswers(t *testing.T) {
	say := func(head, body string) func(*engineConn, int) {
		return func(c *engineConn, _ int) { c.send("HTTP/1.1 " + head + "\r\n\r\n" + body); c.hangUp() }
	}
	refuse := func(status int) func(*engineConn, int) {
		return func(c *engineConn, _ int) {
			c.send(fmt.Sprintf("HTTP/1.1 %d x\r\nContent-Type: text/plain\r\nRetry-After: 7\r\nServer: e\r\nContent-Length: 2\r\n\r\nno", status))
		}
	}
	tests := []struct {
		name    string
		stream  bool
		serve   func(*engineConn, int)
		status  int
		body    string
		ctype   string
		retried string
	}{
		{"plain", false, func(c *engineConn, _ int) { c.json(200, unary) }, 200, unary, "application/json", ""},
		{"until the end of the connection", false, say("200 OK\r\nContent-Type: application/json\r\nConnection: close", unary), 200, unary, "application/json", ""},
		{"of another kind", false, say("200 OK\r\nContent-Type: text/html\r\nContent-Length: 3", "<p>"), 200, "<p>", "text/html", ""},
		{"whole answer to a stream request", true, func(c *engineConn, _ int) { c.json(200, unary) }, 200, unary, "application/json", ""},
		{"stream as the answer to a whole request", false, func(c *engineConn, _ int) { c.stream(eventA, done) }, 200, eventA + done, "text/event-stream; charset=utf-8", ""},
		{"201", false, func(c *engineConn, _ int) { c.json(201, "{}") }, 201, "{}", "application/json", ""},
		{"204", false, say("204 No Content", ""), 200, unary, "application/json", "empty_answer"},
		{"empty", false, say("200 OK\r\nContent-Length: 0", ""), 200, unary, "application/json", "empty_answer"},
		{"aborted", false, func(c *engineConn, _ int) { c.json(200, `{"choices":[{"finish_reason":"abort"}]}`) }, 200, unary, "application/json", "aborted"},
		{"cut in the middle", false, say("200 OK\r\nContent-Length: 500", unary), 200, unary, "application/json", "body"},
		{"larger than the limit", false, say(fmt.Sprintf("200 OK\r\nContent-Length: %d", buffer.MaxAnswer+1), ""), 200, unary, "application/json", "reset"},
		{"grows past the limit", false, func(c *engineConn, _ int) {
			c.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
			piece := strings.Repeat("x", 1<<20)
			for range buffer.MaxAnswer>>20 + 1 {
				c.chunks(piece)
			}
			c.hangUp()
		}, 200, unary, "application/json", "reset"},
		{"no HTTP", false, say("what", ""), 200, unary, "application/json", "head"},
		{"hangs up", false, func(c *engineConn, _ int) { c.hangUp() }, 200, unary, "application/json", "head"},
		{"hangs", false, func(c *engineConn, _ int) { c.hold() }, 200, unary, "application/json", "timeout"},
		{"hangs in the middle", false, func(c *engineConn, _ int) { c.send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab"); c.hold() }, 200, unary, "application/json", "timeout"},
		{"400", false, refuse(400), 400, "no", "text/plain", ""},
		{"404", false, refuse(404), 404, "no", "text/plain", ""},
		{"422 to a stream request", true, refuse(422), 422, "no", "text/plain", ""},
		{"401 for the client's key", false, refuse(401), 401, "no", "text/plain", ""},
		{"408", false, refuse(408), 200, unary, "application/json", "status_408"},
		{"429", false, refuse(429), 200, unary, "application/json", "status_429"},
		{"500", false, refuse(500), 200, unary, "application/json", "status_500"},
		{"503", false, refuse(503), 200, unary, "application/json", "status_503"},
		{"302", false, refuse(302), 200, unary, "application/json", "status_302"},
		{"refusal cut in the middle", false, say("400 Bad\r\nContent-Length: 9", "no"), 200, unary, "application/json", "body"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				good := &fakeEngine{name: "e1", serve: func(c *engineConn, _ int) { c.json(200, unary) }}
				w := newWorld(t, setup{engines: []*fakeEngine{{name: "e0", serve: tt.serve}, good}})
				a := w.post(completionsPath, completions(tt.stream), "X-Request-Id", "mine")
				if a.err != nil || a.status != tt.status || a.body != tt.body || a.header.Get("Content-Type") != tt.ctype {
					t.Errorf("got status %d, %v, error %v: %.200q", a.status, a.header, a.err, a.body)
				}
				if a.header.Get("X-Request-Id") != "mine" {
					t.Errorf("request id %q", a.header.Get("X-Request-Id"))
				}
				if got := a.header.Get("Retry-After"); (got == "7") != (a.status/100 == 4) {
					t.Errorf("Retry-After %q", got)
				}
				if n := w.metric("pdproxy_retries_total", tt.retried); n != btof(tt.retried != "") || len(good.seen()) != int(n) {
					t.Errorf("got %v retries for %s, and %d requests on the other engine", n, tt.retried, len(good.seen()))
				}
				if strings.HasPrefix(a.body, `{"choices":[{"text"`) {
					if row := w.books.Ended.PerfRows()[0]; row.PromptTokens != 2 || row.OutputTokens != 2 {
						t.Errorf("usage %+v", row)
					}
				}
			})
		})
	}
}

// If no engine can serve the request, the error names the failed leg and its engine.
func TestEveryEngineFails(t *testing.T) {
	status := func(n int) func(*engineConn, int) {
		return func(c *engineConn, _ int) {
			c.send(fmt.Sprintf("HTTP/1.1 %d x\r\nContent-Length: 2\r\n\r\nno", n))
		}
	}
	tests := []struct {
		name     string
		e0, e1   *fakeEngine
		attempts int
		status   int
		text     string
		outcome  telemetry.Outcome
		tries    [2]int
	}{
		{"500", &fakeEngine{serve: status(500)}, &fakeEngine{serve: status(503)}, 3, 502, `the decode leg on engine \"e0\" failed (status_500)`, telemetry.OutcomeEngineError, [2]int{2, 1}},
		{"one attempt", &fakeEngine{serve: status(500)}, &fakeEngine{serve: status(500)}, 1, 502, `on engine \"e0\"`, telemetry.OutcomeEngineError, [2]int{1, 0}},
		{"time-out", &fakeEngine{serve: func(c *engineConn, _ int) { c.hold() }}, &fakeEngine{serve: func(c *engineConn, _ int) { c.hold() }}, 2, 504, `the decode leg on engine \"e1\" timed out (timeout)`, telemetry.OutcomeTimeout, [2]int{1, 1}},
		{"429 of the engines", &fakeEngine{serve: status(429)}, &fakeEngine{serve: status(429)}, 2, 429, "no", telemetry.OutcomeEngineError, [2]int{1, 1}},
		{"401 for the proxy's key", &fakeEngine{serve: status(401), key: "k0"}, &fakeEngine{serve: status(401), key: "k1"}, 2, 502, "status_401", telemetry.OutcomeEngineError, [2]int{1, 1}},
		{"connections are refused", &fakeEngine{refuse: true}, &fakeEngine{refuse: true}, 2, 502, `(dial)`, telemetry.OutcomeEngineError, [2]int{0, 0}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e0, e1 := tt.e0, tt.e1
				e0.name, e1.name = "e0", "e1"
				w := newWorld(t, setup{engines: []*fakeEngine{e0, e1}, config: func(c *config.Config) { c.Retry.Attempts = tt.attempts }})
				a := w.post(completionsPath, completions(false))
				if a.status != tt.status || !strings.Contains(a.body, tt.text) {
					t.Errorf("got status %d: %s", a.status, a.body)
				}
				if got := [2]int{len(e0.seen()), len(e1.seen())}; got != tt.tries {
					t.Errorf("got tries %v, want %v", got, tt.tries)
				}
				w.outcome(tt.outcome)
				if log := w.logged.String(); strings.Contains(log, `"prompt"`) || strings.Contains(log, "k0") || !strings.Contains(log, "request failed") {
					t.Errorf("logged: %s", log)
				}
			})
		})
	}
}

// The bytes of a leg: the client's header lines and body without the proxy's own fields,
// the engine's API key, and a leg id instead of the client's id.
func TestLegLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{key: "engine-key", ranks: 2, serve: func(c *engineConn, _ int) { c.json(200, unary) }}
		w := newWorld(t, setup{engines: []*fakeEngine{e}})
		body := `{"model":"m","prompt":"hi","kv_transfer_params":{"do_remote_prefill":true},"rid":"r","x":{"kept":1.50}}`
		a := w.post(completionsPath, body,
			"Authorization", "Bearer client-key", "X-Request-Id", "mine", "X-Custom", "a", "X-Custom", "b", "Content-Type", "application/vnd.own+json; charset=utf-8",
			"X-Data-Parallel-Rank", "7", "X-Override-Priority", "1", "Accept-Encoding", "gzip", "Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
		if a.status != 200 {
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
		leg := e.seen()[0]
		if leg.body != `{"model":"m","prompt":"hi","x":{"kept":1.50}}` {
			t.Errorf("got body %s", leg.body)
		}
		want := map[string]string{
			"Authorization": "Bearer engine-key", "X-Custom": "a,b", "Content-Type": "application/json", "X-Data-Parallel-Rank": "0",
			"Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "X-Override-Priority": "", "Accept-Encoding": "", "Connection": "",
		}
		for name, value := range want {
			if got := strings.Join(leg.header[http.CanonicalHeaderKey(name)], ","); got != value {
				t.Errorf("%s: %q, want %q", name, got, value)
			}
		}
		if id := leg.header.Get("X-Request-Id"); len(id) != 32 || id == "mine" {
			t.Errorf("leg id %q", id)
		}
		if n := w.metric("pdproxy_leg_duration_seconds", "decode", "none"); n != 1 {
			t.Errorf("got %v timed legs", n)
		}
	})
}

const kvParams = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[1,2],"remote_engine_id":"p","remote_host":"p0.test","remote_port":1,"remote_request_id":"r"}`

func prefillAnswers(c *engineConn, _ int) {
	c.json(200, `{"choices":[{"text":"a"}],"kv_transfer_params":`+kvParams+`,"usage":{"prompt_tokens":7,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}`)
}

// A request with two legs: prefill's parameters reach decode byte for byte, and the
// explanation contains both legs.
func TestTwoLegs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &fakeEngine{name: "p0", role: "prefill", connector: "vllm-nixl", serve: prefillAnswers}
		d := &fakeEngine{name: "d0", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.stream(eventA, done) }}
		w := newWorld(t, setup{engines: []*fakeEngine{p, d}})
		a := w.post(completionsPath, completions(true))
		if a.status != 200 || a.body != eventA+done {
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
		for name, want := range map[string]string{"X-Pdproxy-Prefill": "p0", "X-Pdproxy-Decode": "d0", "X-Pdproxy-Flow": "prefill_first"} {
			if got := a.header.Get(name); got != want {
				t.Errorf("%s: %q", name, got)
			}
		}
		if leg := d.seen()[0]; !strings.Contains(leg.body, `"kv_transfer_params":`+kvParams) || leg.header.Get("X-Request-Id") != p.seen()[0].header.Get("X-Request-Id") {
			t.Errorf("decode received %s %v", leg.body, leg.header)
		}
		e := w.explained()
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
		t.Run(fmt.Sprintf("reached %v", reached), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := &fakeEngine{name: "p0", role: "prefill", connector: "vllm-nixl", serve: prefillAnswers}
				d0 := &fakeEngine{name: "d0", role: "decode", connector: "vllm-nixl", refuse: !reached, serve: func(c *engineConn, _ int) { c.hangUp() }}
				d1 := &fakeEngine{name: "d1", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.json(200, unary) }}
				w := newWorld(t, setup{engines: []*fakeEngine{p, d0, d1}})
				if a := w.post(completionsPath, completions(false)); a.status != 200 || a.body != unary {
					t.Fatalf("got status %d: %s", a.status, a.body)
				}
				if n := len(p.seen()); n != int(1+btof(reached)) {
					t.Errorf("got %d prefills", n)
				}
				if n := w.metric("pdproxy_retries_total", "decode"); n != 1 {
					t.Errorf("got %v retries", n)
				}
				time.Sleep(time.Minute) // for the clean-up
				synctest.Wait()
				if n := w.metric("pdproxy_kv_cleanups_total", "vllm-nixl", "abort_decode"); n != btof(reached) {
					t.Errorf("got %v clean-ups", n)
				}
			})
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
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := &fakeEngine{name: "p0", role: "prefill", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.json(200, tt.prefill) }}
				d := &fakeEngine{name: "d0", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.json(200, unary) }}
				w := newWorld(t, setup{engines: []*fakeEngine{p, d}, config: func(c *config.Config) { c.Retry.Attempts = 1 }})
				a := w.post(completionsPath, completions(false))
				if a.status != tt.status {
					t.Fatalf("got status %d: %s", a.status, a.body)
				}
				e := w.explained()
				if tt.fallback != "" && (len(e.Fallbacks) != 1 || e.Fallbacks[0] != journal.ExplainedFallback{What: "kv_transfer", Reason: tt.fallback} || w.metric("pdproxy_fallbacks_total", "kv_transfer", tt.fallback) != 1) {
					t.Errorf("got fallbacks %+v", e.Fallbacks)
				}
				if e.Legs[0].Error != tt.reason {
					t.Errorf("error of prefill: got %q", e.Legs[0].Error)
				}
			})
		})
	}
}

// Requests that the proxy rejects before it sends a leg.
func TestRequestsRefused(t *testing.T) {
	one := []*fakeEngine{{serve: func(c *engineConn, _ int) { c.json(200, unary) }}}
	tests := []struct {
		name         string
		engines      []*fakeEngine
		method, path string
		body         string
		status       int
		text         string
	}{
		{"no JSON", one, "POST", completionsPath, "what", 400, "invalid_request_error"},
		{"no prompt", one, "POST", completionsPath, `{"model":"m"}`, 400, "prompt"},
		{"unknown model", one, "POST", completionsPath, `{"model":"other","prompt":"x"}`, 404, "model_not_found"},
		{"text for an unknown model", one, "POST", completionsPath, `{"model":"ot\"her","prompt":"x"}`, 404, `"the model \"ot\\\"her\" does not exist; the engines serve m"`},
		{"unknown model's row", one, "GET", "/v1/models/other", "", 404, `the model \"other\" does not exist; the engines serve m`},
		{"too large", one, "POST", completionsPath, `{"model":"m","prompt":"` + strings.Repeat("x", 2000) + `"}`, 413, "body_too_large"},
		{"no engine", nil, "POST", completionsPath, completions(false), 503, "no_target"},
		{"GET", one, "GET", completionsPath, "", 405, "method_not_allowed"},
		{"POST of models", one, "POST", "/v1/models", "", 405, "method_not_allowed"},
		{"no such endpoint", one, "GET", "/v1/nothing", "", 404, `"there is no endpoint GET \"/v1/nothing\""`},
		{"slash at the end", one, "POST", "/v1/chat/completions/", `{}`, 400, "'messages' is missing."},
		{"two slashes at the end", one, "POST", "/v1/chat/completions//", `{}`, 404, "did you mean /v1/chat/completions?"},
		{"GET with a slash at the end", one, "GET", "/v1/chat/completions/", "", 405, "method_not_allowed"},
		{"slash alone", one, "GET", "/", "", 404, `"there is no endpoint GET \"/\""`},
		{"without v1", one, "POST", "/chat/completions", `{}`, 404, "did you mean /v1/chat/completions?"},
		{"v1 twice", one, "GET", "/v1/v1/models", "", 404, "did you mean /v1/models?"},
		{"v1 before health", one, "GET", "/v1/health/", "", 404, "did you mean /health?"},
		{"code for an unknown endpoint", one, "GET", "/" + strings.Repeat("x", 5000), "", 404, "not_found"},
		{"not carried", []*fakeEngine{{name: "p", role: "prefill", connector: "vllm-nixl"}, {name: "d", role: "decode", connector: "vllm-nixl"}}, "POST", "/generate", `{"text":"x"}`, 501, "not_implemented"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, setup{engines: tt.engines, config: func(c *config.Config) { c.Server.MaxBody = 1000 }})
				a := ask(t.Context(), w.client, tt.method, "http://proxy"+tt.path, tt.body)
				if a.status != tt.status || !strings.Contains(a.body, tt.text) || !strings.Contains(a.body, `{"error":{"message":`) || a.header.Get("X-Request-Id") == "" {
					t.Errorf("got status %d, header %v: %s", a.status, a.header, a.body)
				}
			})
			for _, e := range tt.engines {
				if len(e.seen()) != 0 {
					t.Error("an engine received a leg")
				}
			}
		})
	}
}

// The endpoints without generation.
func TestPlainEndpoints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		started := time.Now().Unix() // simulated time
		w := newWorld(t, setup{keys: keyLine("n", "k"), engines: []*fakeEngine{
			{models: "a,b/c,d/", cards: `"root":"/weights/a","parent":"base","max_model_len":4096`},
			{name: "f", models: "a", cards: `"root":"/weights/other","max_model_len":1024`},
		}})
		get := func(path string) string {
			a := ask(t.Context(), w.client, "GET", "http://proxy"+path, "", "Authorization", "Bearer k")
			return fmt.Sprintf("%d %s", a.status, strings.TrimSpace(a.body))
		}
		row := func(id string) string {
			return fmt.Sprintf(`{"id":%q,"object":"model","created":%d,"owned_by":"pdproxy"}`, id, started)
		}
		cards := strings.Replace(row("a"), "}", `,"root":"/weights/a","parent":"base","max_model_len":1024}`, 1)
		list := `200 {"object":"list","data":[` + cards + "," + row("b/c") + "," + row("d/") + `]}`
		for path, want := range map[string]string{
			"/v1/models":       list,
			"/v1/models/":      list,
			"/v1/models/a":     "200 " + cards,
			"/v1/models/b/c":   "200 " + row("b/c"),
			"/v1/models/b/c/":  "200 " + row("b/c"),
			"/v1/models/b%2Fc": "200 " + row("b/c"),
			"/v1/models/d/":    "200 " + row("d/"),
			"/v1/models/x":     `404 {"error":{"message":"the model \"x\" does not exist; the engines serve a, b/c, d/","type":"invalid_request_error","param":"model","code":"model_not_found"}}`,
			"/health":          `200 {"status":"ok"}`,
			"/health/":         `200 {"status":"ok"}`,
			"/version":         `200 {"version":"1.2.3"}`,
			"/version/":        `200 {"version":"1.2.3"}`,
		} {
			if got := get(path); got != want {
				t.Errorf("%s: %s, want %s", path, got, want)
			}
		}
		if a := w.get("/v1/models"); a.status != 401 {
			t.Errorf("without a key: got status %d", a.status)
		}
		if a := ask(t.Context(), w.client, "HEAD", "http://proxy/health", ""); a.status != 200 || a.body != "" {
			t.Errorf("HEAD: %+v", a)
		}
	})
}

// The time of a whole answer does not count as the time to the first token.
func TestFirstByteTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{engines: []*fakeEngine{{serve: func(c *engineConn, nth int) {
			if nth == 0 {
				c.stream(eventA, done)
				return
			}
			c.json(200, unary)
		}}}})
		for _, stream := range []bool{true, false, false} {
			if a := w.post(completionsPath, completions(stream)); a.status != 200 {
				t.Fatalf("%+v", a)
			}
		}
		if first, whole := w.metric("pdproxy_time_to_first_token_seconds"), w.metric("pdproxy_whole_answer_seconds"); first != 1 || whole != 2 {
			t.Errorf("got the times of %v streams and %v whole answers, want 1 and 2", first, whole)
		}
	})
}

// A body that arrives too late, or never.
func TestSlowBody(t *testing.T) {
	tests := []struct {
		name string
		sent string
		left bool
		want string
	}{
		{"time-out", "{\"model\"", false, "HTTP/1.1 408 Request Timeout\r\n"},
		{"client leaves", "{\"model\"", true, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, setup{})
				conn, err := w.public.Dial()
				if err != nil {
					t.Fatal(err)
				}
				fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: proxy\r\nContent-Length: 100\r\n\r\n%s", completionsPath, tt.sent)
				if tt.left {
					conn.Close()
				}
				got, _ := io.ReadAll(conn)
				conn.Close()
				synctest.Wait()
				if !strings.HasPrefix(string(got), tt.want) {
					t.Errorf("got %q", got)
				}
				want := telemetry.OutcomeClientError
				if tt.left {
					want = telemetry.OutcomeCancelled
				}
				w.outcome(want)
			})
		})
	}
}
