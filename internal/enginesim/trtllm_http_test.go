package enginesim

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/trtllm"
)

// TestTRTLLMFields checks the fields of each wire generation's models.
func TestTRTLLMFields(t *testing.T) {
	const legs = `"disaggregated_params":{"request_type":"context_only"`
	tests := []struct {
		name, route, fields string
		wires               string // the generations that accept it
	}{
		{"plain", core.RouteCompletions, `"ignore_eos":true,"top_k":1,"detokenize":true,"priority":0.5`, "123"},
		{"unknown", core.RouteCompletions, `"rid":"x"`, ""},
		{"vllm's params", core.RouteCompletions, `"kv_transfer_params":null`, ""},
		{"cache_salt of completions", core.RouteCompletions, `"cache_salt":"x"`, ""},
		{"cache_salt of chat", core.RouteChat, `"cache_salt":"x"`, "123"},
		{"conversation_params", core.RouteChat, `"conversation_params":{"conversation_id":"c"}`, "23"},
		{"conversation_params, blank", core.RouteChat, `"conversation_params":{"conversation_id":" "}`, ""},
		{"conversation_params, unknown", core.RouteChat, `"conversation_params":{"conversation_id":"c","turn":1}`, ""},
		{"packed ids", core.RouteChat, `"prompt_token_ids_b64":"6AMAAA=="`, "23"},
		{"no params", core.RouteCompletions, `"disaggregated_params":null`, "123"},
		{"bare params", core.RouteCompletions, legs + `}`, "123"},
		{"conversation_id in the params", core.RouteCompletions, legs + `,"conversation_id":"c"}`, "12"},
		{"disagg id", core.RouteCompletions, legs + `,"disagg_request_id":2305843009213705953}`, "23"},
		{"schedule style", core.RouteCompletions, legs + `,"schedule_style":0}`, "23"},
		{"resolved thinking", core.RouteCompletions, legs + `,"resolved_thinking":true}`, "3"},
		{"unknown in the params", core.RouteCompletions, legs + `,"bootstrap_room":1}`, ""},
		{"ill-typed id", core.RouteCompletions, legs + `,"ctx_request_id":"a"}`, ""},
		{"ill-typed style", core.RouteCompletions, legs + `,"schedule_style":2}`, ""},
		{"ill-typed tokens", core.RouteCompletions, legs + `,"first_gen_tokens":["a"]}`, ""},
		{"params of another type", core.RouteCompletions, `"disaggregated_params":"context_only"`, ""},
		{"aggregated by name", core.RouteCompletions, `"disaggregated_params":{"request_type":"context_and_generation"}`, "123"},
		{"stream options alone", core.RouteCompletions, `"stream_options":{"include_usage":true}`, ""},
		{"unknown stream option", core.RouteCompletions, `"stream":true,"stream_options":{"usage":true}`, ""},
		{"suffix", core.RouteCompletions, `"suffix":"x"`, ""},
	}
	bodies := map[string]string{
		core.RouteCompletions: `{"model":"sim","prompt":"x","max_tokens":2}`,
		core.RouteChat:        `{"model":"sim","messages":[{"role":"user","content":"x"}],"max_tokens":2}`,
	}
	for wire := TRTLLMWireG1; wire <= TRTLLMWireG3; wire++ {
		e := startEngine(t, Config{Connector: ConnectorTRTLLM, TRTLLM: TRTLLMConfig{Wire: wire}})
		for _, tt := range tests {
			t.Run(fmt.Sprintf("G%d %s", wire, tt.name), func(t *testing.T) {
				a := post(t, e.URL()+tt.route, withFields(bodies[tt.route], tt.fields))
				want := http.StatusBadRequest
				if strings.Contains(tt.wires, fmt.Sprint(wire)) {
					want = http.StatusOK
				}
				if a.status != want {
					t.Errorf("answered %d %s, want %d", a.status, a.body, want)
				}
				if a.status == http.StatusBadRequest && !strings.HasPrefix(string(a.body), `{"error":"`) {
					t.Errorf("form %s", a.body)
				}
			})
		}
		releaseContexts(t, e)
	}
}

func TestTRTLLMErrors(t *testing.T) {
	e := startEngine(t, Config{Connector: ConnectorTRTLLM, KVBlocks: 4})
	tests := []struct{ name, route, body, want string }{
		{"no JSON", core.RouteCompletions, `{`, `{"error":"[{'type': 'json_invalid', 'loc': ('body', 1), 'msg': 'JSON decode error'}]"}`},
		{"no model", core.RouteCompletions, `{"prompt":"x"}`, `{"error":"[{'type': 'missing', 'loc': ('body', 'model'), 'msg': 'Field required'}]"}`},
		{"unknown params field", core.RouteCompletions, `{"model":"m","prompt":"x","disaggregated_params":{"request_type":"context_only","a":1}}`,
			`{"error":"[{'type': 'extra_forbidden', 'loc': ('body', 'disaggregated_params', 'a'), 'msg': 'Extra inputs are not permitted'}]"}`},
		{"unknown type", core.RouteCompletions, `{"model":"m","prompt":"x","disaggregated_params":{"request_type":"prefill"}}`,
			`{"object":"error","message":"Unknown request type: prefill. Must be context_only, generation_only or context_and_generation","type":"BadRequestError","param":null,"code":400}`},
		{"context stream", core.RouteCompletions, `{"model":"m","prompt":"x","stream":true,"disaggregated_params":{"request_type":"context_only"}}`,
			`{"object":"error","message":"context_only requests cannot be streamed","type":"BadRequestError","param":null,"code":400}`},
		{"several samples", core.RouteCompletions, `{"model":"m","prompt":"x","n":2,"disaggregated_params":{"request_type":"context_only"}}`,
			`{"object":"error","message":"Disaggregated requests take one prompt and n = 1","type":"BadRequestError","param":null,"code":400}`},
		{"too long", core.RouteCompletions, `{"model":"m","prompt":"` + strings.TrimSpace(words(1, 70)) + `","stream":true}`,
			`{"object":"error","message":"The sum of prompt length (72) and max_tokens (0) should not exceed max_num_tokens (64)","type":"BadRequestError","param":null,"code":400}`},
		{"no tokens", core.RouteChat, `{"model":"m","messages":[],"max_tokens":0}`,
			`{"object":"error","message":"max_tokens must be greater than 0, got 0","type":"BadRequestError","param":null,"code":400}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := post(t, e.URL()+tt.route, tt.body)
			if a.status != http.StatusBadRequest || string(a.body) != tt.want {
				t.Errorf("answered %d\n%s\nwant\n%s", a.status, a.body, tt.want)
			}
		})
	}
	if s := e.State(); s.Rejected != int64(len(tests)) || s.Requests != 0 {
		t.Errorf("e.State() = %+v", s)
	}
}

// TestTRTLLMStreamForm: chat chunks omit null fields, completion chunks do not.
// The role chunk has a blank before its line end.
func TestTRTLLMStreamForm(t *testing.T) {
	e := startEngine(t, Config{Connector: ConnectorTRTLLM})
	tests := []struct{ name, route, body, want string }{
		{"chat", core.RouteChat, `{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":2,"stream":true,"stream_options":{}}`,
			`data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":{"role":"assistant"}}]} ` + "\n\n" +
				`data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":{"content":"T","reasoning_content":""}}]}` + "\n\n" +
				`data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":{"content":"T","reasoning_content":""},"finish_reason":"length"}]}` + "\n\n" +
				`data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"m","choices":[],"usage":{"prompt_tokens":9,"total_tokens":11,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0}}}` + "\n\n" +
				"data: [DONE]\n\n"},
		{"completion", core.RouteCompletions, `{"model":"m","prompt":[1000],"max_tokens":1,"stream":true,"stream_options":{"include_usage":false}}`,
			`data: {"id":"cmpl-ID","object":"text_completion","created":0,"model":"m","choices":[{"index":0,"text":"T","token_ids":null,"logprobs":null,"finish_reason":"length","stop_reason":null,"avg_decoded_tokens_per_iter":null}],"usage":null}` + "\n\n" +
				"data: [DONE]\n\n"},
		{"usage in every event", core.RouteCompletions, `{"model":"m","prompt":[1000],"max_tokens":1,"stream":true,"stream_options":{"continuous_usage_stats":true}}`,
			`data: {"id":"cmpl-ID","object":"text_completion","created":0,"model":"m","choices":[{"index":0,"text":"T","token_ids":null,"logprobs":null,"finish_reason":"length","stop_reason":null,"avg_decoded_tokens_per_iter":null}],"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}` + "\n\n" +
				`data: {"id":"cmpl-ID","object":"text_completion","created":0,"model":"m","choices":[],"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}` + "\n\n" +
				"data: [DONE]\n\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := hide(string(post(t, e.URL()+tt.route, tt.body).body)); got != tt.want {
				t.Errorf("answered\n%s\nwant\n%s", got, tt.want)
			}
		})
	}
}

func TestTRTLLMInfo(t *testing.T) {
	for wire, version := range map[int]string{TRTLLMWireG1: "1.1.0", TRTLLMWireG2: "1.3.0rc24", TRTLLMWireG3: "1.4.0"} {
		e := startEngine(t, Config{Connector: ConnectorTRTLLM, MaxRunning: 7, BlockSize: 32, TRTLLM: TRTLLMConfig{Wire: wire}})
		if a := get(t, e.URL()+"/version"); string(a.body) != `{"version":"`+version+`"}` {
			t.Errorf("version %s", a.body)
		}
		want := `{"disaggregated_params":null}`
		if wire > TRTLLMWireG1 {
			want = fmt.Sprintf(`{"disaggregated_params":{"ctx_dp_rank":0,"ctx_info_endpoint":["tcp://%s"]},"kv_cache_hash_algo":"v1_block_key","tokens_per_block":32,"max_batch_size":7}`,
				e.Ranks[0].Side.Listener.Addr())
		}
		if a := get(t, e.URL()+"/server_info"); string(a.body) != want {
			t.Errorf("server_info %s, want %s", a.body, want)
		}
	}
	e := startEngine(t, Config{Connector: ConnectorTRTLLM, Hang: core.HangDecode, TRTLLM: TRTLLMConfig{DisconnectPoll: time.Millisecond}})
	if a := get(t, e.URL()+"/health"); a.status != http.StatusOK || len(a.body) != 0 {
		t.Errorf("health %d %q", a.status, a.body)
	}
	answered, leave := postAside(t, e.URL()+core.RouteCompletions, `{"model":"m","prompt":"x","max_tokens":1}`)
	eventually(t, "running", func() bool { return e.State().RequestsRunning == 1 })
	a := get(t, e.URL()+"/metrics")
	if a.field(t, 0, "numActiveRequests") != json.Number("1") || a.field(t, 0, "kvCacheStats", "usedNumBlocks") != json.Number("1") || a.field(t, 0, "kvCacheStats", "maxNumBlocks") != json.Number("4096") {
		t.Errorf("metrics %s", a.body)
	}
	leave()
	<-answered
	eventually(t, "the abort", func() bool { return e.State().BlocksUsed == 0 })
	e.SetFault("", 0, "")
	if a := get(t, e.URL()+"/health_generate"); a.status != http.StatusOK || string(a.body) != "Generation health check OK" {
		t.Errorf("health_generate %d %q", a.status, a.body)
	}
	for _, path := range []string{"/perf_metrics", "/steady_clock_offset", "/v1/models"} {
		if a := get(t, e.URL()+path); a.status != http.StatusOK {
			t.Errorf("%s: get(e.URL()+path) = %d", path, a.status)
		}
	}
}

// TestTRTLLMAuth checks the signature's vector and the requests that a worker
// with a key accepts.
func TestTRTLLMAuth(t *testing.T) {
	const key = "unit-test-key"
	ctx, gen := trtPair(t, TRTLLMConfig{AuthKey: key})
	vector := &trtllm.TRTParams{Raw: core.Fields{"encoded_opaque_state": json.RawMessage(`"b3BhcXVl"`)}}
	signed := func(signature string) *core.Request {
		return &core.Request{Header: http.Header{trtllm.HeaderDisaggAuth: {signature}}}
	}
	worker := gen.Proto.(*trtllm.TRTLLM)
	if err := worker.CheckAuth(signed("sha256=5bb964e820fe330f8c1966e5d34147af5cfe779851c5575643c8fa08651b86f9"), vector); err != nil {
		t.Errorf("the vector is refused: %v", err)
	}
	if err := worker.CheckAuth(signed("sha256=5bb964e820fe330f8c1966e5d34147af5cfe779851c5575643c8fa08651b86f8"), vector); err == nil {
		t.Error("a wrong signature is accepted")
	}
	body := completion(words(1, 20), `"max_tokens":3`)
	ca := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
	state := ca.field(t, "choices", 0, "disaggregated_params", "encoded_opaque_state").(string)
	sign := func(payload string) string {
		mac := hmac.New(sha256.New, []byte(key))
		mac.Write([]byte(payload))
		return "sha256=" + hex.EncodeToString(mac.Sum(nil))
	}
	good := sign(`{"ctx_info_endpoint":null,"encoded_opaque_state":"` + state + `"}`)
	g := generationBody(t, body, ca, nil)
	for name, header := range map[string]string{"missing": "", "tampered": good[:len(good)-1], "other endpoint": sign(`{"ctx_info_endpoint":"e","encoded_opaque_state":"` + state + `"}`)} {
		a := post(t, gen.URL()+core.RouteCompletions, g, trtllm.HeaderDisaggAuth, header)
		if a.status != http.StatusBadRequest || !strings.Contains(string(a.body), "Invalid internal disaggregated request authentication") {
			t.Errorf("%s: post = %d, %s", name, a.status, a.body)
		}
	}
	if a := post(t, gen.URL()+core.RouteCompletions, g, "x-trtllm-disagg-auth", good); a.status != http.StatusOK {
		t.Errorf("signed: %d %s", a.status, a.body)
	}
	if got := string(trtllm.AsciiJSON([]byte(`"é😀a"`))); got != `"\u00e9\ud83d\ude00a"` {
		t.Errorf("ascii %s", got)
	}
}

// FuzzTRTLLMParse: any body gives a 400 or a request.
func FuzzTRTLLMParse(f *testing.F) {
	epoch, layout := trtllm.FutureFields(trtID)
	state := trtllm.TRTState{Engine: "e", Addr: "a", Request: trtID}.Encode()
	for _, body := range []string{
		`{"model":"m","prompt":[1000],"disaggregated_params":` + fmt.Sprintf(`{"request_type":"generation_only","disagg_request_id":%d,"first_gen_tokens":[1000],"encoded_opaque_state":%q,"kv_epoch":%d,"kv_layout":%s,"ctx_usage":{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}}`, trtID, state, epoch, layout),
		`{"model":"m","messages":[{"role":"user","content":"x"}],"prompt_token_ids_b64":"6AMAAA==","disaggregated_params":{"request_type":"context_only","return_prompt_token_ids_b64":true}}`,
		`{"model":"m","prompt":"x","disaggregated_params":{"request_type":7,"ctx_usage":[]}}`,
		`{"model":"m","prompt":[[1],[2]],"n":2,"conversation_params":{"conversation_id":null}}`,
		`{"model":null,"stream_options":5}`, `null`, `{"model":"m","prompt":"","disaggregated_params":{}}`,
	} {
		for wire := TRTLLMWireG1; wire <= TRTLLMWireG3; wire++ {
			f.Add(body, true, wire)
			f.Add(body, false, wire)
		}
	}
	engines := map[int]*Engine{}
	for wire := TRTLLMWireG1; wire <= TRTLLMWireG3; wire++ {
		e, err := New(Config{Connector: ConnectorTRTLLM, KVBlocks: 64, TRTLLM: TRTLLMConfig{Wire: wire, AuthKey: map[int]string{TRTLLMWireG3: "k"}[wire]}})
		if err != nil {
			f.Fatal(err)
		}
		engines[wire] = e
	}
	f.Fuzz(func(t *testing.T, body string, chat bool, wire int) {
		e, route := engines[wire], core.RouteCompletions
		if e == nil {
			e = engines[TRTLLMWireG2]
		}
		if chat {
			route = core.RouteChat
		}
		req, refusal := e.Proto.Parse(route, http.Header{}, []byte(body))
		if refusal != nil {
			if refusal.Status != http.StatusBadRequest {
				t.Fatalf("refused with %d", refusal.Status)
			}
			if _, err := core.EncodeJSON(e.Proto.ErrorBody(refusal)); err != nil {
				t.Fatal(err)
			}
			return
		}
		q := req.Ext.(*trtllm.TRTRequest)
		if q.Is(trtllm.TypeGeneration) && (q.Params.Key() == nil || q.Params.State == nil) {
			t.Fatal("a generation without the address of its context was accepted")
		}
	})
}

// FuzzTRTLLMState: an opaque state is read as it was written, or rejected.
func FuzzTRTLLMState(f *testing.F) {
	f.Add(trtllm.TRTState{Engine: "e", Addr: "127.0.0.1:1", Rank: 3, Request: trtID}.Encode())
	f.Add("AAECAw==")
	f.Add("")
	f.Fuzz(func(t *testing.T, text string) {
		st, err := trtllm.DecodeTRTState(text)
		if err != nil {
			return
		}
		again, err := trtllm.DecodeTRTState(st.Encode())
		if err != nil || *again != *st {
			t.Fatalf("%+v became %+v, %v", st, again, err)
		}
	})
}

// TestTRTLLMMetrics: a client gets the metrics of its request on demand, in headers or in
// an event after the stream's end, on the clock that an orchestrator has set.
func TestTRTLLMMetrics(t *testing.T) {
	e := startEngine(t, Config{Connector: ConnectorTRTLLM, TRTLLM: TRTLLMConfig{PerfMetrics: true}})
	silent := startEngine(t, Config{Connector: ConnectorTRTLLM})
	body := completion(words(1, 20), `"max_tokens":3`)
	stream := withFields(body, `"stream":true`)
	for name, a := range map[string]answer{
		"not asked": post(t, e.URL()+core.RouteCompletions, body), "off": post(t, silent.URL()+core.RouteCompletions, body, trtllm.HeaderReturnMetrics, "1"),
		"stream, not asked": post(t, e.URL()+core.RouteCompletions, stream), "stream, off": post(t, silent.URL()+core.RouteCompletions, stream, trtllm.HeaderReturnMetrics, "1"),
	} {
		if a.header.Get(trtllm.HeaderServerTiming) != "" || strings.Contains(string(a.body), trtllm.EventMetrics) {
			t.Errorf("%s: %v %s", name, a.header, a.body)
		}
	}
	clock := get(t, e.URL()+"/steady_clock_offset")
	var stamps struct{ Received, Sent float64 }
	if n, err := fmt.Sscanf(string(clock.body), `{"receive_ts":%g,"transmit_ts":%g}`, &stamps.Received, &stamps.Sent); n != 2 || stamps.Sent < stamps.Received || stamps.Received < 1e5 {
		t.Errorf("clock %s, %v", clock.body, err)
	}
	if a := post(t, e.URL()+"/steady_clock_offset", `{"offset":1e9}`); a.status != http.StatusOK {
		t.Errorf("set clock: %d", a.status)
	}
	a := post(t, e.URL()+core.RouteCompletions, body, trtllm.HeaderReturnMetrics, "1")
	if timing := a.header.Get(trtllm.HeaderServerTiming); !strings.HasPrefix(timing, "server_queue;dur=0.000000, server_ttft;dur=") {
		t.Errorf("header %v", a.header)
	}
	if span := a.header.Get(trtllm.HeaderStartEnd); !strings.HasPrefix(span, "server-start;ts=1000100") {
		t.Errorf("span %q", span)
	}
	s := string(post(t, e.URL()+core.RouteCompletions, stream, trtllm.HeaderReturnMetrics, "1").body)
	if _, after, _ := strings.Cut(s, "data: [DONE]\n\n"); !strings.HasPrefix(after, "event: trtllm.perf_metrics\ndata: {\"Server-Timing\":\"server_queue;") || !strings.HasSuffix(after, "}\n\n") {
		t.Errorf("stream %s", s)
	}
}
