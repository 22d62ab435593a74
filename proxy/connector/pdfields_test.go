package connector

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

func TestPDHeader(t *testing.T) {
	tests := []struct {
		name string
		want bool
	}{
		{"X-Request-Id", true},
		{"x-request-id", true},
		{"X-REQUEST-ID", true},
		{"X-Data-Parallel-Rank", true},
		{"x-data-parallel-host-port", true},
		{"X-Override-Bootstrap-Host", true},
		{"x-override-rid", true},
		{"X-Trtllm-Disagg-Auth", true},
		{"X-TRTLLM-Msgpack", true},
		{"X-Prefiller-Host-Port", true},
		{"x-encoder-hosts-ports", true},
		{"X-KV-Cache-Source-Host-Port", true},
		{"EPP-Profile", true},
		{"EPP-Profiles", false},
		{"X-Request-Ids", false},
		{"X-Request_Id", true},
		{"X_Request_Id", true},
		{"Request-Id", true},
		{"x_override_rid", true},
		{"X-Data_Parallel-Rank", true},
		{"kv_transfer_params", true},
		{"X-KV-Transfer-Params", true},
		{"Ec-Transfer-Params", true},
		{"X-Bootstrap-Host", true},
		{"bootstrap_room", true},
		{"X-Routed-DP-Rank", true},
		{"X-Disagg-Prefill-Dp-Rank", true},
		{"X-Rid", true},
		{"X-Disaggregated-Params", true},
		{"X-Kvasir", false},
		{"X-Rids", false},
		{"Bootstrap", false},
		{"X-Overrid", false},
		{"Override-Rid", false},
		{"X-Session-ID", false},
		{"X-SMG-Routing-Key", false},
		{"Traceparent", false},
		{"Authorization", false},
		{"Content-Type", false},
		{"", false},
	}
	for _, tt := range tests {
		if got := PDHeader(tt.name); got != tt.want {
			t.Errorf("PDHeader(%q) = %v", tt.name, got)
		}
	}
}

// hostile is a body with every PD field.
func hostile(t *testing.T, extra string) string {
	t.Helper()
	fields := []string{
		"kv_transfer_params", "ec_transfer_params", "request_id",
		"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
		"routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", "rid",
		"need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls", "mm_data_mooncake",
		"positional_embed_overrides", "http_worker_ipc", "kv_hints", "kv_router_hint",
		"disaggregated_params", "prompt_token_ids_b64",
	}
	if n := openai.PDCuts - 3; len(fields) != n { // without the members that may contain PD fields
		t.Errorf("%d fields of %d are tried", len(fields), n)
	}
	var b strings.Builder
	b.WriteByte('{')
	for _, f := range fields {
		if !openai.PDField(f) {
			t.Errorf("%s is no PD field", f)
		}
		b.WriteString(`"` + f + `":"CLIENT",`)
	}
	b.WriteString(`"vllm_xargs":{"kv_transfer_params":"CLIENT","ec_transfer_params":"CLIENT"},` +
		`"extra_args":{"a":[{"Kv_Transfer_Params":"CLIENT"}],"\u006bv_transfer_params":"CLIENT"},` + extra + `}`)
	return b.String()
}

// TestHostileClient sends every PD field at once. No leg of any connector, and no
// clean-up call, has a value of the client in a PD field. The list of edits has room
// for all of them, on every route and with all edits of the connector.
func TestHostileClient(t *testing.T) {
	bodies := []struct{ path, extra string }{
		{"/v1/completions", `"prompt":["x"],"stream":true,"stream_options":{},"max_completion_tokens":3,"min_tokens":1,"stop":"x"`},
		{"/v1/chat/completions", `"messages":[{"role":"user","content":"Hi"},{"role":"user","content":"Ho"}],"max_completion_tokens":3,"min_tokens":1,"stop":"x"`},
		{"/v1/responses", `"input":"x","stop":"x","store":true`},
		{"/v1/messages", `"messages":[{"role":"user","content":"Hi"}],"max_tokens":3,"stop_sequences":["x"]`},
		{"/v1/embeddings", `"input":"x"`},
		{"/tokenize", `"prompt":"x"`},
		{"/detokenize", `"tokens":[1]`},
		{"/rerank", `"query":"x","documents":["y"]`},
		{"/v1/rerank", `"query":"x","documents":["y"]`},
		{"/v2/rerank", `"query":"x","documents":["y"]`},
		{"/score", `"text_1":"x","text_2":"y"`},
		{"/v1/score", `"query":"x","items":["y"]`},
		{"/classify", `"input":"x"`},
		{"/v1/classify", `"input":"x"`},
		{"/pooling", `"input":"x"`},
		{"/v1/audio/transcriptions", `"file":"x"`},
		{"/v1/audio/speech", `"input":"x"`},
		{"/v1/images/generations", `"prompt":"x"`},
		{"/v1/images/edits", `"prompt":"x"`},
		{"/v1/messages/count_tokens", `"messages":[{"role":"user","content":"Hi"}]`},
		{"/generate", `"text":["x"],"sampling_params":{"extra_args":{"a":1}}`},
		{"/inference/v1/generate", `"token_ids":[1],"sampling_params":{"extra_args":{"kv_transfer_params":"CLIENT","ec_transfer_params":"CLIENT"}}`},
	}
	for _, c := range All() {
		for _, b := range bodies {
			a := pair(t, b.path, hostile(t, b.extra))
			if !c.Serves(a.Request.API) {
				continue
			}
			a.Prefill = place(config.Engine{Ranks: 4, EngineID: "p0", SideChannel: "10.0.0.5:5600"}, "10.0.0.5", 3,
				engine.Facts{EngineIDs: []string{"e0", "e1", "e2", "e3"}, Rendezvous: `"ctx_info_endpoint":"tcp://10.0.0.5:1"`})
			a.Decode.Spec.Ranks = 4
			a.Decode.Spec.Bidirectional = true
			a.Decode.Spec.Model = "m"
			a.Conversation = "c"
			legs := map[string]func() (Leg, error){
				"aggregated": func() (Leg, error) { return c.Aggregated(a, nil) },
			}
			if c.Name() != "none" && c.Pairable(a.Request) == nil {
				h := &Handoff{Pinned: true, Params: []byte(`{"ours":1}`), Prompt: []byte(`[1]`)}
				legs["prefill"] = func() (Leg, error) { return c.Prefill(a, nil) }
				legs["decode"] = func() (Leg, error) { return c.Decode(a, h, nil) }
				legs["decode with ids in base64"] = func() (Leg, error) {
					return c.Decode(a, &Handoff{Params: h.Params, Prompt: []byte(`"AA=="`)}, nil)
				}
				legs["decode after a fallback"] = func() (Leg, error) { return c.Decode(a, &Handoff{Params: []byte(`{}`)}, nil) }
				if _, ok := c.(Ordered); ok {
					first := *a
					first.Flow = abi.FlowDecodeFirst
					legs["decode first"] = func() (Leg, error) { return c.Decode(&first, nil, nil) }
				}
				for i, call := range c.Cleanup(a, Orphan{PrefillSent: true, DecodeSent: true, Handoff: h}) {
					legs[fmt.Sprint("clean-up ", i)] = func() (Leg, error) { return call.Leg, nil }
				}
			}
			for name, shape := range legs {
				leg, err := shape()
				if err != nil {
					t.Errorf("%s, %s, %s: shape() = %v, want nil", c.Name(), b.path, name, err)
					continue
				}
				if len(leg.Body) > 0 && !json.Valid(leg.Body) {
					t.Errorf("%s %s %s is no JSON: %s", c.Name(), b.path, name, leg.Body)
				}
				if strings.Contains(string(leg.Body), "CLIENT") {
					t.Errorf("%s %s %s carries a client's PD field: %s", c.Name(), b.path, name, leg.Body)
				}
			}
		}
	}
}

// TestNestedCuts: PD fields are cut inside members that vLLM merges into its arguments,
// and the rest of these members stays unchanged.
func TestNestedCuts(t *testing.T) {
	tests := []struct{ name, path, body, want string }{
		{"xargs", "/v1/completions", `{"prompt":"x","vllm_xargs":{"a":1.0, "kv_transfer_params":{}}}`, `{"prompt":"x","vllm_xargs":{"a":1.0}}`},
		{"xargs become empty", "/v1/completions", `{"prompt":"x","vllm_xargs":{"ec_transfer_params":1}}`, `{"prompt":"x","vllm_xargs":{}}`},
		{"xargs without", "/v1/completions", `{"prompt":"x","vllm_xargs":{"a":["kv_transfer_params"]}}`, `{"prompt":"x","vllm_xargs":{"a":["kv_transfer_params"]}}`},
		{"xargs, deeper", "/v1/completions", `{"prompt":"x","vllm_xargs":{"a":[{"kv_transfer_params":1}, 2]}}`, `{"prompt":"x","vllm_xargs":{"a":[{}, 2]}}`},
		{"xargs, spelt otherwise", "/v1/responses", `{"input":"x","vllm_xargs":{"\u006bv_transfer_params":1, "KV_Transfer_Params":2,"b":3}}`, `{"input":"x","vllm_xargs":{"b":3}}`},
		{"xargs null", "/v1/completions", `{"prompt":"x","vllm_xargs":null}`, `{"prompt":"x","vllm_xargs":null}`},
		{"xargs of sampling_params", "/inference/v1/generate", `{"token_ids":[1],"sampling_params":{"vllm_xargs":{"kv_transfer_params":{},"b":2}}}`, `{"token_ids":[1],"sampling_params":{"vllm_xargs":{"b":2}}}`},
		{"sampling_params themselves", "/inference/v1/generate", `{"token_ids":[1],"sampling_params":{"kv_transfer_params":{}}}`, `{"token_ids":[1],"sampling_params":{}}`},
		{"extra args", "/inference/v1/generate", `{"token_ids":[1],"sampling_params":{"n":1,"extra_args":{"kv_transfer_params":{},"b":2}}}`, `{"token_ids":[1],"sampling_params":{"n":1,"extra_args":{"b":2}}}`},
		{"extra args without", "/inference/v1/generate", `{"token_ids":[1],"sampling_params":{"extra_args":{"b":2}}}`, `{"token_ids":[1],"sampling_params":{"extra_args":{"b":2}}}`},
		{"extra args null", "/inference/v1/generate", `{"token_ids":[1],"sampling_params":{"extra_args":null}}`, `{"token_ids":[1],"sampling_params":{"extra_args":null}}`},
		{"sampling_params of another route", "/v1/completions", `{"prompt":"x","sampling_params":{"extra_args":{"kv_transfer_params":1}}}`, `{"prompt":"x","sampling_params":{"extra_args":{}}}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			leg, err := nixl{}.Aggregated(pair(t, tt.path, tt.body), nil)
			if err != nil || string(leg.Body) != tt.want {
				t.Errorf("nixl{}.Aggregated = %s, %v; want %s", leg.Body, err, tt.want)
			}
			if leg.Alias != (tt.body == tt.want) {
				t.Errorf("alias = %v", leg.Alias)
			}
		})
	}
}

// TestManyMembers: nested objects with more members than a body may have are cut like
// small ones, on every leg, and their other members stay.
func TestManyMembers(t *testing.T) {
	pad := func(more string) string {
		var b strings.Builder
		b.WriteByte('{')
		for i := range 5000 {
			fmt.Fprintf(&b, `"p%d":%d,`, i, i)
		}
		return b.String() + more + "}"
	}
	client := `"kv_transfer_params":{"remote_host":"CLIENT"}`
	for _, tt := range []struct{ name, path, body string }{
		{"xargs", "/v1/completions", `{"prompt":"x","vllm_xargs":` + pad(client) + `}`},
		{"extra args", "/inference/v1/generate", `{"token_ids":[1],"sampling_params":{"extra_args":` + pad(client) + `}}`},
		{"sampling_params", "/inference/v1/generate", `{"token_ids":[1],"sampling_params":` + pad(`"extra_args":{`+client+`}`) + `}`},
	} {
		for _, c := range All() {
			a := pair(t, tt.path, tt.body)
			if !c.Serves(a.Request.API) {
				continue
			}
			a.Prefill.Spec.EngineID, a.Prefill.Spec.SideChannel = "p0", "10.0.0.5:5600"
			shapes := map[string]func() (Leg, error){"aggregated": func() (Leg, error) { return c.Aggregated(a, nil) }}
			if _, ok := c.(nixl); ok {
				shapes["prefill"] = func() (Leg, error) { return c.Prefill(a, nil) }
				shapes["decode"] = func() (Leg, error) { return c.Decode(a, &Handoff{Params: []byte(`{"ours":1}`)}, nil) }
			}
			for name, shape := range shapes {
				leg, err := shape()
				if err != nil {
					t.Errorf("%s, %s, %s: shape() = %v, want nil", tt.name, c.Name(), name, err)
					continue
				}
				if body := string(leg.Body); !json.Valid(leg.Body) || strings.Contains(body, "CLIENT") || !strings.Contains(body, `"p4999":4999`) {
					t.Errorf("%s, %s %s: %d bytes of %d", tt.name, c.Name(), name, len(body), len(tt.body))
				}
			}
		}
	}
}
