package stableprefix

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// The User-Agents of the agents.
const (
	claudeCLI = "claude-cli/2.1.177 (external, cli)"
	openCode  = "opencode/1.18.18"
	qwenCode  = "QwenCode/0.14.1 (linux; x64)"
	library   = "OpenAI/Python 2.8.1"
)

// billing is the header of Claude Code with a hash.
func billing(hash string) string {
	return "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=" + hash + ";"
}

// changed returns the body after the rules, and the notes.
func changed(t testing.TB, config string, api API, userAgent, tenant, body string) (string, []string) {
	t.Helper()
	c, err := Parse(config)
	if err != nil {
		t.Fatal(err)
	}
	edits, effects := c.Apply(api, ByUserAgent(userAgent), tenant, []byte(body))
	var notes []string
	for _, e := range effects {
		notes = append(notes, e.Note())
	}
	if len(edits) == 0 {
		return body, notes
	}
	at := 0
	for _, e := range edits {
		if e.Start < at || e.End < e.Start || e.End > len(body) {
			t.Fatalf("edits %+v of %d bytes", edits, len(body))
		}
		at = e.End
	}
	e := Join([]byte(body), edits)
	return body[:e.Start] + string(e.Text) + body[e.End:], notes
}

// TestRules has requests in the form of each agent. A want that is empty means an unchanged body.
func TestRules(t *testing.T) {
	tests := []struct {
		name, rules, userAgent string
		api                    API
		body, want             string
		notes                  []string
	}{{
		name: "billing_header, the first block", userAgent: claudeCLI, api: Messages,
		body:  `{"model":"m","messages":[{"role":"user","content":"hi"}],"system":[{"type":"text","text":"` + billing("36ee5") + `"}, {"type":"text","text":"You are a coder.","cache_control":{"type":"ephemeral"}}],"max_tokens":1e2}`,
		want:  `{"model":"m","messages":[{"role":"user","content":"hi"}],"system":[{"type":"text","text":"You are a coder.","cache_control":{"type":"ephemeral"}}],"max_tokens":1e2}`,
		notes: []string{"billing_header removed 81 bytes"},
	}, {
		name: "billing_header, later block", userAgent: claudeCLI, api: Messages,
		body:  `{"system":[{"type":"text","text":"You are a coder."},{"type":"text","text":"` + billing("36ee5") + `"}],"messages":[]}`,
		want:  `{"system":[{"type":"text","text":"You are a coder."}],"messages":[]}`,
		notes: []string{"billing_header removed 81 bytes"},
	}, {
		name: "billing_header, text after it, workload pair", userAgent: claudeCLI, api: Messages,
		body:  `{"system":[{"type":"text","text":"` + billing("36ee5") + ` cc_workload=cron;\n\nYou are a coder."}],"messages":[]}`,
		want:  `{"system":[{"type":"text","text":"You are a coder."}],"messages":[]}`,
		notes: []string{"billing_header removed 103 bytes"},
	}, {
		name: "billing_header, a string", userAgent: claudeCLI, api: Messages,
		body:  `{"system":"` + billing("36ee5") + `You are a coder.","messages":[]}`,
		want:  `{"system":"You are a coder.","messages":[]}`,
		notes: []string{"billing_header removed 81 bytes"},
	}, {
		name: "billing_header, the only block", userAgent: claudeCLI, api: Messages,
		body:  `{"system":[{"type":"text","text":"` + billing("36ee5") + `"}],"messages":[]}`,
		want:  `{"system":[{"type":"text","text":""}],"messages":[]}`,
		notes: []string{"billing_header removed 81 bytes"},
	}, {
		name: "billing_header, a block with cache_control", userAgent: claudeCLI, api: Messages,
		body:  `{"system":[{"type":"text","text":"` + billing("36ee5") + `","cache_control":{"type":"ephemeral"}},{"type":"text","text":"A"}],"messages":[]}`,
		want:  `{"system":[{"type":"text","text":"","cache_control":{"type":"ephemeral"}},{"type":"text","text":"A"}],"messages":[]}`,
		notes: []string{"billing_header removed 81 bytes"},
	}, {
		name: "billing_header, two blocks, and a system message in the conversation", userAgent: claudeCLI, api: Messages,
		body:  `{"system":[{"type":"text","text":"` + billing("36ee5") + `"},{"type":"text","text":"` + billing("0aaa9") + `"},{"type":"text","text":"A"}],"messages":[{"role":"user","content":"hi"},{"role":"system","content":"` + billing("0aaa9") + `"}]}`,
		want:  `{"system":[{"type":"text","text":""},{"type":"text","text":"A"}],"messages":[{"role":"user","content":"hi"}]}`,
		notes: []string{"billing_header removed 243 bytes"},
	}, {
		name: "billing_header, converted to chat by a router", userAgent: library, api: Chat,
		body:  `{"model":"m","messages":[{"role":"system","content":"` + billing("36ee5") + `\n\nYou are Claude Code."},{"role":"user","content":"hi"}],"stream":true}`,
		want:  `{"model":"m","messages":[{"role":"system","content":"You are Claude Code."},{"role":"user","content":"hi"}],"stream":true}`,
		notes: []string{"billing_header removed 85 bytes"},
	}, {
		name: "billing_header, a message of its own", userAgent: library, api: Chat,
		body:  `{"messages":[{"role":"system","content":"` + billing("36ee5") + `"} , {"role":"system","content":"A"},{"role":"user","content":"hi"}]}`,
		want:  `{"messages":[{"role":"system","content":"A"},{"role":"user","content":"hi"}]}`,
		notes: []string{"billing_header removed 81 bytes"},
	}, {
		name: "billing_header, converted to responses", userAgent: library, api: Responses,
		body:  `{"instructions":"` + billing("36ee5") + `\nYou are Claude Code.","input":"hi"}`,
		want:  `{"instructions":"You are Claude Code.","input":"hi"}`,
		notes: []string{"billing_header removed 83 bytes"},
	}, {
		name: "billing_header, escapes of a router", userAgent: library, api: Responses,
		body:  `{"input":[{"role":"developer","content":[{"type":"input_text","text":"x\u002danthropic-billing-header:\u0020cc_version=1;\u000aYou are\u0020Claude Code."}]},{"role":"user","content":[{"type":"input_text","text":"hi"}]}]}`,
		want:  `{"input":[{"role":"developer","content":[{"type":"input_text","text":"You are\u0020Claude Code."}]},{"role":"user","content":[{"type":"input_text","text":"hi"}]}]}`,
		notes: []string{"billing_header removed 57 bytes"},
	}, {
		name: "billing_header, other texts", userAgent: claudeCLI, api: Messages,
		body: `{"system":[{"type":"text","text":"x-anthropic-billing-header: what is it?"},{"type":"text","text":"The header x-anthropic-billing-header: cch=1; is a header."},{"type":"text","text":"x-anthropic-billing-header:"}],` +
			`"messages":[{"role":"user","content":"` + billing("36ee5") + `"},{"role":"user","content":[{"type":"text","text":"` + billing("36ee5") + `"},{"type":"tool_result","content":"` + billing("36ee5") + `"}]},{"role":"assistant","content":"` + billing("36ee5") + `"}],"metadata":{"system":"` + billing("36ee5") + `"}}`,
	}, {
		name: "billing_header of an unknown client", userAgent: library, api: Messages,
		body: `{"system":[{"type":"text","text":"You are a router."},{"type":"text","text":"` + billing("36ee5") + `"}],"messages":[]}`,
	}, {
		name: "token_budget", rules: "token_budget", userAgent: claudeCLI, api: Messages,
		body:  `{"system":[{"type":"text","text":"You are a coder.\n<total_tokens>14999436 tokens left</total_tokens>\n<total_tokens>14990001 tokens left</total_tokens>"}],"messages":[{"role":"system","content":"<total_tokens>7 tokens left</total_tokens>"},{"role":"user","content":"<total_tokens>5 tokens left</total_tokens>"}]}`,
		want:  `{"system":[{"type":"text","text":"You are a coder.\n"}],"messages":[{"role":"user","content":"<total_tokens>5 tokens left</total_tokens>"}]}`,
		notes: []string{"token_budget removed 142 bytes"},
	}, {
		name: "token_budget, other texts", rules: "token_budget", userAgent: claudeCLI, api: Messages,
		body: `{"system":"<total_tokens> is a tag.\nThe tag <total_tokens>5</total_tokens>\n<total_tokens>5</total_tokens> is a counter","messages":[]}`,
	}, {
		name: "env_date, OpenCode", rules: "env_date", userAgent: openCode, api: Chat,
		body:  `{"messages":[{"role":"system","content":"You are OpenCode.\n<env>\n  Platform: linux\n  Today's date: Mon Sep 07 2026\n</env>\nBe brief."},{"role":"user","content":"fix it"},{"role":"assistant","content":"done"},{"role":"user","content":"more"}]}`,
		want:  `{"messages":[{"role":"system","content":"You are OpenCode.\n<env>\n  Platform: linux\n</env>\nBe brief."},{"role":"user","content":"  Today's date: Mon Sep 07 2026\n\nfix it"},{"role":"assistant","content":"done"},{"role":"user","content":"more"}]}`,
		notes: []string{"env_date moved 33 bytes"},
	}, {
		name: "env_date, Claude Code", rules: "safe, env_date", userAgent: claudeCLI, api: Messages,
		body:  `{"messages":[{"role":"user","content":[{"type":"tool_result","content":"x"},{"type":"text","text":"fix it"}]}],"system":[{"type":"text","text":"` + billing("36ee5") + `"},{"type":"text","text":"\u003cenv\u003e\nToday\u0027s date: 2026-11-30"}]}`,
		want:  `{"messages":[{"role":"user","content":[{"type":"tool_result","content":"x"},{"type":"text","text":"Today\u0027s date: 2026-11-30\n\nfix it"}]}],"system":[{"type":"text","text":"\u003cenv\u003e\n"}]}`,
		notes: []string{"billing_header removed 81 bytes", "env_date moved 29 bytes"},
	}, {
		name: "env_date, other texts", rules: "env_date", userAgent: openCode, api: Chat,
		body: `{"messages":[{"role":"system","content":"The line with Today's date: is important.\nToday's date: ` + strings.Repeat("x", maxLine) + `"},{"role":"user","content":"Today's date: 2026-11-30"}]}`,
	}, {
		name: "env_date without a user message", rules: "env_date", userAgent: openCode, api: Chat,
		body: `{"messages":[{"role":"system","content":"Today's date: 2026-11-30"},{"role":"user","content":[{"type":"image_url"}]}]}`,
	}, {
		name: "git_status, with a counter after it", rules: "token_budget, git_status", userAgent: claudeCLI, api: Messages,
		body:  `{"system":[{"type":"text","text":"A\n\ngitStatus: This is the git status at the start of the conversation.\nCurrent branch: main\n<total_tokens>5 tokens left</total_tokens>"}],"messages":[{"role":"user","content":"fix it"}]}`,
		want:  `{"system":[{"type":"text","text":"A\n\n"}],"messages":[{"role":"user","content":"gitStatus: This is the git status at the start of the conversation.\nCurrent branch: main\n\n\nfix it"}]}`,
		notes: []string{"token_budget removed 42 bytes", "git_status moved 91 bytes"},
	}, {
		name: "git_status, other texts", rules: "git_status", userAgent: claudeCLI, api: Messages,
		body: `{"system":"gitStatus: clean\nThe line gitStatus: This is the git status","messages":[{"role":"user","content":"gitStatus: This is the git status"}]}`,
	}, {
		name: "clock", rules: "clock", userAgent: library, api: Chat,
		body:  `{"messages":[{"role":"system","content":"You are an expert coding assistant operating inside pi, a coding agent harness. Be brief.\nCurrent date and time: Monday, March 9, 2026 at 06:00:31 PM PDT\nCurrent working directory: /w"},{"role":"user","content":"one"},{"role":"assistant","content":"1"},{"role":"user","content":[{"type":"text","text":"two"}]},{"role":"tool","content":"x"}]}`,
		want:  `{"messages":[{"role":"system","content":"You are an expert coding assistant operating inside pi, a coding agent harness. Be brief.\nCurrent working directory: /w"},{"role":"user","content":"one"},{"role":"assistant","content":"1"},{"role":"user","content":[{"type":"text","text":"Current date and time: Monday, March 9, 2026 at 06:00:31 PM PDT\n\ntwo"}]},{"role":"tool","content":"x"}]}`,
		notes: []string{"clock moved 65 bytes"},
	}, {
		name: "clock, other agents", rules: "clock", userAgent: openCode, api: Chat,
		body: `{"messages":[{"role":"system","content":"Current date and time: now"},{"role":"user","content":"one"}]}`,
	}, {
		name: "clock and date in one message", rules: "env_date, clock\nclients = any", userAgent: library, api: Responses,
		body:  `{"instructions":"Current date and time: now\nToday's date: 2026-11-30\nBe brief.","input":"hi"}`,
		want:  `{"instructions":"Be brief.","input":"Today's date: 2026-11-30\n\nCurrent date and time: now\n\nhi"}`,
		notes: []string{"env_date moved 26 bytes", "clock moved 28 bytes"},
	}, {
		name: "tool_order, Messages", rules: "tool_order", userAgent: claudeCLI, api: Messages,
		body:  `{"tools":[{"name":"b","input_schema":{"n":1.0}}, {"cache_control":{"type":"ephemeral"},"name":"c"},{"name":"a"}],"messages":[]}`,
		want:  `{"tools":[{"name":"a"}, {"name":"b","input_schema":{"n":1.0},"cache_control":{"type":"ephemeral"}},{"name":"c"}],"messages":[]}`,
		notes: []string{"tool_order moved 98 bytes"},
	}, {
		name: "tool_order, cache_control of the last tool", rules: "tool_order", userAgent: claudeCLI, api: Messages,
		body:  `{"tools":[{"name":"b"},{"name":"a" , "cache_control":{"type":"ephemeral"} }]}`,
		want:  `{"tools":[{"name":"a"  },{"name":"b","cache_control":{"type":"ephemeral"}}]}`,
		notes: []string{"tool_order moved 64 bytes"},
	}, {
		name: "tool_order, Chat", rules: "tool_order", userAgent: qwenCode, api: Chat,
		body:  `{"messages":[],"tools":[{"type":"function","function":{"name":"z","parameters":{"name":"a"}}},{"type":"function","function":{"name":"b"}}]}`,
		want:  `{"messages":[],"tools":[{"type":"function","function":{"name":"b"}},{"type":"function","function":{"name":"z","parameters":{"name":"a"}}}]}`,
		notes: []string{"tool_order moved 112 bytes"},
	}, {
		name: "tool_order, Responses", rules: "tool_order", userAgent: openCode, api: Responses,
		body:  `{"input":"hi","tools":[{"type":"web_search"},{"type":"function","name":"a"}]}`,
		want:  `{"input":"hi","tools":[{"type":"function","name":"a"},{"type":"web_search"}]}`,
		notes: []string{"tool_order moved 51 bytes"},
	}, {
		name: "tool_order, sorted", rules: "tool_order", userAgent: openCode, api: Responses,
		body: `{"input":"hi","tools":[{"type":"function","name":"a"}, {"type":"function","name":"b"}]}`,
	}, {
		name: "tool_order, no objects", rules: "tool_order", userAgent: openCode, api: Responses,
		body: `{"input":"hi","tools":["b",{"name":"a"}]}`,
	}, {
		name: "no rules that change the question without their names", userAgent: claudeCLI, api: Messages,
		body: `{"system":"<total_tokens>5 tokens left</total_tokens>\nToday's date: 2026-11-30\nCurrent date and time: now\ngitStatus: This is the git status","tools":[{"name":"b"},{"name":"a"}],"messages":[{"role":"user","content":"x"}]}`,
	}, {
		name: "no rule", rules: "none", userAgent: claudeCLI, api: Messages, body: `{"system":"` + billing("1") + `"}`,
	}}
	acted := map[string]bool{}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			config := ""
			if tt.rules != "" {
				config = "rules = " + tt.rules
			}
			want := tt.want
			if want == "" {
				want = tt.body
			}
			got, notes := changed(t, config, tt.api, tt.userAgent, "", tt.body)
			if got != want || !reflect.DeepEqual(notes, tt.notes) {
				t.Errorf("got  %s\nwant %s\nnotes %q, want %q", got, want, notes, tt.notes)
			}
			if !json.Valid([]byte(tt.body)) || !json.Valid([]byte(got)) {
				t.Error("not JSON")
			}
			again, _ := changed(t, config, tt.api, tt.userAgent, "", got)
			if again != got && !strings.Contains(tt.name, "clock") {
				t.Errorf("a second run gives %s", again)
			}
		})
		for _, n := range tt.notes {
			rule, _, _ := strings.Cut(n, " ")
			acted[rule] = true
		}
	}
	for _, r := range Rules {
		if !acted[r.Name] {
			t.Errorf("no test of the rule %s", r.Name)
		}
	}
}

// TestSameForEachTurn: two requests that differ only in what the agent changes are equal
// afterwards.
func TestSameForEachTurn(t *testing.T) {
	body := func(hash string) string {
		return `{"model":"m","messages":[{"role":"user","content":"hi"}],"system":[{"type":"text","text":"` + billing(hash) + `"},{"type":"text","text":"A"}]}`
	}
	a, _ := changed(t, "", Messages, claudeCLI, "", body("36ee5"))
	b, _ := changed(t, "", Messages, claudeCLI, "", body("0aaa9"))
	if a != b {
		t.Errorf("%s\n%s", a, b)
	}
}

// TestBrokenBodies: bodies that are no objects stay unchanged.
func TestBrokenBodies(t *testing.T) {
	for _, body := range []string{
		``, ` `, `null`, `"x"`, `[1]`, `{`, `{"system"`, `{"system":`, `{"system":"` + billing("1"), `{"system":"` + billing("1") + `"`, `{system:"x"}`,
		`{"system":"x\`, `{"system":["` + billing("1") + `"}`, "\x1f\x8b\x08", `{"messages":[{"role":"system","content":"` + billing("1") + `"}`, `{"a":1]`,
	} {
		for _, api := range []API{Chat, Messages, Responses} {
			if got, notes := changed(t, "clients = any\nrules = safe, tool_order", api, "", "", body); got != body || notes != nil {
				t.Errorf("%q became %q, notes %q", body, got, notes)
			}
		}
	}
}

func TestAPIOf(t *testing.T) {
	for path, want := range map[string]API{
		"/v1/chat/completions": Chat, "/v1/messages": Messages, "/v1/messages/": Messages, "/v1/messages?beta=true": Messages,
		"/v1/messages/count_tokens": Messages, "/v1/responses": Responses, "/v1/completions": NoAPI, "/": NoAPI, "": NoAPI, "/v1/responses/r1": NoAPI,
	} {
		if got := APIOf(path); got != want {
			t.Errorf("APIOf(%q) = %v", path, got)
		}
	}
}

func TestRecognition(t *testing.T) {
	for userAgent, want := range map[string]Agents{claudeCLI: ClaudeCode, openCode: OpenCode, qwenCode: QwenCode, library: 0, "": 0, "claude-cl": 0} {
		if got := ByUserAgent(userAgent); got != want {
			t.Errorf("ByUserAgent(%q) = %v", userAgent, got)
		}
	}
	for text, want := range map[string]Agents{
		billing("1"): ClaudeCode, `You are Claude Code, Anthropic\u0027s official CLI.`: ClaudeCode, "You are opencode, an agent": OpenCode, "You are Qwen Code, an agent": QwenCode,
		"You are an expert coding assistant operating inside pi, a coding agent harness.": Pi, "I think that You are Claude Code, Anthropic": 0, "": 0,
	} {
		if got := recognize([]byte(text)); got != want {
			t.Errorf("recognize(%q) = %v", text, got)
		}
		if got := Mentions([]byte(`{"messages":[{"role":"system","content":"` + text)); want != 0 && !got {
			t.Errorf("Mentions(%q) = false", text)
		}
	}
	if Mentions([]byte(`{"messages":[{"role":"user","content":"hi"}]}`)) {
		t.Error("Mentions finds an agent in another body")
	}
}

// FuzzApply: edits are in their order and inside the body. A JSON text stays one. A body without a
// note is unchanged.
func FuzzApply(f *testing.F) {
	for _, body := range []string{
		`{"model":"m","messages":[{"role":"user","content":"hi"}],"system":[{"type":"text","text":"` + billing("36ee5") + `"},{"type":"text","text":"Today's date: 1\n<total_tokens>5</total_tokens>\ngitStatus: This is the git status"}],"tools":[{"name":"b","cache_control":1},{"name":"a"}]}`,
		`{"messages":[{"role":"system","content":"` + billing("1") + `"},{"role":"system","content":[{"text":"` + billing("1") + `"},{"text":"Current date and time: now"}]},{"role":"user","content":[{"text":"x"}]}],"tools":[{"function":{"name":"b"}},{"function":{"name":"a"}, "cache_control":null}]}`,
		`{"instructions":"Today\u0027s date: 1\u000aCurrent date and time: 2","input":"hi"}`, `{"input":[{"role":"developer","content":"\\nToday's date: 1\\"}]}`,
	} {
		f.Add(body)
	}
	all := "clients = any\nrules = safe, token_budget, env_date, git_status, clock, tool_order"
	f.Fuzz(func(t *testing.T, body string) {
		for _, api := range []API{Chat, Messages, Responses} {
			got, notes := changed(t, all, api, "", "", body)
			if json.Valid([]byte(body)) && !json.Valid([]byte(got)) {
				t.Fatalf("%s became %s", body, got)
			}
			if len(notes) == 0 && got != body {
				t.Fatalf("%s became %s without a note", body, got)
			}
		}
	})
}
