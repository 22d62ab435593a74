package connector

import (
	"path/filepath"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// plainest is the simplest request of each API that generates.
var plainest = map[openai.API]string{
	openai.Completions:  `{"model":"m","prompt":"Hi"}`,
	openai.Chat:         `{"model":"m","messages":[{"role":"user","content":"Hi"}]}`,
	openai.Responses:    `{"model":"m","input":"Hi"}`,
	openai.Messages:     `{"model":"m","messages":[{"role":"user","content":"Hi"}],"max_tokens":5}`,
	openai.Generate:     `{"text":"Hi"}`,
	openai.VLLMGenerate: `{"model":"m","token_ids":[1],"sampling_params":{}}`,
}

// TestGoldenCoversEveryMessage: there is a golden file for each message of each
// connector: both legs and prefill's answer for each API that it splits, the one leg of
// an aggregated request, and each kind of clean-up.
func TestGoldenCoversEveryMessage(t *testing.T) {
	for _, c := range All() {
		t.Run(c.Name(), func(t *testing.T) {
			files, err := filepath.Glob(filepath.Join("testdata", c.Name(), "*.json"))
			if err != nil {
				t.Fatal(err)
			}
			seen, ways := make(map[string]bool), make(map[string]bool)
			for _, file := range files {
				g := readGolden(t, file)
				api, _ := openai.APIFor(g.API)
				seen["aggregated"] = seen["aggregated"] || g.Aggregated != nil
				if g.PrefillLeg != nil && g.DecodeLeg != nil {
					seen[api.String()+" legs"] = true
				}
				if g.PrefillAnswer != nil && (g.Handoff == nil || !g.Handoff.Bad) {
					seen[api.String()+" answer"] = true
				}
				for _, clean := range g.Cleanups {
					for _, call := range clean.Calls {
						ways[call.How] = true
					}
				}
				if g.Prefill == nil || g.NotPairable != nil {
					continue
				}
				for _, how := range waysOf(t, c, g) {
					if _, known := ways[how]; !known {
						ways[how] = false
					}
				}
			}
			for how, golden := range ways {
				if !golden {
					t.Errorf("no file has a clean-up by %s", how)
				}
			}
			need := []string{"aggregated"}
			for api, body := range plainest {
				if c.Flow() == abi.FlowAggregated || !c.Serves(api) || c.Pairable(request(t, api.Path(), body)) != nil {
					continue
				}
				need = append(need, api.String()+" legs", api.String()+" answer")
			}
			for _, what := range need {
				if !seen[what] {
					t.Errorf("no file has %s", what)
				}
			}
		})
	}
}

// waysOf lists the kinds of clean-up that c uses for the resources that an attempt of g
// may leave.
func waysOf(t *testing.T, c Connector, g *golden) (hows []string) {
	a := g.attempt(t, c)
	var h *Handoff
	if g.PrefillAnswer != nil {
		if got, err := c.ReadPrefill(a, []byte(*g.PrefillAnswer)); err == nil {
			h = &got
		}
	}
	for bits := range 64 {
		o := Orphan{
			PrefillSent: bits&1 != 0, PrefillDone: bits&2 != 0, DecodeSent: bits&4 != 0,
			KVRead: bits&8 != 0, Refused: bits&16 != 0, DecodeIdle: bits&32 != 0,
		}
		if o.PrefillDone {
			o.Handoff = h
		}
		for _, call := range c.Cleanup(a, o) {
			hows = append(hows, call.How)
		}
	}
	return hows
}
