package connector

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// bidirectional returns an attempt whose decode engine retains its KV.
func bidirectional(t testing.TB, path, body string) *Attempt {
	a := pair(t, path, body)
	a.Decode = place(config.Engine{Ranks: 1, Bidirectional: true}, "10.0.1.7", 0, engine.Facts{PageSize: 16})
	return a
}

// A trusted client gets an engine's answer unchanged, and alone uses the blocks. The
// same holds for the client of an aggregated request.
func TestKeptIsForOneUser(t *testing.T) {
	answer := []byte(`{"choices":[{"token_ids":[1]}],"kv_transfer_params":{"do_remote_decode":true,"remote_block_ids":[[1]],"remote_num_tokens":2,` +
		`"remote_engine_id":"d","remote_request_id":"r","remote_host":"h","remote_port":1}}`)
	a := bidirectional(t, "/v1/completions", `{"prompt":"x"}`)
	if _, ok := (nixl{}).Retained(a, answer); !ok {
		t.Error("Retained returns no KV")
	}
	a.Trust = true
	if _, ok := (nixl{}).Retained(a, answer); ok || string(vllmPublic(a, answer)) != string(answer) || asksIDs(a) {
		t.Error("the blocks of a trusted client were retained or removed from its answer")
	}
	a.Trust, a.Prefill = false, engine.Target{}
	if _, ok := (nixl{}).Retained(a, answer); ok || asksIDs(a) {
		t.Error("KV is retained without a prefill")
	}
}

// FuzzKept: no answer of an engine causes a failure, and JSON stays valid JSON, without
// transfer parameters, for the client.
func FuzzKept(f *testing.F) {
	for _, s := range []string{
		`{"choices":[{"index":0,"token_ids":[1],"prompt_token_ids":[2]}],"kv_transfer_params":{"do_remote_decode":true,"remote_block_ids":[[1],[2]]}}`,
		`{"choices":[],"kv_transfer_params":{}}`, `{"choices":[1]}`, `{"choices":{}}`, `{}`, `x`, ``, `{"kv_transfer_params":[1]}`,
		"data: {\"choices\":[{\"token_ids\":[1]}],\"kv_transfer_params\":null}\n\ndata: {\"kv_transfer_params\" : {\"do_remote_decode\":true,\"remote_block_ids\":[[1]]}}\r\n\n",
		"data: {\"kv_transfer_params\":{}}\n\ndata: {\"response\":{\"kv_transfer_params\":1}}", "data: \"kv_transfer_params\"\n\n",
	} {
		f.Add([]byte(s))
	}
	a := bidirectional(f, "/v1/completions", `{"prompt":"x"}`)
	f.Fuzz(func(t *testing.T, answer []byte) {
		k, ok := nixl{}.Retained(a, answer)
		if ok && len(k.Params) == 0 {
			t.Error("retained KV has no parameters")
		}
		public := vllmPublic(a, answer)
		if json.Valid(answer) && !json.Valid(public) {
			t.Errorf("%s became %s", answer, public)
		}
		rest, k, ok := nixl{}.CutRetained(a, answer)
		if ok && len(k.Params) == 0 {
			t.Error("retained KV of a stream has no parameters")
		}
		if bytes.Count(rest, []byte("\n\n")) != bytes.Count(answer, []byte("\n\n")) {
			t.Errorf("%q became %q", answer, rest)
		}
		_, data, _ := bytes.Cut(rest, []byte("data: "))
		if params, _ := openai.Find(data, "kv_transfer_params"); json.Valid(data) && !openai.IsNull(params) {
			t.Errorf("the client gets %s", rest)
		}
	})
}

// An event that names no KV costs no allocation and is the same memory.
func TestCutRetainedIsFree(t *testing.T) {
	a := bidirectional(t, "/v1/completions", `{"prompt":"x","stream":true}`)
	events := []byte(`data: {"choices":[{"text":"\"kv_transfer_params\":{"}],"kv_transfer_params":null}` + "\n\n")
	allocs := testing.AllocsPerRun(100, func() {
		if rest, _, ok := (nixl{}).CutRetained(a, events); ok || len(rest) != len(events) || &rest[0] != &events[0] {
			t.Fatalf("%q", rest)
		}
	})
	if allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
}

// TestNamesInStreams: vLLM 0.33 is the first release.
func TestNamesInStreams(t *testing.T) {
	for version, want := range map[string]bool{"0.32.0": false, "0.32.9+cpu": false, "0.33.0": true, "0.33.0rc1": true, "0.40.1": true, "1.0.0": true, "0.1.dev7+g0123abc": true, "": true} {
		for api, has := range map[openai.API]bool{openai.Completions: true, openai.Chat: true, openai.Messages: false, openai.Responses: false, openai.VLLMGenerate: false} {
			if got := (nixl{}).NamesInStreams(api, &engine.Facts{Version: version}); got != (want && has) {
				t.Errorf("%s of %q: %v", api, version, got)
			}
		}
	}
}
