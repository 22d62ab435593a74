package connector

import (
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

func TestAll(t *testing.T) {
	tests := []struct {
		name       string
		flow       abi.Flow
		aggregates abi.Role // in addition to role both
	}{
		{config.ConnectorVLLMNixl, abi.FlowPrefillFirst, abi.RoleDecode},
		{config.ConnectorVLLMNixlPush, abi.FlowConcurrent, abi.RoleDecode},
		{config.ConnectorVLLMStore, abi.FlowPrefillFirst, abi.RoleDecode},
		{config.ConnectorVLLMMoRIIO, abi.FlowConcurrent, 0},
		{config.ConnectorVLLMMoRIIORead, abi.FlowPrefillFirst, abi.RolePrefill},
		{config.ConnectorVLLMMooncake, abi.FlowConcurrent, abi.RoleDecode},
		{config.ConnectorVLLMP2PTier, abi.FlowPrefillFirst, abi.RoleDecode},
		{config.ConnectorSGLang, abi.FlowConcurrent, 0},
		{config.ConnectorTRTLLM, abi.FlowPrefillFirst, abi.RoleDecode},
		{config.ConnectorNone, abi.FlowAggregated, 0},
	}
	if n := len(All()); n != len(tests) {
		t.Fatalf("got %d connectors, want %d", n, len(tests))
	}
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, ok := ByName(tt.name)
			if !ok || c.Name() != tt.name || All()[i] != c {
				t.Fatalf("ByName = %v, %v", c, ok)
			}
			if c.Flow() != tt.flow || c.AggregatesOn() != tt.aggregates {
				t.Errorf("got flow %v aggregates on %v, want %v %v", c.Flow(), c.AggregatesOn(), tt.flow, tt.aggregates)
			}
		})
	}
	if _, ok := ByName("nixl"); ok {
		t.Error("found a connector for an unknown name")
	}
}

func TestServes(t *testing.T) {
	var all []openai.API
	for api := openai.Completions; api.Path() != ""; api++ {
		all = append(all, api)
	}
	vllm := []openai.API{openai.Generate, openai.ClassifyV1}
	refused := map[string][]openai.API{
		"vllm-nixl": vllm, "vllm-nixl-push": vllm, "vllm-store": vllm, "vllm-moriio": vllm, "vllm-moriio-read": vllm, "vllm-mooncake": vllm, "vllm-p2p-tier": vllm,
		"sglang": {openai.VLLMGenerate, openai.Rerank, openai.RerankV2, openai.Score, openai.Pooling, openai.Translations, openai.Speech},
		"trtllm": {openai.Messages, openai.Generate, openai.VLLMGenerate, openai.Tokenize, openai.Detokenize, openai.Rerank, openai.RerankV1, openai.RerankV2,
			openai.Score, openai.ScoreV1, openai.Classify, openai.ClassifyV1, openai.Pooling, openai.CountTokens, openai.Transcriptions, openai.Translations, openai.Speech},
		"none": nil,
	}
	for _, c := range All() {
		not := map[openai.API]bool{0: true}
		for _, api := range refused[c.Name()] {
			not[api] = true
		}
		for _, api := range append(all, 0) {
			if got := c.Serves(api); got == not[api] {
				t.Errorf("%s serves %v: %v", c.Name(), api, got)
			}
		}
	}
}

// TestTokenizesAndLoads lists how the engines of each connector tokenize and report load.
func TestTokenizesAndLoads(t *testing.T) {
	metrics := []engine.LoadRoute{{Path: "/metrics", Form: engine.LoadMetrics}}
	want := map[string]struct {
		dialect tokens.Dialect
		loads   []engine.LoadRoute
	}{
		"none": {tokens.VLLM, append(slices.Clone(metrics), engine.LoadRoute{Path: "/v1/loads?include=core", Form: engine.LoadSGLang})},
		"sglang": {tokens.SGLang, []engine.LoadRoute{
			{Path: "/v1/loads?include=core,disagg,queues,memory", Form: engine.LoadSGLang},
			{Path: "/v1/loads?include=core", Form: engine.LoadSGLang},
			{Path: "/get_load", Form: engine.LoadSGLangLegacy},
			metrics[0],
		}},
		"trtllm": {tokens.TRTLLM, []engine.LoadRoute{{Path: "/metrics", Form: engine.LoadTRTLLM}}},
	}
	for _, c := range All() {
		w, found := want[c.Name()]
		if !found {
			w.dialect, w.loads = tokens.VLLM, metrics
		}
		if got := c.Tokenizes(); got != w.dialect {
			t.Errorf("%s: got Tokenizes() = %v, want %v", c.Name(), got, w.dialect)
		}
		if got := c.Loads(); !slices.Equal(got, w.loads) {
			t.Errorf("%s: got Loads() = %+v, want %+v", c.Name(), got, w.loads)
		}
	}
}

func TestHealthPath(t *testing.T) {
	tests := []struct {
		connector string
		role      abi.Role
		path      string
		bootstrap bool
	}{
		{"vllm-nixl", abi.RolePrefill, "/health", false},
		{"vllm-nixl", abi.RoleDecode, "/health", false},
		{"vllm-nixl-push", abi.RolePrefill, "/health", false},
		{"vllm-store", abi.RoleDecode, "/health", false},
		{"vllm-p2p-tier", abi.RolePrefill, "/health", false},
		{"vllm-moriio", abi.RolePrefill, "/health", false},
		{"vllm-moriio-read", abi.RoleDecode, "/health", false},
		{"vllm-mooncake", abi.RolePrefill, "/health", false},
		{"sglang", abi.RolePrefill, "/health", true},
		{"sglang", abi.RoleDecode, "/v1/models", false},
		{"sglang", abi.RoleBoth, "/v1/models", false},
		{"trtllm", abi.RolePrefill, "/health", false},
		{"none", abi.RoleBoth, "/v1/models", false},
	}
	for _, tt := range tests {
		c, _ := ByName(tt.connector)
		if path, bootstrap := c.HealthPath(tt.role); path != tt.path || bootstrap != tt.bootstrap {
			t.Errorf("%s %v: c.HealthPath(tt.role) = %s %v, want %s %v", tt.connector, tt.role, path, bootstrap, tt.path, tt.bootstrap)
		}
	}
}

// TestNoneHasNoPair: connector none rejects everything that only a pair has.
func TestNoneHasNoPair(t *testing.T) {
	c, _ := ByName("none")
	a := pair(t, "/v1/completions", `{"prompt":"x"}`)
	if err := c.Compatible(&engine.Facts{}, &engine.Facts{}); err == nil {
		t.Error("two engines of none may be paired")
	}
	if _, err := c.Prefill(a, nil); err == nil {
		t.Error("none has a prefill leg")
	}
	if _, err := c.ReadPrefill(a, []byte("{}")); err == nil {
		t.Error("none reads a prefill answer")
	}
	if _, err := c.Decode(a, nil, nil); err == nil {
		t.Error("none has a decode leg")
	}
}

// TestDecodeNeedsHandoff: TensorRT-LLM has no decode leg without prefill's params. A
// NIXL decode leg without them computes the prompt itself.
func TestDecodeNeedsHandoff(t *testing.T) {
	a := pair(t, "/v1/completions", `{"prompt":"x"}`)
	if _, err := (trtllm{}).Decode(a, nil, nil); err == nil {
		t.Error("trtllm built a decode leg without params")
	}
	if _, err := (trtllm{}).Decode(a, &Handoff{Params: []byte(`[]`)}, nil); err == nil {
		t.Error("trtllm built a decode leg from params that are no object")
	}
	for _, h := range []*Handoff{nil, {}, {Params: []byte(`[]`)}} {
		if _, err := (moriio{read: true}).Decode(a, h, nil); err == nil {
			t.Error("MoRI-IO in READ mode built a decode leg without params")
		}
	}
	leg, err := nixl{}.Decode(a, nil, nil)
	if err != nil || string(leg.Body) != `{"prompt":"x"}` || !leg.Alias {
		t.Errorf("nixl without a handoff: %s, alias %v, %v", leg.Body, leg.Alias, err)
	}
}

// TestTPSizes lists which MoRI-IO engines pair.
func TestTPSizes(t *testing.T) {
	for _, tt := range []struct {
		p, d int
		fits bool
	}{{0, 8, true}, {8, 0, true}, {8, 8, true}, {2, 8, true}, {8, 4, true}, {1, 3, true}, {6, 4, false}, {3, 8, false}} {
		err := moriio{}.Compatible(&engine.Facts{TPSize: tt.p}, &engine.Facts{TPSize: tt.d})
		if (err == nil) != tt.fits {
			t.Errorf("prefill %d, decode %d: %v", tt.p, tt.d, err)
		}
	}
}

// TestDstIsReused: a leg is appended to the given buffer. The bodies of one attempt can
// use one buffer after another.
func TestDstIsReused(t *testing.T) {
	dst := make([]byte, 0, 4096)
	for _, c := range All()[:7] {
		a := pair(t, "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}]}`)
		leg, err := c.Prefill(a, dst)
		if err != nil {
			t.Fatal(err)
		}
		if &leg.Body[0] != &dst[:1][0] {
			t.Errorf("%s: the body is not in the buffer", c.Name())
		}
		prefix := append(dst, "kept"...)
		if leg, _ = c.Prefill(a, prefix); !strings.HasPrefix(string(leg.Body), "kept{") {
			t.Errorf("%s: the body is not appended to the buffer", c.Name())
		}
	}
}

// TestRetryHasItsOwnIDs: two attempts share no id by which engines could mix them up.
func TestRetryHasItsOwnIDs(t *testing.T) {
	for _, c := range All()[:7] {
		first := pair(t, "/v1/completions", `{"prompt":"x"}`)
		second := pair(t, "/v1/completions", `{"prompt":"x"}`)
		second.ID, second.LegID = first.ID+1, "fedcba9876543210fedcba9876543210"
		one, _ := c.Prefill(first, nil)
		two, _ := c.Prefill(second, nil)
		if legText(one) == legText(two) {
			t.Errorf("%s: both attempts send the same", c.Name())
		}
	}
}

func legText(l Leg) string {
	var b strings.Builder
	for _, f := range l.Header {
		b.WriteString(f.Name + ": " + f.Value + "\n")
	}
	b.Write(l.Body)
	return b.String()
}

// TestWaiters: exactly the connectors whose decode engine waits without end repeat the prefill leg
// of an attempt that ended while prefill computed.
func TestWaiters(t *testing.T) {
	for _, c := range All() {
		a := pair(t, "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"Hi"}]}`)
		calls := c.Cleanup(a, Orphan{PrefillSent: true, DecodeSent: true})
		repeats := slices.ContainsFunc(calls, func(call Cleanup) bool { return call.Until == UntilServed })
		if WaitsWithoutEnd(c) != repeats {
			t.Errorf("%s: WaitsWithoutEnd = %v, calls %+v", c.Name(), !repeats, calls)
		}
	}
}

// TestNothingIsHeldOnceDecodeTook: a decode engine that has begun to answer has read the
// KV. Then there is no clean-up, whatever the other facts of the attempt are. This also
// holds if prefill's answer is missing, because the proxy drops the prefill leg when
// decode takes over.
func TestNothingIsHeldOnceDecodeTook(t *testing.T) {
	for _, c := range All() {
		a := pair(t, "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"Hi"}]}`)
		for bits := range 64 {
			o := Orphan{
				KVRead: true, PrefillSent: bits&1 != 0, PrefillDone: bits&2 != 0, DecodeSent: bits&4 != 0,
				Refused: bits&8 != 0, DecodeIdle: bits&16 != 0, DecodeFailed: bits&32 != 0,
			}
			for _, call := range c.Cleanup(a, o) {
				if call.How == "engine_timeout" {
					t.Errorf("%s: a call of phase %s relies on the engine's time-out: %+v", c.Name(), call.Phase, o)
				}
			}
		}
	}
}
