package security

import (
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// foreignHost is where the attacks of this file try to send an engine.
const foreignHost = "10.6.6.6"

// injectedFields are header fields that must not reach an engine as they are. An
// accepted request is no fault if nothing of the field arrives in another form.
var injectedFields = [][]string{
	{}, // control
	{"x-a", "b\r\nX-Data-Parallel-Rank: 7"}, {"x-a", "b\nX-Injected: y"}, {"x-a", "b\x00c"}, {"x-a", "b\rc"},
	{"x a", "b"}, {"x:a", "b"}, {"x\r\ny", "b"}, {"X-A", "b"}, {"X-Data-Parallel-Rank", "7"}, {"x-data-parallel-rank", "7"},
	{"", "b"}, {"transfer-encoding", "chunked"}, {"connection", "x-a"}, {"upgrade", "h2c"}, {"te", "gzip"}, {"keep-alive", "1"},
	{"proxy-connection", "close"}, {"content-length", "5"}, {"content-length", "500"}, {"content-length", "73", "content-length", "74"},
	{"content-length", "73x"}, {"host", "evil"}, {"cookie", "a=1", "cookie", "b=2"}, {"x-a", "b", ":path", "/x"}, {":evil", "x"},
	{":status", "200"}, {"x-a", "\xff\xfe"}, {"x-a", "a\tb"}, {"x-a", " b"}, {"x-a", "a\x7fb"}, {"x_data_parallel_rank", "7"},
	{"x-request-id", "a\tb"}, {"trailer", "x-data-parallel-rank"}, {"expect", "100-continue"},
}

// injectedHeads are whole heads with wrong pseudo-header fields.
var injectedHeads = [][]string{
	{":method", "POST", ":scheme", "http", ":path", chatPath, ":path", "/x", ":authority", "x"},
	{":method", "POST", ":scheme", "http", ":path", chatPath + "\r\nX-Injected: y", ":authority", "x"},
	{":method", "POST", ":scheme", "http", ":path", chatPath + " HTTP/1.1", ":authority", "x"},
	{":method", "POST", ":scheme", "http", ":path", "http://evil" + chatPath, ":authority", "x"},
	{":method", "POST", ":scheme", "http", ":path", "", ":authority", "x"},
	{":method", "OPTIONS", ":scheme", "http", ":path", "*", ":authority", "x"},
	{":method", "POST /x", ":scheme", "http", ":path", chatPath, ":authority", "x"},
	{":method", "POST\r\n", ":scheme", "http", ":path", chatPath, ":authority", "x"},
	{":scheme", "http", ":path", chatPath, ":authority", "x"},
	{":method", "POST", ":path", chatPath, ":authority", "x"},
	{":method", "CONNECT", ":authority", "127.0.0.1:80"},
	{":method", "CONNECT", ":protocol", "websocket", ":scheme", "http", ":path", chatPath, ":authority", "x"},
	{":method", "POST", ":scheme", "http", ":path", chatPath, ":authority", "x\r\nX-Injected: y"},
	{":method", "POST", ":scheme", "http", ":path", chatPath, ":authority", "u@x"},
	{":method", "POST", ":scheme", "http", ":path", chatPath + "/../completions", ":authority", "x"},
}

// TestHeaderInjection sends every head over HTTP/2 without and with TLS, and HTTP/3.
func TestHeaderInjection(t *testing.T) {
	t.Parallel()
	var heads [][]string
	for _, extra := range injectedFields {
		heads = append(heads, post2(extra...))
	}
	heads = append(heads, injectedHeads...)
	for _, secure := range []bool{false, true} {
		e := newFakeEngine(t)
		p := startProxy(t, setup{secure: secure, sections: e.section("both", "vllm-nixl")})
		for _, major := range p.majors()[1:] {
			a := p.attacker()
			ask := a.ask2
			if major == 3 {
				ask = a.ask3
			}
			testbed.Parallel(len(heads), 8, func(n int) {
				marker := fmt.Sprintf("inject-%d-%d-", major, n)
				outcome, err := ask(chat(marker, false), heads[n]...)
				if err != nil || n == 0 && outcome != "200" {
					t.Errorf("HTTP/%d %q: %s %v", major, heads[n], outcome, err)
				}
				seen := e.with(marker)
				if len(seen) > 1 || len(seen) == 1 && outcome != "200" {
					t.Errorf("HTTP/%d %q: %d requests at the engine for the outcome %s", major, heads[n], len(seen), outcome)
				}
				for _, r := range seen {
					wellFramed(t, fmt.Sprintf("HTTP/%d %q", major, heads[n]), r)
					if r.line != "POST "+chatPath+" HTTP/1.1" || len(r.values("X-Injected")) > 0 {
						t.Errorf("HTTP/%d %q: the engine received %q %q", major, heads[n], r.line, r.header)
					}
				}
			})
		}
		p.serves("after header injection")
		p.nothingLeft()
	}
}

// TestPDHeaderLines sends the headers that direct transfers, in several
// spellings, together with one that must arrive.
func TestPDHeaderLines(t *testing.T) {
	t.Parallel()
	e := newFakeEngine(t)
	p := startProxy(t, setup{sections: e.section("both", "vllm-nixl")})
	names := []string{
		"X-Data-Parallel-Rank", "x-data-parallel-rank", "X-DATA-PARALLEL-RANK", "X_Data_Parallel_Rank", "x-override-rid",
		"X-Override-Bootstrap-Room", "X-TRTLLM-Anything", "x-prefiller-host-port", "x-kv-cache-source-host",
	}
	c := p.client(1, "127.0.0.1")
	defer c.close()
	for _, name := range names {
		if _, err := c.post(chatPath, chat("pd-line", false), name, "7", "X-Harmless", "1"); err != nil {
			t.Errorf("%s: c.post = %v, want nil", name, err)
		}
		for _, r := range e.take("pd-line") {
			if v := r.values(name); len(v) > 0 {
				t.Errorf("the engine received %s: %q", name, v)
			}
			if len(r.values("X-Harmless")) != 1 {
				t.Errorf("%s: the engine did not receive X-Harmless", name)
			}
		}
	}
}

// TestContentEncoding sends bodies whose headers declare compression. The
// engine must not get such a header with a plain body.
func TestContentEncoding(t *testing.T) {
	t.Parallel()
	e := newFakeEngine(t)
	p := startProxy(t, setup{sections: e.section("both", "vllm-nixl")})
	for _, encoding := range []string{"gzip", "deflate", "br", "zstd", "identity", "gzip, gzip", "GZIP"} {
		c := p.client(1, "127.0.0.1")
		_, err := c.post(chatPath, chat("encoded", false), "Content-Encoding", encoding)
		seen := e.take("encoded")
		for _, r := range seen {
			if v := r.values("Content-Encoding"); len(v) > 0 {
				t.Errorf("Content-Encoding %s: the engine received %q with a plain body", encoding, v)
			}
		}
		if err == nil && len(seen) != 1 {
			t.Errorf("Content-Encoding %s: %d requests at the engine", encoding, len(seen))
		}
		c.close()
	}
	p.serves("after encoded bodies")
	p.nothingLeft()
}

// pull are transfer parameters that send an engine to a foreign host.
func pull(host string, port int) map[string]any {
	return map[string]any{
		"do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "victim", "remote_block_ids": [][]int{{1, 2}},
		"remote_host": host, "remote_port": port, "tp_size": 1, "remote_request_id": "of-another-client", "remote_num_tokens": 32,
	}
}

// padded adds n harmless members to an object.
func padded(n int, members map[string]any) map[string]any {
	all := map[string]any{}
	for i := range n {
		all[fmt.Sprintf("a%06d", i)] = i // before the others in the order of names
	}
	for name, v := range members {
		all[name] = v
	}
	return all
}

// carrier puts transfer parameters somewhere into a request body.
type carrier struct {
	name string
	into func(body map[string]any, pad int, params any)
	only string // the one route whose engines read them there; "" = all
}

var carriers = []carrier{
	{"top level", func(b map[string]any, _ int, v any) { b["kv_transfer_params"] = v }, ""},
	{"vllm_xargs", func(b map[string]any, pad int, v any) {
		b["vllm_xargs"] = padded(pad, map[string]any{"kv_transfer_params": v})
	}, ""},
	{"vllm_xargs, ec", func(b map[string]any, pad int, v any) {
		b["vllm_xargs"] = padded(pad, map[string]any{"ec_transfer_params": v})
	}, ""},
	{"extra_args", func(b map[string]any, pad int, v any) {
		b["sampling_params"] = map[string]any{"max_tokens": 3, "extra_args": padded(pad, map[string]any{"kv_transfer_params": v})}
	}, "/inference/v1/generate"},
	{"padded sampling_params", func(b map[string]any, pad int, v any) {
		b["sampling_params"] = padded(pad, map[string]any{"max_tokens": 3, "extra_args": map[string]any{"kv_transfer_params": v}})
	}, "/inference/v1/generate"},
	{"bootstrap", func(b map[string]any, pad int, v any) {
		b["bootstrap_host"], b["bootstrap_port"], b["bootstrap_room"] = foreignHost, 1, 2
	}, ""},
	{"disaggregated_params", func(b map[string]any, _ int, v any) { b["disaggregated_params"] = v }, ""},
}

// apis are the routes with a body that each accepts.
func apis() map[string]map[string]any {
	messages := []map[string]any{{"role": "user", "content": "smuggle"}}
	return map[string]map[string]any{
		chatPath:                 {"model": "sim", "messages": messages, "max_tokens": 3},
		"/v1/completions":        {"model": "sim", "prompt": "smuggle", "max_tokens": 3},
		"/v1/responses":          {"model": "sim", "input": "smuggle", "max_output_tokens": 3},
		"/v1/messages":           {"model": "sim", "messages": messages, "max_tokens": 3},
		"/inference/v1/generate": {"model": "sim", "token_ids": []int{1, 2, 3}, "sampling_params": map[string]any{"max_tokens": 3}},
		"/generate":              {"model": "sim", "text": "smuggle", "sampling_params": map[string]any{"max_new_tokens": 3}},
	}
}

// smuggles are the ways to write one body.
func smuggles(path string, c carrier, pad int, change map[string]any) string {
	body := apis()[path]
	c.into(body, pad, pull(foreignHost, 5600))
	for name, v := range change {
		body[name] = v
	}
	text, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// TestTransferParameters tries to smuggle transfer parameters past the proxy:
// on every route, in every object that may contain them, among few and many
// members, in requests that one engine serves and in requests that two serve.
func TestTransferParameters(t *testing.T) {
	t.Parallel()
	for _, deployment := range []string{"vllm-nixl", "none", "pair"} {
		e := newFakeEngine(t)
		sections := e.section("both", deployment)
		if deployment == "pair" {
			sections = e.section("prefill", "vllm-nixl") + strings.Replace(e.section("decode", "vllm-nixl"), "decode-", "d-", 1) + "[retry]\nattempts = 1\n"
		}
		p := startProxy(t, setup{sections: sections})
		c := p.client(1, "127.0.0.1")
		tried, served := 0, 0
		for path := range apis() {
			for _, carry := range carriers {
				if carry.only != "" && carry.only != path {
					continue
				}
				var through []string
				for _, pad := range []int{0, 4094, 4096, 70000} {
					for _, change := range []map[string]any{nil, {"n": 2}, {"prompt_logprobs": 1}} {
						if pad == 70000 && change != nil {
							continue
						}
						tried++
						if _, err := c.post(path, smuggles(path, carry, pad, change)); err == nil {
							served++
						}
						for _, r := range e.take("") {
							if strings.Contains(r.body, foreignHost) {
								through = append(through, fmt.Sprint(pad, " members, ", change))
							}
						}
					}
				}
				if through != nil {
					t.Errorf("%s %s, %s: the engine received the client's parameters with %q", deployment, path, carry.name, through)
				}
			}
		}
		c.close()
		if served == 0 && deployment != "pair" { // the fake prefill gives no parameters
			t.Errorf("%s: none of %d requests was served", deployment, tried)
		}
		if deployment != "pair" {
			p.serves("after " + deployment)
		}
		p.nothingLeft()
	}
}

// TestSpellings writes the members in other forms that a JSON parser reads as
// the same.
func TestSpellings(t *testing.T) {
	t.Parallel()
	e := newFakeEngine(t)
	p := startProxy(t, setup{sections: e.section("both", "vllm-nixl")})
	c := p.client(1, "127.0.0.1")
	defer c.close()
	value := `{"do_remote_prefill":true,"remote_host":"` + foreignHost + `"}`
	deep := strings.Repeat(`{"a":`, 200)
	for _, member := range []string{
		`"kv_transfer_params":` + value, `"kv\u005ftransfer_params":` + value, `"\u006bv_transfer_params":` + value,
		`"kv_transfer_params":1,"kv_transfer_params":` + value, `"kv_transfer_params" : ` + value, "\"kv_transfer_params\"\t:\r\n" + value,
		`"vllm_xargs":{},"vllm_xargs":{"kv_transfer_params":` + value + `}`,
		`"vllm\u005fxargs":{"kv\u005ftransfer\u005fparams":` + value + `}`,
		`"vllm_xargs":{"kv_transfer_params":{},"kv_transfer_params":` + value + `}`,
		`"vllm_xargs":{"kv_transfer_params":"` + foreignHost + `"}`,
		`"vllm_xargs":{"z":` + deep + `1` + strings.Repeat("}", 200) + `,"kv_transfer_params":` + value + `}`,
		`"kv_transfer_params":[` + value + `]`, `"ec_transfer_params":{"x":` + value + `}`,
	} {
		body := `{"model":"sim",` + member + `,"messages":[{"role":"user","content":"spell"}],"max_tokens":3}`
		_, err := c.post(chatPath, body) // 200 without the member, or an error: both are right
		for _, r := range e.take("") {
			if strings.Contains(r.body, foreignHost) {
				t.Errorf("%.80s (%v): the engine received %.300s", member, err, r.body)
			}
		}
	}
	for _, args := range []string{`"extra\u005fargs":{"kv_transfer_params":` + value + `}`, `"extra_args":{},"extra_args":{"kv\u005ftransfer_params":` + value + `}`} {
		_, err := c.post("/inference/v1/generate", `{"model":"sim","token_ids":[1,2],"sampling_params":{"max_tokens":3,`+args+`}}`)
		for _, r := range e.take("") {
			if strings.Contains(r.body, foreignHost) {
				t.Errorf("%.80s (%v): the engine received %.300s", args, err, r.body)
			}
		}
	}
	p.serves("after the spellings")
}

// TestEngineIsNotDirected is the same attack with the simulated engines: none may
// connect to the client's listener.
func TestEngineIsNotDirected(t *testing.T) {
	t.Parallel()
	w := newPair(t, setup{sections: "[retry]\nattempts = 1\n"})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	reached := make(chan string, 100)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.SetReadDeadline(time.Now().Add(2 * time.Second))
			b := make([]byte, 200)
			n, _ := c.Read(b)
			reached <- string(b[:n])
			c.Close()
		}
	}()
	params := pull("127.0.0.1", l.Addr().(*net.TCPAddr).Port)
	c := w.client(1, "127.0.0.1")
	defer c.close()
	for _, pad := range []int{0, 4096, 20000} {
		body, err := json.Marshal(map[string]any{"model": "sim", "token_ids": slices.Repeat([]int{5}, 40),
			"sampling_params": map[string]any{"n": 2, "max_tokens": 3, "extra_args": padded(pad, map[string]any{"kv_transfer_params": params})}})
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.post("/inference/v1/generate", string(body))
		select {
		case said := <-reached:
			t.Errorf("%d members: an engine connected to the client's host and sent %q (the client got: %v)", pad, said, err)
		case <-time.After(300 * time.Millisecond): // an engine connects before it answers
		}
	}
	w.serves("after the parameters")
	w.nothingLeft()
}

// pair is a proxy with simulated engines for prefill and decode.
type pair struct {
	*proxyProcess
	engines []*enginesim.Engine
}

// newPair starts a pair. It uses the keys of the setup.
func newPair(t *testing.T, s setup) *pair {
	t.Helper()
	w := &pair{}
	for _, role := range []string{enginesim.RolePrefill, enginesim.RoleDecode} {
		e, err := enginesim.New(enginesim.Config{Connector: enginesim.ConnectorVLLMNixl, Role: role, DecodeUsPerToken: 200})
		if err == nil {
			err = e.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Close() })
		w.engines = append(w.engines, e)
		s.sections += fmt.Sprintf("[[engine]]\nname = %q\nurl = %q\nrole = %q\nconnector = \"vllm-nixl\"\n", role, e.URL(), role)
	}
	w.proxyProcess = startProxy(t, s)
	return w
}

// nothingLeft asserts that neither the proxy nor an engine holds anything.
func (w *pair) nothingLeft() {
	w.t.Helper()
	w.proxyProcess.nothingLeft()
	for _, e := range w.engines {
		state := e.State()
		for end := time.Now().Add(patience); time.Now().Before(end) && (state.BlocksPinned > 0 || state.RequestsRunning > 0); state = e.State() {
			time.Sleep(20 * time.Millisecond)
		}
		if state.BlocksPinned > 0 || state.RequestsRunning > 0 {
			w.t.Errorf("an engine has %d blocks pinned and %d requests running", state.BlocksPinned, state.RequestsRunning)
		}
	}
}
