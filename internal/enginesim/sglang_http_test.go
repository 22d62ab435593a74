package enginesim

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/sglang"
)

// get returns the answer to a GET.
func get(t *testing.T, url string) answer {
	t.Helper()
	resp, err := http.Get(url)
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

// hide replaces the parts of an answer that differ from run to run.
func hide(body string) string {
	for _, v := range []struct{ re, with string }{
		{`"created":\d{10}`, `"created":0`}, {`"(content|text)":" [^" ]+( [^" ]+)*"`, `"$1":"T"`}, {`(cmpl-)?[0-9a-f]{32}`, `${1}ID`},
		{`"timestamp":[^,]+,`, `"timestamp":0,`}, {`"output_ids":\[[\d,]+\]`, `"output_ids":[N]`},
		{`"ctx_request_id":\d+`, `"ctx_request_id":1`},
	} {
		body = regexp.MustCompile(v.re).ReplaceAllString(body, v.with)
	}
	return body
}

func TestSGLangRegistry(t *testing.T) {
	p, _ := sglangPair(t, Config{Ranks: 2}, Config{})
	_, apiPort, _ := strings.Cut(p.Addr(), ":")
	url := fmt.Sprintf("http://127.0.0.1:%d", p.BootstrapPort())
	_, side := p.Ranks[1].Side.HostPort()
	route := "/route?prefill_dp_rank=%d&prefill_cp_rank=%d&target_tp_rank=%d&target_pp_rank=%d"
	tests := []struct {
		name, path string
		status     int
		body       string
	}{
		{"health", "/health", 200, `OK`},
		{"topology", fmt.Sprintf(route, -1, -1, -1, -1), 200,
			`{"attn_tp_size":1,"attn_cp_size":1,"dp_size":2,"pp_size":1,"page_size":16,"kv_cache_dtype":"auto","follow_bootstrap_room":true,"enable_dsa_cache_layer_split":false,"prefill_http_port":` + apiPort +
				`,"target_tp_rank":null,"target_tp_ranks":null,"target_cp_ranks":null,"target_pp_ranks":null,"required_dst_info_num":null,"required_prefill_response_num":null}`},
		{"rank", fmt.Sprintf(route, 1, 0, 0, 0), 200, fmt.Sprintf(`{"rank_ip":"127.0.0.1","rank_port":%d}`, side)},
		{"unknown rank", fmt.Sprintf(route, 2, 0, 0, 0), 404, `Bootstrap info not found for dp_rank=2 cp_rank=0 tp_rank=0 pp_rank=0`},
		{"unknown tp rank", fmt.Sprintf(route, 1, 0, 1, 0), 404, `Bootstrap info not found for dp_rank=1 cp_rank=0 tp_rank=1 pp_rank=0`},
		{"missing", "/route?prefill_dp_rank=-1", 400, `Missing inputs for bootstrap server.`},
		{"not a number", "/route?prefill_dp_rank=a&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0", 500, `500 Internal Server Error`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if a := get(t, url+tt.path); a.status != tt.status || string(a.body) != tt.body {
				t.Errorf("answered %d %s, want %d %s", a.status, a.body, tt.status, tt.body)
			}
		})
	}
	if a := post(t, url+"/register_dp_rank", `{"bootstrap_room":9223372036854775807,"dp_rank":1}`); a.status != 200 || string(a.body) != "OK" {
		t.Errorf("register answered %d %s", a.status, a.body)
	}
	if a := post(t, url+"/query_dp_ranks", `{"bootstrap_rooms":[9223372036854775807,3]}`); string(a.body) != `{"9223372036854775807":1}` {
		t.Errorf("query answered %s", a.body)
	}
	if a := post(t, url+"/query_dp_ranks", `[`); a.status != 500 {
		t.Errorf("a bad query answered %d", a.status)
	}
	// Any host can replace a rank's address.
	put, err := http.NewRequestWithContext(t.Context(), http.MethodPut, url+"/route", strings.NewReader(`{"system_dp_size":2,"system_dp_rank":1,"attn_dp_rank":0,"rank_ip":"10.0.0.9","rank_port":7}`))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(put)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if a := get(t, url+fmt.Sprintf(route, 1, 0, 0, 0)); string(a.body) != `{"rank_ip":"10.0.0.9","rank_port":7}` {
		t.Errorf("rank after the PUT: %s", a.body)
	}
}

func TestSGLangRoomExpiry(t *testing.T) {
	p, _ := sglangPair(t, Config{SGLang: SGLangConfig{RoomExpiry: time.Nanosecond}}, Config{})
	b := sglangOf(p).Boot
	b.Register(1, 0)
	b.Register(2, 0)
	b.Mu.Lock()
	defer b.Mu.Unlock()
	if len(b.Rooms) != 1 {
		t.Errorf("%d rooms are remembered", len(b.Rooms))
	}
}

func TestSGLangInfo(t *testing.T) {
	p, d := sglangPair(t, Config{Ranks: 2}, Config{BootstrapPort: 4321})
	one := startEngine(t, Config{Connector: ConnectorSGLang})
	for e, want := range map[*Engine]map[string]string{
		p: {"disaggregation_mode": `"prefill"`, "disaggregation_bootstrap_port": fmt.Sprint(p.BootstrapPort()), "dp_size": "2", "load_balance_method": `"follow_bootstrap_room"`},
		d: {"disaggregation_mode": `"decode"`, "disaggregation_bootstrap_port": "4321", "dp_size": "1", "load_balance_method": `"round_robin"`},
		one: {"disaggregation_mode": `"null"`, "disaggregation_bootstrap_port": "8998", "page_size": "16", "kv_events": "null",
			"max_total_num_tokens": "65536", "kv_cache_dtype": `"auto"`, "version": `"0.5.9.sim"`},
	} {
		for _, path := range []string{"/server_info", "/get_server_info"} {
			var got map[string]json.RawMessage
			if err := json.Unmarshal(get(t, e.URL()+path).body, &got); err != nil {
				t.Fatal(err)
			}
			for name, want := range want {
				if string(got[name]) != want {
					t.Errorf("%s %s: %s is %s, want %s", e.Cfg.Role, path, name, got[name], want)
				}
			}
		}
	}
	if got := get(t, d.URL()+"/model_info").field(t, "is_generation"); got != true {
		t.Errorf("model_info: is_generation is %v", got)
	}
	want := `{"object":"list","data":[{"id":"sim","object":"model","created":1700000000,"owned_by":"sglang","root":"sim","parent":null,"max_model_len":65536}]}`
	if a := get(t, one.URL()+"/v1/models"); string(a.body) != want {
		t.Errorf("models %s", a.body)
	}
}

func TestSGLangLoads(t *testing.T) {
	p, d := sglangPair(t, Config{Ranks: 2}, Config{})
	_, leave := postAside(t, d.URL()+core.RouteCompletions, completion(words(1, 32), `"max_tokens":1,`+bootstrap(p, 3, "load")))
	defer leave()
	eventually(t, "decode waits", func() bool { return d.State().BlocksPinned == 2 })
	_, leaveP := postAside(t, p.URL()+core.RouteCompletions, completion(words(1, 32), bootstrap(p, 5, "load")))
	defer leaveP()
	eventually(t, "prefill waits", func() bool { return p.State().RequestsWaiting == 1 })
	a := get(t, d.URL()+"/v1/loads?include=core,disagg")
	want := `{"timestamp":0,"dp_rank":0,"num_running_reqs":0,"num_waiting_reqs":1,"num_waiting_uncached_tokens":0,"num_used_tokens":32,"num_total_tokens":32,"num_active_tokens":32,` +
		`"max_total_num_tokens":65536,"max_running_requests":256,"token_usage":0.00048828125,"gen_throughput":0,"cache_hit_rate":0,"utilization":0.00048828125,` +
		`"total_prefill_uncached_tokens":0,"total_prefill_busy_us":0,"decode_moments":null,"disaggregation":{"mode":"decode","prefill_bootstrap_queue_reqs":0,"prefill_inflight_queue_reqs":0,` +
		`"decode_prealloc_queue_reqs":0,"decode_transfer_queue_reqs":1,"decode_retracted_queue_reqs":0,"kv_transfer_speed_gb_s":0,"kv_transfer_latency_ms":0}}`
	if got := hide(string(a.body)); !strings.Contains(got, `"loads":[`+want+`]`) {
		t.Errorf("loads\n%s\nwant\n%s", got, want)
	}
	a = get(t, p.URL()+"/v1/loads?include=disagg&dp_rank=1")
	if n := a.field(t, "loads", 0, "num_waiting_reqs"); n != json.Number("1") {
		t.Errorf("rank 1 does not count its bootstrap queue: %s", a.body)
	}
	if n := a.field(t, "loads", 0, "disaggregation", "prefill_bootstrap_queue_reqs"); n != json.Number("1") || len(a.field(t, "loads").([]any)) != 1 {
		t.Errorf("rank 1: %s", a.body)
	}
	if a := get(t, p.URL()+"/v1/loads?dp_rank=2"); a.status != http.StatusBadRequest {
		t.Errorf("rank 2: %d", a.status)
	}
	if a := get(t, p.URL()+"/metrics"); !strings.Contains(string(a.body), `sglang:num_prefill_bootstrap_queue_reqs{dp_rank="1",model_name="sim"} 1`) {
		t.Errorf("metrics %s", a.body)
	}
	if a := get(t, d.URL()+"/get_load"); a.field(t, 0, "num_reqs") != json.Number("1") {
		t.Errorf("get_load %s", a.body)
	}
}

func TestSGLangHealth(t *testing.T) {
	p, d := sglangPair(t, Config{SGLang: quickSGLang()}, Config{SGLang: quickSGLang()})
	one := startEngine(t, Config{Connector: ConnectorSGLang, SGLang: quickSGLang()})
	for _, e := range []*Engine{p, d, one} {
		for _, path := range []string{"/health", "/health_generate"} {
			before, start := e.State(), time.Now()
			a := get(t, e.URL()+path)
			if a.status != http.StatusOK || len(a.body) != 0 || time.Since(start) < quickSGLang().HealthPoll {
				t.Errorf("%s %s answered %d %q", e.Cfg.Role, path, a.status, a.body)
			}
			if e.State().Requests != before.Requests+1 {
				t.Errorf("%s %s generated nothing", e.Cfg.Role, path)
			}
		}
	}
	// A health check is a generation: it fails when nothing is generated.
	one.SetFault("", 0, core.HangPrefill)
	if a := get(t, one.URL()+"/health"); a.status != http.StatusServiceUnavailable {
		t.Errorf("a hanging engine answered %d", a.status)
	}
}

// TestSGLangForm compares whole answers with the engine's form.
func TestSGLangForm(t *testing.T) {
	e := startEngine(t, Config{Connector: ConnectorSGLang})
	tests := []struct {
		name, route, body string
		want              []string // a unary answer, or the events
	}{
		{"chat", core.RouteChat, `{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":2,"rid":"R"}`, []string{
			`{"id":"R","object":"chat.completion","created":0,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"T","reasoning_content":null,"tool_calls":null},"logprobs":null,"finish_reason":"length","matched_stop":null}],` +
				`"usage":{"prompt_tokens":9,"total_tokens":11,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0},"reasoning_tokens":0},"metadata":{"weight_version":"default"}}`}},
		{"completion", core.RouteCompletions, `{"model":"m","prompt":"<eos2>","rid":"R"}`, []string{
			`{"id":"R","object":"text_completion","created":0,"model":"m","choices":[{"index":0,"text":"T","logprobs":null,"finish_reason":"stop","matched_stop":256}],` +
				`"usage":{"prompt_tokens":2,"total_tokens":4,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0},"reasoning_tokens":0},"metadata":{"weight_version":"default"}}`}},
		{"chat stream", core.RouteChat, `{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,"rid":"R","stream":true,"stream_options":{"include_usage":true}}`, []string{
			`{"id":"R","object":"chat.completion.chunk","created":0,"model":"sim","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null,"matched_stop":null}]}`,
			`{"id":"R","object":"chat.completion.chunk","created":0,"model":"sim","choices":[{"index":0,"delta":{"role":null,"content":"T","reasoning_content":null,"tool_calls":null},"logprobs":null,"finish_reason":"length","matched_stop":null}],"usage":null}`,
			`{"id":"R","object":"chat.completion.chunk","created":0,"model":"sim","choices":[],"usage":{"prompt_tokens":9,"total_tokens":10,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0},"reasoning_tokens":0}}`,
			`[DONE]`}},
		{"native", sglang.RouteGenerate, `{"text":"hi there","rid":"R","sampling_params":{"max_new_tokens":2}}`, []string{
			`{"text":"T","output_ids":[N],"meta_info":{"id":"R","finish_reason":{"type":"length","length":2},"prompt_tokens":3,"weight_version":"default","completion_tokens":2,"cached_tokens":0,"dp_rank":0,"e2e_latency":0}}`}},
		{"native stream", sglang.RouteGenerate, `{"text":"hi there","rid":"R","stream":true,"sampling_params":{"max_new_tokens":2}}`, []string{
			`{"text":"T","output_ids":[N],"meta_info":{"id":"R","finish_reason":null,"prompt_tokens":3,"weight_version":"default","completion_tokens":1,"cached_tokens":0,"dp_rank":0,"e2e_latency":0}}`,
			`{"text":"T","output_ids":[N],"meta_info":{"id":"R","finish_reason":{"type":"length","length":2},"prompt_tokens":3,"weight_version":"default","completion_tokens":2,"cached_tokens":0,"dp_rank":0,"e2e_latency":0}}`,
			`[DONE]`}},
		{"native batch", sglang.RouteGenerate, `{"text":["hi","ho"],"rid":["A","B"],"sampling_params":{"max_new_tokens":1}}`, []string{
			`[{"text":"T","output_ids":[N],"meta_info":{"id":"A","finish_reason":{"type":"length","length":1},"prompt_tokens":1,"weight_version":"default","completion_tokens":1,"cached_tokens":0,"dp_rank":0,"e2e_latency":0}},` +
				`{"text":"T","output_ids":[N],"meta_info":{"id":"B","finish_reason":{"type":"length","length":1},"prompt_tokens":1,"weight_version":"default","completion_tokens":1,"cached_tokens":0,"dp_rank":0,"e2e_latency":0}}]`}},
		{"native without prompt", sglang.RouteGenerate, `{}`, []string{
			`{"error":{"message":"1 validation errors:\n  body.text: Either text, input_ids or input_embeds should be provided."}}`}},
		{"no prompt", core.RouteCompletions, `{}`, []string{
			`{"object":"error","message":"1 validation errors:\n  body.prompt: Field required","type":"Bad Request","param":null,"code":400}`}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := post(t, e.URL()+tt.route, tt.body)
			got := []string{string(a.body)}
			if strings.HasPrefix(got[0], "data: ") {
				got = strings.Split(strings.TrimSuffix(strings.TrimPrefix(got[0], "data: "), "\n\n"), "\n\ndata: ")
			}
			for i := range got {
				got[i] = hide(got[i])
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("answered\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(tt.want, "\n"))
			}
		})
	}
}

func TestSGLangHeaderOverrides(t *testing.T) {
	on := SGLangConfig{HeaderOverrides: true, WaitingTimeout: time.Second}
	p, d := sglangPair(t, Config{SGLang: on}, Config{SGLang: on})
	headers := []string{
		"x-override-rid", "from-header", "x-override-bootstrap-host", "127.0.0.1", "x-override-bootstrap-port", fmt.Sprint(p.BootstrapPort()),
		"x-override-bootstrap-room", "9223372036854775807", "x-override-disagg-prefill-dp-rank", "0", "x-override-routed-dp-rank", "0",
	}
	const body = `{"messages":[{"role":"user","content":"untouched"}],"max_tokens":3}`
	done := make(chan answer, 1)
	go func() {
		a, _ := try(t.Context(), p.URL()+core.RouteChat, body, headers...)
		done <- a
	}()
	da := post(t, d.URL()+core.RouteChat, body, headers...)
	if pa := <-done; pa.status != http.StatusOK || da.status != http.StatusOK || da.field(t, "id") != "from-header" {
		t.Errorf("prefill %d %s, decode %d %s", pa.status, pa.body, da.status, da.body)
	}
	for _, bad := range []string{"x-override-bootstrap-room", "x-override-bootstrap-port", "x-override-routed-dp-rank", "x-override-disagg-prefill-dp-rank"} {
		if a := post(t, d.URL()+core.RouteChat, body, bad, "seven"); a.status != http.StatusBadRequest {
			t.Errorf("%s: seven: %d %s", bad, a.status, a.body)
		}
	}
	// Header overrides are off by default, and never apply to completions.
	_, off := sglangPair(t, Config{}, Config{})
	if a := post(t, off.URL()+core.RouteChat, body, headers...); a.status != http.StatusBadRequest || !strings.Contains(string(a.body), "without bootstrap room id") {
		t.Errorf("switched off: %d %s", a.status, a.body)
	}
	if a := post(t, d.URL()+core.RouteCompletions, `{"prompt":"x"}`, headers...); a.status != http.StatusBadRequest {
		t.Errorf("completions: %d", a.status)
	}
}

// FuzzSGLangParse: any body is rejected or gives every sequence an item.
func FuzzSGLangParse(f *testing.F) {
	for _, body := range []string{
		completion("x", `"bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":9223372036854775807,"rid":"r"`),
		`{"prompt":["a","b"],"n":2,"bootstrap_room":[1,2],"bootstrap_port":[null,3],"rid":["x","y"]}`,
		`{"text":["a"],"input_ids":[[1]],"sampling_params":{"n":3},"bootstrap_room":5}`,
		`{"input_embeds":[[[0.5],[1]],[[-2e9]]],"bootstrap_room":5}`, `{"input_embeds":[[0.5],[]]}`, `{"input_embeds":[[[]],[]]}`, `{"input_embeds":[]}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"routed_dp_rank":"0","disagg_prefill_dp_rank":1e3}`,
		`{"prompt":[],"rid":{}}`, `{"text":[[]],"bootstrap_room":[[]]}`, `[]`, `{"prompt":"x","bootstrap_room":1.5}`,
	} {
		f.Add(body, core.RouteCompletions, "7")
		f.Add(body, sglang.RouteGenerate, "")
		f.Add(body, core.RouteChat, "x")
	}
	e, err := New(Config{Connector: ConnectorSGLang, Role: RoleDecode, KVBlocks: 64, SGLang: SGLangConfig{HeaderOverrides: true}})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, body, route, room string) {
		if route != sglang.RouteGenerate && route != core.RouteChat {
			route = core.RouteCompletions
		}
		h := http.Header{}
		h.Set("X-Override-Bootstrap-Room", room)
		req, refusal := e.Proto.Parse(route, h, []byte(body))
		if refusal != nil {
			if refusal.Status != http.StatusBadRequest {
				t.Fatalf("refused with %d", refusal.Status)
			}
			if _, err := core.EncodeJSON(e.Proto.ErrorBody(refusal)); err != nil {
				t.Fatal(err)
			}
			return
		}
		if e.CheckTokens(req) != nil {
			return
		}
		if n := len(req.Ext.(*sglang.SGLangRequest).Items); n != len(e.NewSequences(req)) {
			t.Fatalf("%d items for %d sequences", n, len(e.NewSequences(req)))
		}
	})
}
