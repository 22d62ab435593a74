package connector

import (
	"encoding/json"
	"strings"
	"testing"
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
		{"X-Request_Id", false},
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

// hostile is a body with every PD field that there is.
func hostile(t *testing.T, extra string) string {
	t.Helper()
	fields := []string{
		"kv_transfer_params", "ec_transfer_params", "request_id",
		"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
		"routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", "rid",
		"disaggregated_params", "prompt_token_ids_b64",
	}
	var b strings.Builder
	b.WriteByte('{')
	for _, f := range fields {
		if !pdField(f) {
			t.Errorf("%s is no PD field", f)
		}
		b.WriteString(`"` + f + `":"CLIENT",`)
	}
	b.WriteString(`"vllm_xargs":{"kv_transfer_params":"CLIENT","ec_transfer_params":"CLIENT"},` + extra + `}`)
	return b.String()
}

// TestHostileClient sends every PD field at once: no leg of any connector has a
// value of the client's in one, and the list of edits has room for all.
func TestHostileClient(t *testing.T) {
	bodies := []struct{ path, extra string }{
		{"/v1/completions", `"prompt":["x"],"stream":true,"stream_options":{},"max_completion_tokens":3,"min_tokens":1,"stop":"x"`},
		{"/v1/chat/completions", `"messages":[],"max_completion_tokens":3,"min_tokens":1,"stop":"x"`},
		{"/generate", `"text":["x"]`},
		{"/inference/v1/generate", `"token_ids":[1],"sampling_params":{"extra_args":{"kv_transfer_params":"CLIENT","ec_transfer_params":"CLIENT"}}`},
	}
	ranked := func(a *Attempt) {
		a.Prefill.Spec.Ranks, a.Decode.Spec.Ranks, a.Prefill.Rank = 4, 4, 3
	}
	for _, c := range All() {
		for _, b := range bodies {
			extra := strings.Replace(b.extra, `"messages":[]`, `"messages":[{"role":"user","content":"Hi"}]`, 1)
			a := pair(t, b.path, hostile(t, extra))
			ranked(a)
			if !c.Serves(a.Request.API) {
				continue
			}
			legs := map[string]func() (Leg, error){
				"aggregated": func() (Leg, error) { return c.Aggregated(a, nil) },
			}
			if c.Name() != "none" {
				h := &Handoff{Params: []byte(`{"ours":1}`), Prompt: []byte(`[1]`)}
				legs["prefill"] = func() (Leg, error) { return c.Prefill(a, nil) }
				legs["decode"] = func() (Leg, error) { return c.Decode(a, h, nil) }
				legs["decode after a fallback"] = func() (Leg, error) { return c.Decode(a, &Handoff{Params: []byte(`{}`)}, nil) }
			}
			for name, shape := range legs {
				leg, err := shape()
				if err != nil {
					t.Errorf("%s %s %s: %v", c.Name(), b.path, name, err)
					continue
				}
				if !json.Valid(leg.Body) {
					t.Errorf("%s %s %s is no JSON: %s", c.Name(), b.path, name, leg.Body)
				}
				if strings.Contains(string(leg.Body), "CLIENT") {
					t.Errorf("%s %s %s carries a client's PD field: %s", c.Name(), b.path, name, leg.Body)
				}
			}
		}
	}
}

// TestNestedCuts shows what is cut inside members that vLLM merges into its
// arguments, and that anything else in them stays as it is.
func TestNestedCuts(t *testing.T) {
	tests := []struct{ name, path, body, want string }{
		{"xargs", "/v1/completions", `{"prompt":"x","vllm_xargs":{"a":1.0, "kv_transfer_params":{}}}`, `{"prompt":"x","vllm_xargs":{"a":1.0}}`},
		{"xargs become empty", "/v1/completions", `{"prompt":"x","vllm_xargs":{"ec_transfer_params":1}}`, `{"prompt":"x","vllm_xargs":{}}`},
		{"xargs without", "/v1/completions", `{"prompt":"x","vllm_xargs":{"a":{"kv_transfer_params":1}}}`, `{"prompt":"x","vllm_xargs":{"a":{"kv_transfer_params":1}}}`},
		{"xargs no object", "/v1/completions", `{"prompt":"x","vllm_xargs":["kv_transfer_params"]}`, `{"prompt":"x","vllm_xargs":["kv_transfer_params"]}`},
		{"extra args", "/inference/v1/generate", `{"token_ids":[1],"sampling_params":{"n":1,"extra_args":{"kv_transfer_params":{},"b":2}}}`, `{"token_ids":[1],"sampling_params":{"n":1,"extra_args":{"b":2}}}`},
		{"extra args without", "/inference/v1/generate", `{"token_ids":[1],"sampling_params":{"extra_args":{"b":2}}}`, `{"token_ids":[1],"sampling_params":{"extra_args":{"b":2}}}`},
		{"extra args null", "/inference/v1/generate", `{"token_ids":[1],"sampling_params":{"extra_args":null}}`, `{"token_ids":[1],"sampling_params":{"extra_args":null}}`},
		{"sampling_params of another route", "/v1/completions", `{"prompt":"x","sampling_params":{"extra_args":{"kv_transfer_params":1}}}`, `{"prompt":"x","sampling_params":{"extra_args":{"kv_transfer_params":1}}}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			leg, err := nixl{}.Aggregated(pair(t, tt.path, tt.body), nil)
			if err != nil || string(leg.Body) != tt.want {
				t.Errorf("%s, %v; want %s", leg.Body, err, tt.want)
			}
			if leg.Alias != (tt.body == tt.want) {
				t.Errorf("alias = %v", leg.Alias)
			}
		})
	}
}
