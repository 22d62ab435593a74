package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// api is a generating route other than completions and chat.
type api struct {
	path string
	// body returns a request for that many tokens; different prompts have
	// different values of prompt.
	body func(prompt string, tokens int, stream bool) string
	// evil returns a member of the body that names a KV transfer with params.
	evil func(params string) string
}

func quoted(s string) string {
	b, _ := json.Marshal(s)
	return string(b)
}

// apis are the routes of vLLM, and SGLang's own.
var apis = []api{
	{
		path: "/v1/responses",
		body: func(prompt string, tokens int, stream bool) string {
			return fmt.Sprintf(`{"model":"sim","input":%s,"max_output_tokens":%d,"ignore_eos":true,"stream":%t}`, quoted(prompt), tokens, stream)
		},
		evil: func(params string) string { return `"vllm_xargs":{"kv_transfer_params":` + params + `},` },
	},
	{
		path: "/v1/messages",
		body: func(prompt string, tokens int, stream bool) string {
			return fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%s}],"max_tokens":%d,"stream":%t}`, quoted(prompt), tokens, stream)
		},
		evil: func(params string) string { return `"kv_transfer_params":` + params + `,` },
	},
	{
		path: "/inference/v1/generate",
		body: func(prompt string, tokens int, stream bool) string {
			ids, _ := json.Marshal([]int32(prompt)) // any ids are valid
			return fmt.Sprintf(`{"model":"sim","token_ids":%s,"sampling_params":{"max_tokens":%d,"ignore_eos":true},"stream":%t}`, ids, tokens, stream)
		},
		evil: func(params string) string { return `"kv_transfer_params":` + params + `,` },
	},
	{
		path: "/generate",
		body: func(prompt string, tokens int, stream bool) string {
			return fmt.Sprintf(`{"text":%s,"sampling_params":{"max_new_tokens":%d,"ignore_eos":true},"stream":%t}`, quoted(prompt), tokens, stream)
		},
		evil: func(string) string { return `"bootstrap_room":[7],` },
	},
}

// eachAPI runs a test for every API that a connector supports, on one fleet for
// each connector. The other APIs are rejected.
func eachAPI(t *testing.T, o fleetOptions, run func(f *fleet, a api)) {
	eachConnector(t, func(t *testing.T, name string) {
		conn, _ := connector.ByName(kindOf(name))
		f := startFleet(t, name, o)
		for _, a := range apis {
			if kindOf(name) == enginesim.ConnectorSGLang && a.path == "/v1/responses" { // which keeps two of the tokens (ResponsesRequest.to_sampling_params)
				body := a.body
				a.body = func(prompt string, tokens int, stream bool) string { return body(prompt, tokens+2, stream) }
			}
			t.Run(a.path, func(t *testing.T) {
				g := *f
				g.t = t
				route, ok := openai.APIFor(a.path)
				if !ok {
					t.Fatal("no such route")
				}
				if !conn.Serves(route) {
					if got := g.try(a.path, a.body("x", 3, false)); got.status != 501 || !strings.Contains(got.body, conn.Name()) {
						t.Errorf("got status %d: %s", got.status, got.body)
					}
					return
				}
				request := new(openai.Request)
				if err := openai.ParseRequest(route, []byte(a.body("x", 3, false)), request); err != nil {
					t.Fatal(err)
				}
				if conn.Pairable(request) == nil { // the other case has a separate test
					run(&g, a)
				}
			})
		}
	})
}

// apiFaults makes each row of a table of faults meet its own fault.
func apiFaults(c *config.Config) {
	c.Circuit.OpenFor = config.Duration(10 * time.Millisecond)
	c.Retry.Continue = config.ContinueOff // every engine fails here, and no stream could go on
	c.Retry.MinBudget = 1000
}

func TestAPIsEqualOneEngine(t *testing.T) {
	eachAPI(t, fleetOptions{}, func(f *fleet, a api) {
		for _, tokens := range []int{1, 20} {
			for _, stream := range []bool{false, true} {
				body := a.body(long, tokens, stream)
				got := f.try(a.path, body)
				f.right(got, a.path, body)
				if got.done != stream || got.header.Get("X-Pdproxy-Prefill") == "" {
					f.t.Errorf("done %v, header %v", got.done, got.header)
				}
			}
		}
		body := strings.Replace(a.body("who", 5, true), `"model":"sim",`, "", 1)
		f.right(f.try(a.path, body), a.path, body)
	})
}

func TestAPIsFail(t *testing.T) {
	o := fleetOptions{config: apiFaults, engine: slow(enginesim.RoleDecode, 2000)}
	eachAPI(t, o, func(f *fleet, a api) {
		fault := func(engines []*enginesim.Engine, fail, hang string) {
			for _, e := range engines {
				if err := e.SetFault(fail, 0, hang); err != nil {
					f.t.Fatal(err)
				}
			}
		}
		for _, row := range []struct {
			name string
			run  func()
		}{
			{"one prefill fails", func() { fault(f.prefill[:1], "1:500", ""); f.retried(a) }},
			{"one prefill is reset", func() { fault(f.prefill[:1], "1:reset", ""); f.retried(a) }},
			{"one decode fails", func() { fault(f.decode[:1], "1:503", ""); f.retried(a) }},
			{"one decode closes", func() { fault(f.decode[:1], "1:close", ""); f.retried(a) }},
			{"one transfer fails", func() { fault(f.decode[:1], failedTransfer(f.connector), ""); f.retried(a) }},
			{"every prefill fails", func() {
				fault(f.prefill, "1:500", "")
				got := f.try(a.path, a.body("all fail", 5, true))
				if got.status != 502 || !strings.Contains(got.body, "prefill") || !strings.Contains(got.body, `"error":{`) {
					f.t.Errorf("got status %d: %s", got.status, got.body)
				}
				if typed := strings.Contains(got.body, `"type":"error"`); typed != (a.path == "/v1/messages") {
					f.t.Errorf("not an error of this API: %s", got.body)
				}
			}},
			{"prefill refuses", func() {
				fault(f.prefill, "1:400", "")
				if got := f.try(a.path, a.body("no", 5, true)); got.status != 400 || !strings.Contains(got.body, "simulated bad request") {
					f.t.Errorf("got status %d: %s", got.status, got.body)
				}
			}},
			{"decode is cut", func() { fault(f.decode, "1:cut", ""); f.breaksAt(a) }},
			{"decode reports that it failed", func() { fault(f.decode, "1:sse-error", ""); f.breaksAt(a) }},
			{"the client leaves prefill", func() {
				fault(f.prefill, "", "prefill")
				ctx, leave := context.WithCancel(context.Background())
				defer leave()
				gone := make(chan answer, 1)
				go func() { gone <- f.post(ctx, f.url, a.path, a.body(long+"left", 20, true)) }()
				f.eventually("prefill works", func() bool { return f.busy(f.prefill) })
				leave()
				if got := <-gone; !errors.Is(got.err, context.Canceled) {
					f.t.Errorf("the client got %+v", got)
				}
			}},
			{"the client leaves a stream", func() {
				ctx, leave := context.WithCancel(context.Background())
				defer leave()
				resp := f.openAt(ctx, a.path, a.body(long, 2000, true))
				if _, err := resp.Body.Read(make([]byte, 10)); err != nil {
					f.t.Error(err)
				}
				leave()
				resp.Body.Close()
			}},
		} {
			f.t.Run(row.name, func(t *testing.T) {
				before := f.t
				f.t = t
				defer func() { f.t = before }()
				row.run()
				fault(f.prefill, "", "")
				fault(f.decode, "", "")
			})
		}
		f.settled()
	})
}

// retried asserts that clients do not notice the retry of a leg.
func (f *fleet) retried(a api) {
	f.t.Helper()
	for _, stream := range []bool{true, false} {
		before, n := f.metric("pdproxy_retries_total"), 0
		f.eventually("a leg is tried again", func() bool {
			n++
			body := a.body(fmt.Sprint("try ", n), 6, stream)
			f.right(f.try(a.path, body), a.path, body)
			return f.metric("pdproxy_retries_total") > before
		})
	}
}

// breaksAt asserts that a stream ends in an error of its API.
func (f *fleet) breaksAt(a api) {
	f.t.Helper()
	var got answer
	f.eventually("a stream begins", func() bool { // a reset may arrive before the first events
		got = f.try(a.path, a.body(long, 30, true))
		return got.status == 200
	})
	if got.status != 200 || got.err != nil || got.errors != 1 {
		f.t.Errorf("got status %d, %d error events, err %v: %s", got.status, got.errors, got.err, got.body)
	}
}

// A client that names the host of a transfer must not make an engine call it.
func TestNoEngineCallsAHostOfTheClient(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var called atomic.Int64
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			called.Add(1)
			c.Close()
		}
	}()
	port := l.Addr().(*net.TCPAddr).Port
	params := fmt.Sprintf(`{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2]],"remote_engine_id":"e","remote_request_id":"r",`+
		`"remote_host":"127.0.0.1","remote_port":%d,"remote_handshake_port":%d,"remote_notify_port":%d,"remote_bootstrap_addr":"http://127.0.0.1:%d","transfer_id":"tx-1","tp_size":1}`, port, port, port, port)
	eachAPI(t, fleetOptions{}, func(f *fleet, a api) {
		for _, evil := range []string{
			`"kv_transfer_params":` + params + `,`, a.evil(params),
			fmt.Sprintf(`"bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":7,`, port),
		} {
			body := a.body("who is there", 6, false)
			f.right(f.try(a.path, strings.Replace(body, "{", "{"+evil, 1)), a.path, body)
			if strings.Contains(body, `"sampling_params":{`) {
				hidden := strings.Replace(body, `"sampling_params":{`, `"sampling_params":{"extra_args":{"kv_transfer_params":`+params+`},`, 1)
				f.right(f.try(a.path, hidden), a.path, body)
			}
		}
	})
	if n := called.Load(); n > 0 {
		t.Errorf("engines called the client's host %d times", n)
	}
}

// /v1/messages has no parameter that prevents a first token from ending the
// text at prefill. The client then gets the same answer as from one engine, at
// once, and no engine is charged with a failure.
func TestMessagesEndAtOnce(t *testing.T) {
	const path = "/v1/messages"
	vllmConnectors(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{})
		for n := range 6 {
			stream := n%2 == 0
			body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"<eos1> %d"}],"max_tokens":5,"stream":%t}`, n, stream)
			got, want := f.try(path, body), f.post(context.Background(), f.alone.URL(), path, body)
			if got.status != 200 || got.err != nil || got.errors > 0 || got.done != stream || got.text != want.text || !strings.Contains(got.body, `"stop_reason":"end_turn"`) {
				t.Errorf("got status %d, %d error events, done %v, err %v: %s", got.status, got.errors, got.done, got.err, got.body)
			}
			if strings.Contains(got.body, "remote_") {
				t.Errorf("the answer shows the transfer: %s", got.body)
			}
		}
		if n := f.metric("pdproxy_retries_total"); n != 0 {
			t.Errorf("got %v retries", n)
		}
	})
}
