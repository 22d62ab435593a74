package connector

import (
	"errors"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// TestUnfit lists the releases that get the prefill leg of a forced tool call.
func TestUnfit(t *testing.T) {
	const (
		chat      = `{"messages":[{"role":"user","content":"x"}],"tool_choice":`
		responses = `{"input":"x","tool_choice":`
		messages  = `{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"x"}],"tool_choice":`
		named     = `{"type":"function","function":{"name":"f"}}}`
	)
	for _, tt := range []struct {
		path, body string
		first      string // first release that gets it
		last       string // last release that does not
		sure       bool
	}{
		{"/v1/chat/completions", chat + `"required"}`, "0.18.0", "0.17.1", true},
		{"/v1/chat/completions", chat + ` ` + named, "0.21.0", "0.20.2", false},
		{"/v1/responses", responses + `"required"}`, "0.19.0", "0.18.0", true},
		{"/v1/responses", responses + `{"type":"function","name":"f"}}`, "0.21.0", "0.20.2", false},
		{"/v1/messages", messages + `{"type":"any"}}`, "0.18.0", "0.17.1", true},
		{"/v1/messages", messages + `{"type":"tool","name":"f"}}`, "0.21.0", "0.20.2", false},
		{"/v1/chat/completions", chat + `"auto"}`, "0.9.0", "", false},
		{"/v1/chat/completions", chat + `"none"}`, "0.9.0", "", false},
		{"/v1/chat/completions", chat + `null}`, "0.9.0", "", false},
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}]}`, "0.9.0", "", false},
		{"/v1/messages", messages + `{"type":"auto"}}`, "0.9.0", "", false},
		{"/v1/messages", messages + `"required"}`, "0.9.0", "", false},                     // rejected before it is computed
		{"/v1/completions", `{"prompt":"x","tool_choice":"required"}`, "0.9.0", "", false}, // this API has no such member
	} {
		api, _ := openai.APIFor(tt.path)
		var r openai.Request
		if err := openai.ParseRequest(api, []byte(tt.body), &r); err != nil {
			t.Fatal(err)
		}
		unfit := func(version string) (bool, error) {
			reason, sure, err := nixl{}.Unfit(&r, abi.Prefill, place(config.Engine{}, "10.0.0.5", 0, engine.Facts{Version: version}))
			if (reason == "forced_tool") != (err != nil) {
				t.Errorf("%s: reason %q of %v", version, reason, err)
			}
			return sure, err
		}
		if _, _, err := (nixl{}).Unfit(&r, abi.Decode, place(config.Engine{}, "10.0.0.5", 0, engine.Facts{Version: tt.last})); err != nil {
			t.Errorf("%s, %s: decode is unfit: %v", tt.path, tt.body, err)
		}
		for _, version := range []string{tt.first, tt.first + "rc1.dev3+g0123abc", "0.32.0+sim", "0.100.0", "1.0.0"} {
			if _, err := unfit(version); err != nil {
				t.Errorf("%s, %s, %s: (nixl{}).Unfit = %v, want nil", tt.path, tt.body, version, err)
			}
		}
		if tt.last == "" {
			if _, err := unfit(""); err != nil {
				t.Errorf("%s, %s: (nixl{}).Unfit = %v, want nil", tt.path, tt.body, err)
			}
			continue
		}
		for _, version := range []string{tt.last, "0.8.5.post1", "0.11.0+rocm", "", "0.1.dev1+g0123abc", "dev", "x.y", "0.-9.1"} {
			known := version != "" && version[0] == '0' && version[2] != '-' && version != "0.1.dev1+g0123abc"
			sure, err := unfit(version)
			var refusal *openai.Error
			if !errors.As(err, &refusal) || refusal.Param != "tool_choice" || sure != (tt.sure && known) {
				t.Errorf("%s %s: %q: %v, sure %v", tt.path, tt.body, version, err, sure)
			}
		}
	}
}

// TestDated: every connector with a one-token prefill leg on vLLM is Dated, and SGLang, whose older
// releases have fewer routes with a transfer.
func TestDated(t *testing.T) {
	for _, c := range All() {
		_, dated := c.(Dated)
		if want := c.Name() != "trtllm" && c.Name() != "none"; dated != want {
			t.Errorf("%s: %v", c.Name(), dated)
		}
	}
}

// TestResponseTools: two engines serve a response whose tools the client calls. A tool that the
// engine may call itself needs one engine for the whole response.
func TestResponseTools(t *testing.T) {
	nixl, _ := ByName(config.ConnectorVLLMNixl)
	for tools, pairable := range map[string]bool{
		`[]`:   true,
		`null`: true,
		`[{"type":"function","name":"f"},{"type":"namespace","name":"n","tools":[]},{"type":"web_search","external_web_access":false}]`: true,
		`[{"type":"custom","name":"apply_patch"},{"type":"tool_search"},{"type":"image_generation","output_format":"png"}]`:             true,
		`[{"type":"function","name":"f"},{"type":"web_search_preview"}]`:                                                                false,
		`[{"type":"code_interpreter","container":{"type":"auto"}}]`:                                                                     false,
		`[{"type":"container"}]`:              false,
		`[{"type":"mcp","server_label":"s"}]`: false,
		`[{"type":"of_a_later_release"}]`:     false,
		`[{"name":"f"}]`:                      false,
	} {
		r := new(openai.Request)
		if err := openai.ParseRequest(openai.Responses, []byte(`{"model":"m","input":"x","tools":`+tools+`}`), r); err != nil {
			t.Fatal(err)
		}
		if err := nixl.Pairable(r); (err == nil) != pairable {
			t.Errorf("%s: got %v", tools, err)
		}
	}
}
