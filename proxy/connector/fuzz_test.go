package connector

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// seeds adds a part of every golden case to a fuzz target.
func seeds(f *testing.F, connector string, part func(*golden)) {
	f.Helper()
	files, err := filepath.Glob(filepath.Join("testdata", connector, "*.json"))
	if err != nil || len(files) == 0 {
		f.Fatalf("no cases of %s: %v", connector, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		g := new(golden)
		if err := json.Unmarshal(text, g); err != nil {
			f.Fatal(err)
		}
		part(g)
	}
}

// fuzzReadPrefill reads arbitrary bytes as prefill's answer: they are rejected, or they
// give a whole answer or a decode leg that is valid JSON.
func fuzzReadPrefill(f *testing.F, connector string) {
	c, _ := ByName(connector)
	seeds(f, connector, func(g *golden) {
		if g.PrefillAnswer != nil {
			f.Add([]byte(*g.PrefillAnswer), g.API == "/v1/chat/completions", strings.Contains(g.Request, `"stream":true`))
		}
	})
	f.Fuzz(func(t *testing.T, answer []byte, chat, stream bool) {
		path, body := "/v1/completions", `{"prompt":"x"`
		if chat {
			path, body = "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}]`
		}
		if stream {
			body += `,"stream":true,"stream_options":{"include_usage":true}`
		}
		a := pair(t, path, body+"}")
		h, err := c.ReadPrefill(a, answer)
		if err != nil {
			if !errors.Is(err, ErrBadReply) || len(err.Error()) > 200 {
				t.Errorf("got error %q", err)
			}
			return
		}
		if h.Done {
			checkWholeAnswer(t, h.Answer, stream)
			return
		}
		leg, err := c.Decode(a, &h, nil)
		if err != nil {
			t.Fatal(err)
		}
		if !json.Valid(leg.Body) {
			t.Errorf("decode leg is no JSON: %q", leg.Body)
		}
		if connector == "vllm-nixl" && len(h.Params) > 0 && !bytes.Contains(leg.Body, h.Params) {
			t.Errorf("decode leg lost the params %q: %q", h.Params, leg.Body)
		}
		if h.Pinned == (len(c.Cleanup(a, Orphan{PrefillSent: true, PrefillDone: true, Handoff: &h})) == 0) {
			t.Errorf("Pinned = %v, but Cleanup disagrees", h.Pinned)
		}
	})
}

func checkWholeAnswer(t *testing.T, answer []byte, stream bool) {
	t.Helper()
	if !stream {
		if !json.Valid(answer) {
			t.Errorf("answer is no JSON: %q", answer)
		}
		return
	}
	events, ok := strings.CutSuffix(string(answer), "data: [DONE]\n\n")
	if !ok {
		t.Fatalf("stream does not end: %q", answer)
	}
	for event := range strings.SplitSeq(strings.TrimSuffix(events, "\n\n"), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		if !ok || strings.ContainsAny(data, "\r\n") || !json.Valid([]byte(data)) {
			t.Errorf("event %q", event)
		}
	}
}

func FuzzReadPrefillNixl(f *testing.F)     { fuzzReadPrefill(f, "vllm-nixl") }
func FuzzReadPrefillPush(f *testing.F)     { fuzzReadPrefill(f, "vllm-nixl-push") }
func FuzzReadPrefillP2PTier(f *testing.F)  { fuzzReadPrefill(f, "vllm-p2p-tier") }
func FuzzReadPrefillStore(f *testing.F)    { fuzzReadPrefill(f, "vllm-store") }
func FuzzReadPrefillMoRIIO(f *testing.F)   { fuzzReadPrefill(f, "vllm-moriio-read") }
func FuzzReadPrefillWrite(f *testing.F)    { fuzzReadPrefill(f, "vllm-moriio") }
func FuzzReadPrefillMooncake(f *testing.F) { fuzzReadPrefill(f, "vllm-mooncake") }
func FuzzReadPrefillSGLang(f *testing.F)   { fuzzReadPrefill(f, "sglang") }
func FuzzReadPrefillTRTLLM(f *testing.F)   { fuzzReadPrefill(f, "trtllm") }

// fuzzLegs builds legs from arbitrary requests: every leg is valid JSON without
// duplicate keys, and building it again gives the same leg.
func fuzzLegs(f *testing.F, connector string) {
	c, _ := ByName(connector)
	seeds(f, connector, func(g *golden) { f.Add([]byte(g.Request), g.API, g.Trust) })
	h := &Handoff{Params: []byte(`{"n":9007199254740993}`), Prompt: []byte(`[1,2]`), Usage: []byte(`{}`)}
	f.Fuzz(func(t *testing.T, body []byte, path string, trust bool) {
		api, ok := openai.APIFor(path)
		if !ok || !c.Serves(api) {
			return
		}
		var r openai.Request
		if openai.ParseRequest(api, body, &r) != nil {
			return
		}
		a := pair(t, "/v1/completions", `{"prompt":"x"}`)
		a.Request, a.Trust = &r, trust
		a.Prefill.Spec.Ranks, a.Decode.Spec.Ranks = 2, 2
		shapes := []func([]byte) (Leg, error){
			func(dst []byte) (Leg, error) { return c.Aggregated(a, dst) },
		}
		if c.Pairable(&r) == nil {
			shapes = append(shapes,
				func(dst []byte) (Leg, error) { return c.Prefill(a, dst) },
				func(dst []byte) (Leg, error) { return c.Decode(a, h, dst) })
		}
		before := string(body)
		if e, ok := c.(Encoder); ok {
			for i := range e.Encode(a) {
				shapes = append(shapes, func([]byte) (Leg, error) { return e.Encode(a)[i], nil })
			}
		}
		for i, shape := range shapes {
			leg, err := shape(nil)
			if err != nil {
				var refusal *openai.Error
				if !errors.As(err, &refusal) {
					t.Errorf("leg %d: %v", i, err)
				}
				continue
			}
			var o openai.Object
			if err := o.Parse(leg.Body); err != nil {
				t.Errorf("leg %d is unsound: %v: %q", i, err, leg.Body)
			}
			if again, _ := shape(make([]byte, 0, 8)); !bytes.Equal(again.Body, leg.Body) {
				t.Errorf("leg %d differs when shaped again", i)
			}
		}
		if string(body) != before {
			t.Error("the client's body was written to")
		}
	})
}

func FuzzLegsNixl(f *testing.F)     { fuzzLegs(f, "vllm-nixl") }
func FuzzLegsPush(f *testing.F)     { fuzzLegs(f, "vllm-nixl-push") }
func FuzzLegsP2PTier(f *testing.F)  { fuzzLegs(f, "vllm-p2p-tier") }
func FuzzLegsStore(f *testing.F)    { fuzzLegs(f, "vllm-store") }
func FuzzLegsMoRIIO(f *testing.F)   { fuzzLegs(f, "vllm-moriio") }
func FuzzLegsMooncake(f *testing.F) { fuzzLegs(f, "vllm-mooncake") }
func FuzzLegsSGLang(f *testing.F)   { fuzzLegs(f, "sglang") }
func FuzzLegsTRTLLM(f *testing.F)   { fuzzLegs(f, "trtllm") }
