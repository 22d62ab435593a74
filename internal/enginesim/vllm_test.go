package enginesim

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/vllm"
)

// pair is a prefill and a decode engine and a third that does both.
type pair struct{ p, d, both *Engine }

func startPair(t *testing.T, change ...func(*Config)) pair {
	t.Helper()
	start := func(role string) *Engine {
		cfg := Config{Connector: ConnectorVLLMNixl, Role: role, KVBlocks: 256}
		for _, c := range change {
			c(&cfg)
		}
		return startEngine(t, cfg)
	}
	return pair{p: start(RolePrefill), d: start(RoleDecode), both: start(RoleBoth)}
}

// prefill sends a prefill leg and returns the raw kv_transfer_params.
func (pd pair) prefill(t *testing.T, prompt string) string {
	t.Helper()
	a := post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,"stream":false,`+prefillParams))
	if a.status != http.StatusOK {
		t.Fatalf("prefill: %d %s", a.status, a.body)
	}
	return a.params(t)
}

// decode sends a decode leg with raw kv_transfer_params.
func (pd pair) decode(t *testing.T, prompt, params string) answer {
	t.Helper()
	return post(t, pd.d.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12,"kv_transfer_params":`+params))
}

// direct returns the answer of one engine that does both phases.
func (pd pair) direct(t *testing.T, prompt string) answer {
	t.Helper()
	return post(t, pd.both.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12`))
}

func TestPullEqualsDirect(t *testing.T) {
	pd := startPair(t)
	for _, n := range []int{1, 2, 15, 16, 17, 31, 32, 33, 200} {
		t.Run(fmt.Sprint(n, " tokens"), func(t *testing.T) {
			prompt := words(n, n)
			params := pd.prefill(t, prompt)
			if s := pd.p.State(); s.BlocksPinned != (n+15)/16 {
				t.Errorf("pinned %d blocks", s.BlocksPinned)
			}
			got := pd.decode(t, prompt, params)
			if want := pd.direct(t, prompt).text(t); got.text(t) != want {
				t.Errorf("got text %q, want %q as without the proxy", got.text(t), want)
			}
			// Usage reports the prefill's own prefix hit.
			if cached := got.field(t, "usage", "prompt_tokens_details", "cached_tokens"); fmt.Sprint(cached) != "0" {
				t.Errorf("cached_tokens %v", cached)
			}
			if s := pd.p.State(); s.BlocksUsed != 0 {
				t.Errorf("state after the read: %+v", s)
			}
		})
	}
	if p, d := pd.p.State(), pd.d.State(); p.Transfers != 9 || d.Transfers != 9 || p.StaleReads != 0 || d.Errors != 0 {
		t.Errorf("prefill %+v, decode %+v", p, d)
	}
}

func TestPullEqualsDirectChatStream(t *testing.T) {
	pd := startPair(t)
	body := `{"model":"sim","messages":[{"role":"system","content":"be kind"},{"role":"user","content":[{"type":"text","text":"grüße 世界"},{"type":"image_url","image_url":{"url":"data:x"}}]}],"max_completion_tokens":9,"seed":7%s}`
	a := post(t, pd.p.URL()+core.RouteChat, fmt.Sprintf(strings.Replace(body, ":9", ":1", 1), ","+prefillParams))
	got := stream(t, pd.d.URL()+core.RouteChat, fmt.Sprintf(body, `,"stream":true,"kv_transfer_params":`+a.params(t)))
	want := post(t, pd.both.URL()+core.RouteChat, fmt.Sprintf(body, ""))
	if text := chatStreamText(t, got); text != want.text(t) {
		t.Errorf("got text %q, want %q as without the proxy", text, want.text(t))
	}
	if s := pd.d.State(); s.Transfers != 1 {
		t.Errorf("decode %+v", s)
	}
}

func chatStreamText(t *testing.T, events []string) string {
	t.Helper()
	var text strings.Builder
	for _, event := range events {
		var v struct {
			Choices []struct {
				Delta struct{ Content string }
				Text  string
			}
			Error any
		}
		if event == "[DONE]" {
			return text.String()
		}
		if err := json.Unmarshal([]byte(event), &v); err != nil || v.Error != nil {
			t.Fatalf("event %s: %v", event, err)
		}
		for _, c := range v.Choices {
			text.WriteString(c.Delta.Content + c.Text)
		}
	}
	t.Error("no [DONE]")
	return ""
}

// TestPrefillAnswer checks the values of a prefill's transfer parameters.
func TestPrefillAnswer(t *testing.T) {
	pd := startPair(t)
	a := post(t, pd.p.URL()+core.RouteChat, `{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":1,`+prefillParams+`}`, "X-Request-Id", "abc-1")
	shape := regexp.MustCompile(`,"kv_transfer_params":\{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":\[\[\d+\]\],` +
		`"remote_engine_id":"[0-9a-f-]{36}","remote_request_id":"chatcmpl-abc-1-[0-9a-f]{8}","remote_host":"127\.0\.0\.1","remote_port":\d+,` +
		`"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":\d+,"remote_blocks_expiry_time":null,"transfer_mode":"pull",` +
		`"remote_prefill_cached_tokens":0,"remote_agent_epoch":[4-9]\d{18},.*\},"ec_transfer_params":null,"metrics":null\}$`)
	if !shape.Match(a.body) {
		t.Errorf("answer %s", a.body)
	}
}

// TestWrongBlocks: the answer is always 200, and right only with the right KV.
func TestWrongBlocks(t *testing.T) {
	edit := func(old, new string) func(string) string {
		re := regexp.MustCompile(old)
		return func(params string) string { return re.ReplaceAllString(params, new) }
	}
	tests := []struct {
		name  string
		edit  func(string) string
		right bool
	}{
		{"verbatim", func(s string) string { return s }, true},
		{"keys reordered", func(s string) string {
			var m map[string]json.RawMessage
			json.Unmarshal([]byte(s), &m)
			out, _ := json.Marshal(m)
			return string(out)
		}, true},
		{"flat list of blocks", edit(`\[\[([^]]*)\]\]`, `[$1]`), true},
		{"last block missing", edit(`,\d+\]\]`, `]]`), false},
		{"first block missing", edit(`\[\[\d+,`, `[[`), false},
		{"two blocks swapped", edit(`\[\[(\d+),(\d+),`, `[[$2,$1,`), false},
		{"a block of nobody", edit(`\[\[\d+,`, `[[200,`), false},
		{"another request's id", edit(`("remote_request_id":"[^"]*)-[0-9a-f]{8}"`, `$1-00000000"`), false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			pd := startPair(t, func(c *Config) { c.Lease = time.Hour })
			prompt := words(3, 50)
			params := tt.edit(pd.prefill(t, prompt))
			if strings.Contains(tt.name, "another request") {
				// The two keys for future fields belong to the id, so the test
				// replaces them together.
				id := regexp.MustCompile(`"remote_request_id":"([^"]*)"`).FindStringSubmatch(params)[1]
				tag, _ := json.Marshal(vllm.TagOf(id))
				params = edit(`"remote_agent_epoch":\d+,"remote_agent_tag":"(\\.|[^"\\])*"`,
					fmt.Sprintf(`"remote_agent_epoch":%s,"remote_agent_tag":%s`, vllm.EpochOf(pd.p, id), strings.ReplaceAll(string(tag), "$", "$$")))(params)
			}
			got, want := pd.decode(t, prompt, params).text(t), pd.direct(t, prompt).text(t)
			if (got == want) != tt.right {
				t.Errorf("got text %q, want %q as without the proxy", got, want)
			}
		})
	}
}

// TestParamsMustComeBack: if a proxy changes values, the load fails.
func TestParamsMustComeBack(t *testing.T) {
	tests := []struct{ name, old, new string }{
		{"a 64-bit integer through float64", `"remote_agent_epoch":(\d{18})\d+`, `"remote_agent_epoch":${1}00`},
		{"a future key dropped", `"remote_agent_epoch":\d+,`, ``},
		{"a string rewritten", `é`, `e`},
		{"another engine id", `"remote_engine_id":"[^"]*"`, `"remote_engine_id":"5f1e6d00-0000-4000-8000-000000000000"`},
		{"a port where nobody listens", `"remote_port":\d+`, `"remote_port":1`},
		{"a block outside the cache", `\[\[\d+,`, `[[99999,`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			pd := startPair(t, func(c *Config) { c.HandshakeTimeout = 50 * time.Millisecond })
			prompt := words(4, 40)
			params := pd.prefill(t, prompt)
			changed := regexp.MustCompile(tt.old).ReplaceAllString(params, tt.new)
			if changed == params {
				t.Fatal("the replacement changed nothing in ", params)
			}
			unary := pd.decode(t, prompt, changed)
			if unary.status != 500 || string(unary.body) != `{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}` {
				t.Errorf("unary: %d %s", unary.status, unary.body)
			}
			events := stream(t, pd.d.URL()+core.RouteCompletions, completion(prompt, `"stream":true,"kv_transfer_params":`+changed))
			if len(events) != 2 || events[0] != `{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}` || events[1] != "[DONE]" {
				t.Errorf("stream: %q", events)
			}
			if s := pd.d.State(); s.Errors != 2 || s.BlocksUsed != 0 {
				t.Errorf("decode %+v", s)
			}
		})
	}
}

// TestHarmlessParams: parameters that a real decode engine does not need have
// no effect.
func TestHarmlessParams(t *testing.T) {
	pd := startPair(t)
	prompt := words(5, 40)
	for name, params := range map[string]string{
		"empty":                "{}",
		"port as a string":     regexp.MustCompile(`"remote_port":(\d+)`).ReplaceAllString(pd.prefill(t, prompt), `"remote_port":"$1"`),
		"no tp_size, no count": regexp.MustCompile(`"(tp_size|remote_num_tokens)":\d+,`).ReplaceAllString(pd.prefill(t, prompt), ``),
	} {
		if got, want := pd.decode(t, prompt, params).text(t), pd.direct(t, prompt).text(t); got != want {
			t.Errorf("%s: text %q, direct %q", name, got, want)
		}
	}
}

// TestForgedParamsKill: parameters that no prefill engine sends end a real
// decode engine.
func TestForgedParamsKill(t *testing.T) {
	without := func(key string) string {
		all := `{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}`
		return regexp.MustCompile(`"`+key+`":("[^"]*"|\d+|\[\[1\]\]),?`).ReplaceAllString(all, `"x":1,`)
	}
	tests := []struct {
		name, body string
		status     int // 0: the request hangs, and kills the engine when its client leaves
	}{
		{"no blocks", `"kv_transfer_params":` + without("remote_block_ids"), 500},
		{"empty group", `"kv_transfer_params":` + strings.Replace(without("x"), "[[1]]", "[[]]", 1), 500},
		{"no engine id", `"kv_transfer_params":` + without("remote_engine_id"), 0},
		{"no request id", `"kv_transfer_params":` + without("remote_request_id"), 0},
		{"no host", `"kv_transfer_params":` + without("remote_host"), 0},
		{"rejected without keys", `"model":"nobody","kv_transfer_params":{"do_remote_prefill":true}`, 404},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := startEngine(t, Config{Connector: ConnectorVLLMNixl, Role: RoleDecode})
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			if tt.status == 0 {
				go func() {
					eventually(t, "a hanging request", func() bool { return e.State().RequestsWaiting == 1 })
					leave()
				}()
			}
			a, err := try(ctx, e.URL()+core.RouteCompletions, completion("x", tt.body))
			if a.status != tt.status || (err != nil) != (tt.status == 0) {
				t.Errorf("try = %d, %s, %v", a.status, a.body, err)
			}
			<-e.Died()
		})
	}
}

func TestParamsOnlyOnUnaryPrefill(t *testing.T) {
	pd := startPair(t)
	tests := []struct {
		name, extra string
		params      bool
	}{
		{"length", `"max_tokens":1,` + prefillParams, true},
		{"first token ends the answer", `"max_tokens":1,"prompt":"<eos1>",` + prefillParams, true},
		{"no transfer asked", `"max_tokens":1`, false},
		{"null parameters", `"max_tokens":1,"kv_transfer_params":null`, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := post(t, pd.p.URL()+core.RouteCompletions, completion(words(6, 20), tt.extra))
			if got := a.params(t) != "null"; got != tt.params {
				t.Errorf("kv_transfer_params %s", a.params(t))
			}
		})
	}
	for _, event := range stream(t, pd.p.URL()+core.RouteCompletions, completion(words(6, 20), `"max_tokens":1,"stream":true,`+prefillParams)) {
		if strings.Contains(event, "kv_transfer_params") {
			t.Errorf("stream carries parameters: %s", event)
		}
	}
}

func TestEOSFirst(t *testing.T) {
	pd := startPair(t)
	prompt := words(7, 20) + " <eos1>"
	params := pd.prefill(t, prompt)
	a := pd.decode(t, prompt, params)
	if a.text(t) != "" || a.field(t, "choices", 0, "finish_reason") != "stop" || fmt.Sprint(a.field(t, "usage", "completion_tokens")) != "1" {
		t.Errorf("answer %s", a.body)
	}
	a = post(t, pd.both.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":5,"ignore_eos":true`))
	if a.field(t, "choices", 0, "finish_reason") != "length" || a.text(t) == "" {
		t.Errorf("ignore_eos: %s", a.body)
	}
	a = post(t, pd.both.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":5,"min_tokens":3`))
	if a.field(t, "choices", 0, "finish_reason") != "length" {
		t.Errorf("min_tokens: %s", a.body)
	}
}

// TestLocalHit: with a prefix hit on decode only the tail is read, and the
// prefill's blocks are freed anyway.
func TestLocalHit(t *testing.T) {
	pd := startPair(t)
	prompt := words(8, 64)
	for range 2 {
		if got, want := pd.decode(t, prompt, pd.prefill(t, prompt)).text(t), pd.direct(t, prompt).text(t); got != want {
			t.Errorf("got text %q, want %q as without the proxy", got, want)
		}
	}
	longer := prompt + words(9, 30)
	if got, want := pd.decode(t, longer, pd.prefill(t, longer)).text(t), pd.direct(t, longer).text(t); got != want {
		t.Errorf("longer prompt: text %q, direct %q", got, want)
	}
	if s := pd.p.State(); s.BlocksUsed != 0 || s.CachedTokens != 48+64 {
		t.Errorf("prefill %+v", s)
	}
	if got := pd.d.Stats.ExternalTokens.Load(); got != 63+15+29 { // the last token is computed again
		t.Errorf("received %d tokens", got)
	}
}

// TestPromptMismatch: other tokens on the two legs give a wrong answer, not an
// error.
func TestPromptMismatch(t *testing.T) {
	pd := startPair(t)
	prompt := words(10, 40)
	params := pd.prefill(t, words(11, 40))
	if got, want := pd.decode(t, prompt, params).text(t), pd.direct(t, prompt).text(t); got == want {
		t.Errorf("the text %q is right, although its KV is wrong", got)
	}
}

func TestLeaseExpiry(t *testing.T) {
	pd := startPair(t, func(c *Config) { c.Lease = 20 * time.Millisecond })
	prompt := words(12, 40)
	params := pd.prefill(t, prompt)
	eventually(t, "the lease's end", func() bool { return pd.p.State().LeasesExpired == 1 })
	if s := pd.p.State(); s.BlocksUsed != 0 {
		t.Errorf("prefill %+v", s)
	}
	if got, want := pd.decode(t, prompt, params).text(t), pd.direct(t, prompt).text(t); got == want {
		t.Errorf("the text %q is right, although its KV was freed", got)
	}
	if s := pd.p.State(); s.StaleReads != 1 {
		t.Errorf("prefill %+v", s)
	}
}

// TestSingleUse: the blocks are freed after the first read.
func TestSingleUse(t *testing.T) {
	pd := startPair(t)
	prompt := words(13, 40)
	params := pd.prefill(t, prompt)
	pd.decode(t, prompt, params)
	other := startEngine(t, Config{Connector: ConnectorVLLMNixl, Role: RoleDecode})
	again := pair{d: other}.decode(t, prompt, params)
	if got, want := again.text(t), pd.direct(t, prompt).text(t); got == want {
		t.Errorf("the text %q is right, although its KV was freed", got)
	}
}

// TestSamplesOfOnePrefill: n > 1 on the prefill leaks all sets but one, n > 1 on
// decode reads freed memory after the first sample.
func TestSamplesOfOnePrefill(t *testing.T) {
	pd := startPair(t, func(c *Config) { c.Lease = time.Hour })
	prompt := words(14, 40)
	a := post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,"n":3,`+prefillParams))
	pd.decode(t, prompt, a.params(t))
	if got := len(pd.p.Ranks[0].Cache.Pins); got != 2 {
		t.Errorf("%d pinned sets remain", got)
	}
	params := pd.prefill(t, words(15, 40))
	post(t, pd.d.URL()+core.RouteCompletions, completion(words(15, 40), `"max_tokens":4,"n":2,"kv_transfer_params":`+params))
	if s := pd.p.State(); s.StaleReads != 1 {
		t.Errorf("prefill %+v", s)
	}
}

func TestPrefillRestarted(t *testing.T) {
	port := testbed.Ports(t, 1)
	pd := startPair(t, func(c *Config) {
		if c.Role == RolePrefill {
			c.Listen, c.SideChannelPort = testbed.FreeAddr(t), port
		}
	})
	prompt := words(16, 40)
	params := pd.prefill(t, prompt)
	addr := pd.p.Addr()
	pd.p.Kill()
	pd.p.Close()
	reborn := startEngine(t, Config{Connector: ConnectorVLLMNixl, Role: RolePrefill, Listen: addr, SideChannelPort: port})
	if a := pd.decode(t, prompt, params); a.status != 500 {
		t.Errorf("answer %d %s", a.status, a.body)
	}
	pd.p = reborn
	if got, want := pd.decode(t, prompt, pd.prefill(t, prompt)).text(t), pd.direct(t, prompt).text(t); got != want {
		t.Errorf("after the restart: text %q, text of one engine %q", got, want)
	}
}

func TestRanks(t *testing.T) {
	pd := startPair(t, func(c *Config) { c.Ranks = 2 })
	prompt := words(24, 40)
	a := post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,`+prefillParams), "X-data-parallel-rank", "1")
	_, port := pd.p.Ranks[1].Side.HostPort()
	if got := fmt.Sprint(a.field(t, "kv_transfer_params", "remote_port")); got != fmt.Sprint(port) {
		t.Errorf("remote_port %s, rank 1 has %d", got, port)
	}
	if got, want := pd.decode(t, prompt, a.params(t)).text(t), pd.direct(t, prompt).text(t); got != want {
		t.Errorf("got text %q, want %q as without the proxy", got, want)
	}
	for header, status := range map[string]int{"2": 400, "-1": 400, "one": 200, "0": 200} {
		if a := post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, ""), "X-Data-Parallel-Rank", header); a.status != status {
			t.Errorf("rank %s: %d %s", header, a.status, a.body)
		}
	}
	if s := pd.p.State(); s.BlocksTotal != 512 {
		t.Errorf("state %+v", s)
	}
}

// TestParamsOfARealEngine: by default kv_transfer_params have only members of vLLM, and a
// relay that decodes and encodes them again as float64 does no harm.
func TestParamsOfARealEngine(t *testing.T) {
	start := func(role string) *Engine {
		return startAsConfigured(t, Config{Connector: ConnectorVLLMNixl, Role: role, KVBlocks: 256, Lease: time.Hour})
	}
	pd := pair{p: start(RolePrefill), d: start(RoleDecode), both: start(RoleBoth)}
	prompt := words(3, 50)
	params := pd.prefill(t, prompt)
	var decoded map[string]any
	if err := json.Unmarshal([]byte(params), &decoded); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"remote_agent_epoch", "remote_agent_tag", "remote_regions"} {
		if _, found := decoded[name]; found {
			t.Errorf("kv_transfer_params contain %s: %s", name, params)
		}
	}
	encoded, err := json.Marshal(decoded)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := pd.decode(t, prompt, string(encoded)).text(t), pd.direct(t, prompt).text(t); got != want {
		t.Errorf("got text %q, want %q as from one engine", got, want)
	}
}
