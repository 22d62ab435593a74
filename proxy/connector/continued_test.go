package connector

import (
	"encoding/json"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// TestContinuedLegs: the ids that a leg asks for, and those that are its prompt, are in the body of
// each leg of all golden cases of vLLM and SGLang. They change nothing else.
func TestContinuedLegs(t *testing.T) {
	legs := 0
	for _, c := range All() {
		files, err := filepath.Glob(filepath.Join("testdata", c.Name(), "*.json"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			g := readGolden(t, file)
			a := g.attempt(t, c)
			if a.Request.API != openai.Completions && a.Request.API != openai.Chat || c.Name() == (trtllm{}).Name() {
				continue
			}
			for phase, build := range g.legs(c) {
				a.ReturnIDs, a.PromptIDs = false, nil
				plain, err := build(a)
				if err != nil {
					continue // the golden test has the reason
				}
				a.ReturnIDs = phase != "prefill"
				if _, takes := c.(Tokened); takes && a.Request.Prompt != openai.PromptNone {
					a.PromptIDs = []byte("[7,8]")
				}
				leg, err := build(a)
				if err != nil {
					t.Fatalf("%s, %s leg: %v", file, phase, err)
				}
				want, got := membersOf(t, plain.Body), membersOf(t, leg.Body)
				if a.ReturnIDs {
					if string(got["return_token_ids"]) != "true" {
						t.Errorf("%s, %s leg: no ids are asked for: %s", file, phase, leg.Body)
					}
					delete(got, "return_token_ids")
					delete(want, "return_token_ids")
				}
				if a.PromptIDs != nil && a.Request.API == openai.Completions {
					if string(got["prompt"]) != "[7,8]" {
						t.Errorf("%s, %s leg: no prompt of ids: %s", file, phase, leg.Body)
					}
					delete(got, "prompt")
					delete(want, "prompt")
				} else if a.PromptIDs != nil {
					params := membersOf(t, got["kv_transfer_params"])
					if string(params["prompt_token_ids"]) != "[7,8]" {
						t.Errorf("%s, %s leg: no prompt of ids: %s", file, phase, leg.Body)
					}
					delete(params, "prompt_token_ids")
					was := map[string]json.RawMessage{}
					if raw := want["kv_transfer_params"]; raw != nil {
						was = membersOf(t, raw)
					}
					if !reflect.DeepEqual(params, was) {
						t.Errorf("%s, %s leg: the parameters are %v, want %v", file, phase, params, was)
					}
					delete(got, "kv_transfer_params")
					delete(want, "kv_transfer_params")
				}
				if len(leg.Header) == len(plain.Header) && !reflect.DeepEqual(got, want) {
					t.Errorf("%s, %s leg: got %s, want the members of %s", file, phase, leg.Body, plain.Body)
				}
				legs++
			}
		}
	}
	if legs < 50 {
		t.Errorf("only %d legs were compared", legs)
	}
}
