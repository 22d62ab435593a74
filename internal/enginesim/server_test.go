package enginesim

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// TestStreamEqualsUnary compares streams with unary answers, for stop strings,
// several prompts and samples.
func TestStreamEqualsUnary(t *testing.T) {
	e := startEngine(t, Config{})
	plain := post(t, e.URL()+core.RouteCompletions, completion("once upon", `"max_tokens":30`)).text(t)
	split := strings.Fields(plain)
	third := split[2]
	_, last := utf8.DecodeLastRuneInString(split[5])
	_, first := utf8.DecodeRuneInString(split[6])
	border := split[5][len(split[5])-last:] + " " + split[6][:first]
	tests := []struct {
		name, extra, finish string
	}{
		{"plain", `"max_tokens":30`, "length"},
		{"stop string", `"max_tokens":30,"stop":"` + third + `"`, "stop"},
		{"stop across tokens", `"max_tokens":30,"stop":["zzzzz","` + border + `"]`, "stop"},
		{"stop that never comes", `"max_tokens":30,"stop":["never and never"]`, "length"},
		{"min_tokens over a stop", `"max_tokens":30,"min_tokens":30,"stop":"` + third + `"`, "length"},
		{"end of sequence", `"max_tokens":30,"prompt":"x <eos4>"`, "stop"},
		{"stop token id", `"max_tokens":30,"stop_token_ids":[` + fmt.Sprint(core.WordTokens[" "+third]) + `]`, "stop"},
		{"three samples of two prompts", `"max_tokens":5,"n":3,"prompt":["a","b"]`, "length"},
		{"echo", `"max_tokens":3,"echo":true`, "length"},
		{"seed", `"max_tokens":3,"seed":12`, "length"},
		{"no limit in chat's way", `"max_tokens":null`, "length"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			whole := post(t, e.URL()+core.RouteCompletions, completion("once upon", tt.extra))
			type choice struct {
				Index  int
				Text   string
				Finish *string `json:"finish_reason"`
			}
			var want struct {
				Choices []choice
				Usage   struct {
					Output int `json:"completion_tokens"`
				}
			}
			if err := json.Unmarshal(whole.body, &want); err != nil || whole.status != 200 {
				t.Fatalf("%d %s", whole.status, whole.body)
			}
			texts, finishes := make([]string, len(want.Choices)), make([]string, len(want.Choices))
			for _, event := range stream(t, e.URL()+core.RouteCompletions, completion("once upon", tt.extra+`,"stream":true`)) {
				var v struct{ Choices []choice }
				if event == "[DONE]" {
					break
				}
				if err := json.Unmarshal([]byte(event), &v); err != nil || len(v.Choices) != 1 {
					t.Fatalf("event %s: %v", event, err)
				}
				c := v.Choices[0]
				if finishes[c.Index] != "" {
					t.Errorf("choice %d continues after its end", c.Index)
				}
				texts[c.Index] += c.Text
				if c.Finish != nil {
					finishes[c.Index] = *c.Finish
				}
			}
			for i, c := range want.Choices {
				if c.Index != i || c.Text != texts[i] || c.Finish == nil || *c.Finish != tt.finish || finishes[i] != tt.finish {
					t.Errorf("choice %d: %q %v, streamed %q %s", c.Index, c.Text, *c.Finish, texts[i], finishes[i])
				}
			}
			if slices.Sort(texts); len(texts) == 6 && len(slices.Compact(texts)) != 6 {
				t.Errorf("samples coincide: %q", texts)
			}
		})
	}
}

func TestChatWithoutLimit(t *testing.T) {
	e := startEngine(t, Config{})
	for _, content := range []string{"a", "b", "c"} {
		a := post(t, e.URL()+core.RouteChat, `{"messages":[{"role":"user","content":"`+content+`"}]}`)
		n, _ := a.field(t, "usage", "completion_tokens").(json.Number).Int64()
		if a.field(t, "choices", 0, "finish_reason") != "stop" || n < 48 || n > 111 {
			t.Errorf("answer %s", a.body)
		}
	}
}

// TestRefusals checks vLLM's answers to invalid bodies.
func TestRefusals(t *testing.T) {
	e := startEngine(t, Config{})
	tests := []struct {
		name, route, body string
		status            int
		kind, param       any
	}{
		{"no JSON", core.RouteChat, `{"model":`, 400, "Bad Request", "body.9"},
		{"a list", core.RouteChat, `[]`, 400, "Bad Request", "body"},
		{"null", core.RouteChat, `null`, 400, "Bad Request", "body"},
		{"no messages", core.RouteChat, `{}`, 400, "Bad Request", "body.messages"},
		{"messages a string", core.RouteChat, `{"messages":"hi"}`, 400, "Bad Request", "body.messages"},
		{"content a number", core.RouteChat, `{"messages":[{"role":"user","content":1}]}`, 400, "Bad Request", "body.messages"},
		{"no prompt", core.RouteCompletions, `{}`, 400, "BadRequestError", "prompt"},
		{"prompt an object", core.RouteCompletions, `{"prompt":{}}`, 400, "Bad Request", "body.prompt"},
		{"empty prompt", core.RouteCompletions, `{"prompt":""}`, 400, "BadRequestError", "prompt"},
		{"empty list", core.RouteCompletions, `{"prompt":[]}`, 400, "BadRequestError", "prompt"},
		{"unknown token", core.RouteCompletions, `{"prompt":[500]}`, 400, "BadRequestError", "prompt"},
		{"stream a word", core.RouteCompletions, `{"prompt":"x","stream":"maybe"}`, 400, "Bad Request", "body.stream"},
		{"fraction", core.RouteCompletions, `{"prompt":"x","max_tokens":1.5}`, 400, "Bad Request", "body.max_tokens"},
		{"temperature a word", core.RouteCompletions, `{"prompt":"x","temperature":"hot"}`, 400, "Bad Request", "body.temperature"},
		{"samples", core.RouteCompletions, `{"prompt":"x","n":100000}`, 400, "BadRequestError", "n"},
		{"temperature below 0", core.RouteCompletions, `{"prompt":"x","temperature":-1}`, 400, "BadRequestError", "temperature"},
		{"top_p over 1", core.RouteCompletions, `{"prompt":"x","top_p":1.5}`, 400, "BadRequestError", "top_p"},
		{"no tokens", core.RouteCompletions, `{"prompt":"x","max_tokens":0}`, 400, "BadRequestError", "max_tokens"},
		{"chat's own limit wins", core.RouteChat, `{"messages":[],"max_tokens":5,"max_completion_tokens":0}`, 400, "BadRequestError", "max_tokens"},
		{"stream options alone", core.RouteChat, `{"messages":[],"stream_options":{}}`, 400, "BadRequestError", "stream_options"},
		{"params a string", core.RouteChat, `{"messages":[],"kv_transfer_params":"x"}`, 400, "Bad Request", "body.kv_transfer_params"},
		{"other model", core.RouteChat, `{"model":"gpt","messages":[]}`, 404, "NotFoundError", "model"},
		{"too long", core.RouteCompletions, completion(words(1, 65537), ""), 400, "BadRequestError", "input_tokens"},
		{"no room for an answer", core.RouteCompletions, completion(words(1, 65536), ""), 400, "BadRequestError", "max_tokens"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := post(t, e.URL()+tt.route, tt.body)
			if a.status != tt.status || a.field(t, "error", "type") != tt.kind || a.field(t, "error", "param") != tt.param ||
				fmt.Sprint(a.field(t, "error", "code")) != fmt.Sprint(tt.status) || a.field(t, "error", "message") == "" {
				t.Errorf("post(e.URL()+tt.route, tt.body) = %d, %s", a.status, a.body)
			}
		})
	}
	if s := e.State(); s.Rejected != int64(len(tests)) || s.Requests != 0 {
		t.Errorf("state %+v", s)
	}
	for _, body := range []string{
		`{"prompt":"x","max_tokens":"2","stream":0,"n":1.0,"unknown":{"a":1},"top_k":-1,"logprobs":3,"user":"u"}`,
		`{"prompt":["x"],"max_tokens":1,"max_tokens":2}`,
		`{"prompt":"<eos2>","max_tokens":9223372036854775807}`,
		`{"prompt":[[1000,1001]],"max_tokens":2,"stop":null,"stream_options":null,"model":null}`,
	} {
		a := post(t, e.URL()+core.RouteCompletions, body)
		if a.status != 200 || fmt.Sprint(a.field(t, "usage", "completion_tokens")) != "2" {
			t.Errorf("%s: post(e.URL()+routeCompletions, body) = %d, %s", body, a.status, a.body)
		}
	}
}

func TestPromptForms(t *testing.T) {
	e := startEngine(t, Config{})
	text := "hello" + words(1, 20)
	ids, _ := json.Marshal(core.Tokenize(text))
	want := post(t, e.URL()+core.RouteCompletions, completion(text, "")).text(t)
	for name, prompt := range map[string]string{
		"token ids": string(ids), "list of token ids": "[" + string(ids) + "]", "list of strings": `["` + text + `"]`,
	} {
		if got := post(t, e.URL()+core.RouteCompletions, `{"prompt":`+prompt+`}`).text(t); got != want {
			t.Errorf("%s: text = %q, want %q", name, got, want)
		}
	}
	a := post(t, e.URL()+"/tokenize", `{"prompt":"`+text+`"}`)
	raw, _ := json.Marshal(a.field(t, "tokens"))
	if string(raw) != string(ids) {
		t.Errorf("tokenize: %s, want %s", a.body, ids)
	}
	if a := post(t, e.URL()+"/detokenize", `{"tokens":`+string(ids)+`}`); a.field(t, "prompt") != text {
		t.Errorf("detokenize: %s", a.body)
	}
	if a := post(t, e.URL()+"/tokenize", `{}`); a.status != 400 {
		t.Errorf("tokenize nothing: %d", a.status)
	}
}

// TestPrefixCache: the second turn of a conversation computes only its new
// tokens, another salt computes all, and the answers are equal.
func TestPrefixCache(t *testing.T) {
	e := startEngine(t, Config{})
	turn := func(salt string, messages ...string) answer {
		var list []string
		for i, m := range messages {
			raw, _ := json.Marshal(m)
			list = append(list, fmt.Sprintf(`{"role":%q,"content":%s}`, []string{"user", "assistant"}[i%2], raw))
		}
		return post(t, e.URL()+core.RouteChat, fmt.Sprintf(`{"messages":[%s],"max_tokens":40,"cache_salt":%q}`, strings.Join(list, ","), salt))
	}
	question := words(1, 60)
	first := turn("", question)
	tokens := len(core.Tokenize("<|user|>"+question+"\n<|assistant|>")) + 39 // the last token's KV is not computed
	second := turn("", question, first.text(t), "and then?")
	if got, want := fmt.Sprint(second.field(t, "usage", "prompt_tokens_details", "cached_tokens")), fmt.Sprint(tokens/16*16); got != want {
		t.Errorf("second turn: %s tokens cached, want %s", got, want)
	}
	salted := turn("pepper", question, first.text(t), "and then?")
	if got := fmt.Sprint(salted.field(t, "usage", "prompt_tokens_details", "cached_tokens")); got != "0" {
		t.Errorf("%s cached tokens with another salt", got)
	}
	if salted.text(t) != second.text(t) {
		t.Error("the cache changed the answer")
	}
}

// TestLeaving: the engine notices at every stage over HTTP that a client has left.
func TestLeaving(t *testing.T) {
	tests := []struct {
		name   string
		cfg    Config
		unary  bool
		reason func(State) bool
	}{
		{"waiting", Config{MaxRunning: 1, Hang: core.HangDecode}, false, func(s State) bool { return s.RequestsWaiting == 1 }},
		{"waiting, unary", Config{MaxRunning: 1, Hang: core.HangDecode}, true, func(s State) bool { return s.RequestsWaiting == 1 }},
		{"prefill, unary", Config{PrefillUsPerToken: 1e7}, true, func(s State) bool { return s.RequestsRunning == 2 }},
		{"decode", Config{DecodeUsPerToken: 1000}, false, func(s State) bool { return s.RequestsRunning == 2 }},
		{"decode, unary", Config{DecodeUsPerToken: 1000}, true, func(s State) bool { return s.RequestsRunning == 2 }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := startEngine(t, tt.cfg)
			ctx, leave := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			for i := range 2 {
				body := completion(words(i, 40), fmt.Sprintf(`"max_tokens":60000,"stream":%v`, !tt.unary))
				if i == 1 {
					body = completion(words(i, 40), fmt.Sprintf(`"max_tokens":1000,"stream":%v`, !tt.unary))
				}
				wg.Go(func() { try(ctx, e.URL()+core.RouteCompletions, body) })
			}
			eventually(t, "the stage", func() bool { return tt.reason(e.State()) })
			leave()
			wg.Wait()
			eventually(t, "an idle engine", func() bool {
				s := e.State()
				return s.Aborted == 2 && s.BlocksUsed == 0 && s.RequestsRunning == 0 && s.RequestsWaiting == 0
			})
			if s := e.State(); s.Errors != 0 {
				t.Errorf("state %+v", s)
			}
		})
	}
}

func TestInformation(t *testing.T) {
	e := startEngine(t, Config{Model: "tiny", KVBlocks: 10})
	get := func(path string) answer {
		resp, err := http.Get(e.URL() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		raw, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return answer{resp.StatusCode, raw, resp.Header}
	}
	if a := get("/v1/models"); a.field(t, "data", 0, "id") != "tiny" || fmt.Sprint(a.field(t, "data", 0, "max_model_len")) != "160" {
		t.Errorf("models %s", a.body)
	}
	if a := get("/health"); a.status != 200 {
		t.Errorf("health %d", a.status)
	}
	if a := get("/version"); a.field(t, "version") == "" {
		t.Errorf("version %s", a.body)
	}
	post(t, e.URL()+core.RouteCompletions, completion(words(1, 40), `"max_tokens":3,"model":"tiny"`))
	post(t, e.URL()+core.RouteCompletions, completion(words(1, 40), `"max_tokens":3,"model":"tiny"`))
	metrics := string(get("/metrics").body)
	for _, line := range []string{
		`vllm:num_requests_running{engine="0",model_name="tiny"} 0`, `vllm:num_requests_waiting{engine="0",model_name="tiny"} 0`,
		`vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0`, `vllm:generation_tokens_total{engine="0",model_name="tiny"} 6`,
		`vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 32`,
	} {
		if !strings.Contains(metrics, "\n"+line+"\n") {
			t.Errorf("no %s in\n%s", line, metrics)
		}
	}
	var state map[string]any
	if err := json.Unmarshal(get("/sim/state").body, &state); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]float64{
		"blocks_total": 10, "blocks_used": 0, "blocks_pinned": 0, "requests_running": 0, "requests_waiting": 0, "transfers": 0,
		"aborted": 0, "errors": 0, "prompt_tokens": 80, "cached_tokens": 32,
	} {
		if state[name] != want {
			t.Errorf("%s is %v, want %v", name, state[name], want)
		}
	}
}

// TestManyStreams: hundreds of simultaneous streams over few slots are all
// complete.
func TestManyStreams(t *testing.T) {
	e := startEngine(t, Config{MaxRunning: 100, DecodeUsPerToken: 200, KVBlocks: 600})
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 300}}
	defer client.CloseIdleConnections()
	var wg sync.WaitGroup
	for i := range 300 {
		wg.Go(func() {
			resp, err := client.Post(e.URL()+core.RouteCompletions, "application/json", strings.NewReader(completion(words(i%20, 50), `"max_tokens":20,"stream":true`)))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			raw, err := io.ReadAll(resp.Body)
			if n := strings.Count(string(raw), "data: "); err != nil || n != 21 || !strings.HasSuffix(string(raw), "data: [DONE]\n\n") {
				t.Errorf("%d events, %v", n, err)
			}
		})
	}
	wg.Wait()
	if s := e.State(); s.OutputTokens != 6000 || s.BlocksUsed != 0 || s.Aborted != 0 {
		t.Errorf("state %+v", s)
	}
}

// TestKeepAlive: comments come before the first event and between events.
func TestKeepAlive(t *testing.T) {
	e := startEngine(t, Config{SSEKeepAlive: time.Millisecond, DecodeUsPerToken: 1000, Hang: core.HangPrefill})
	until := func(br *bufio.Reader, want string) {
		t.Helper()
		for {
			line, err := br.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			if line = strings.TrimSpace(line); strings.HasPrefix(line, want) {
				return
			} else if line != "" && line != ": keep-alive" && !strings.HasPrefix(line, "data: {") {
				t.Fatalf("line %q", line)
			}
		}
	}
	read := func() *bufio.Reader {
		resp, err := http.Post(e.URL()+core.RouteCompletions, "application/json", strings.NewReader(completion("x", `"max_tokens":20000,"stream":true`)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { resp.Body.Close() })
		return bufio.NewReader(resp.Body)
	}
	until(read(), ": keep-alive")
	e.SetFault("", 0, "")
	br := read()
	until(br, "data: ")
	e.SetFault("", 0, core.HangDecode)
	until(br, ": keep-alive")
}

// TestHalfClose: a client that closes its writing side counts as gone.
func TestHalfClose(t *testing.T) {
	e := startEngine(t, Config{Hang: core.HangDecode})
	conn, err := net.Dial("tcp", e.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	req, _ := http.NewRequest(http.MethodPost, e.URL()+core.RouteCompletions, strings.NewReader(completion("x", "")))
	req.Write(conn)
	eventually(t, "a running request", func() bool { return e.State().RequestsRunning == 1 })
	conn.(*net.TCPConn).CloseWrite()
	if raw, err := io.ReadAll(conn); err != nil || len(raw) > 0 {
		t.Errorf("io.ReadAll(conn) = %q, %v", raw, err)
	}
	if s := e.State(); s.Aborted != 1 {
		t.Errorf("state %+v", s)
	}
}

func TestCloseLetsRequestsFinish(t *testing.T) {
	e := startEngine(t, Config{DecodeUsPerToken: 2000})
	events, _ := openStream(t, e.URL()+core.RouteCompletions, completion("x", `"max_tokens":50,"stream":true`))
	go e.Close()
	list, err := events()
	if err != nil || len(list) != 51 || list[50] != "[DONE]" {
		t.Errorf("%d events, %v", len(list), err)
	}
}

func TestKillResetsStreams(t *testing.T) {
	e := startEngine(t, Config{DecodeUsPerToken: 2000})
	events, _ := openStream(t, e.URL()+core.RouteCompletions, completion("x", `"max_tokens":5000,"stream":true`))
	eventually(t, "a running request", func() bool { return e.State().RequestsRunning == 1 })
	e.Kill()
	if list, err := events(); err == nil {
		t.Errorf("the stream of %d events has no error", len(list))
	}
	start := time.Now()
	e.Close()
	if time.Since(start) > core.CloseGrace {
		t.Error("close waited for a dead engine")
	}
}
