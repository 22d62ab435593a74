package conformance

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/coder/websocket"
	"github.com/klauspost/compress/zstd"

	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// The requests of the agents Codex and Claude Code, in their order, as their programs send them:
// Codex 0.171.0 and Claude Code 2.1.332 in front of a recorder. Texts, tools and ids are shorter
// here. Each function names the source of its facts.

// agentCall is a call of a tool, as an agent reads it from the events of a stream.
type agentCall struct{ ID, Name, Arguments string }

// agentConnectors runs a test with each connector that carries the agents' APIs as two legs.
func agentConnectors(t *testing.T, run func(t *testing.T, connector string)) {
	eachConnector(t, func(t *testing.T, connector string) {
		if kindOf(connector) != enginesim.ConnectorTRTLLM {
			run(t, connector)
		}
	})
}

// codexHeader are the header lines of a turn. Sources: openai/codex
// codex-rs/codex-api/src/requests/headers.rs (session-id, thread-id, x-client-request-id) and
// codex-rs/core/src/client.rs (x-codex-*, accept).
func codexHeader(more ...string) []string {
	return append([]string{
		"Accept", "text/event-stream", "Accept-Encoding", "zstd,gzip", "Authorization", "Bearer none",
		"Originator", "codex_exec", "User-Agent", "codex_exec/0.171.0 (Debian 12.0.0; x86_64) xterm (codex_exec; 0.171.0)",
		"Session-Id", "01a220cb", "Thread-Id", "01a220cb", "X-Client-Request-Id", "01a220cb",
		"X-Codex-Beta-Features", "remote_compaction_v2", "X-Codex-Window-Id", "01a220cb:0",
		"X-Codex-Turn-Metadata", `{"session_id":"01a220cb","turn_id":"01a220cc","request_kind":"turn","sandbox":"seccomp"}`,
	}, more...)
}

// codexBody is the body of a turn. Source: openai/codex codex-rs/codex-api/src/common.rs
// ResponsesApiRequest; the members after include are those of 0.171.0. A compaction has no tools.
func codexBody(tools bool, items ...string) string {
	list := ""
	if tools {
		list = `{"type":"function","name":"exec_command","description":"Runs a command.","strict":false,"parameters":{"type":"object","properties":{"cmd":{"type":"string"}},"required":["cmd"],"additionalProperties":false}},` +
			`{"type":"namespace","name":"multi_agent_v1","description":"Agents.","tools":[{"type":"function","name":"close_agent","strict":false,"parameters":{"type":"object","properties":{}}}]},` +
			`{"type":"web_search","external_web_access":false}`
	}
	return `{"model":"sim","stream":true,"input":[` + strings.Join(items, ",") + `],"tools":[` + list + `],"tool_choice":"auto","parallel_tool_calls":true,` +
		`"reasoning":{"summary":"auto"},"store":false,"include":["reasoning.encrypted_content"],"prompt_cache_key":"01a220cb",` +
		`"client_metadata":{"session_id":"01a220cb","x-codex-turn-metadata":"{\"turn_id\":\"01a220cc\"}"}}`
}

func codexMessage(role, text string) string {
	return `{"type":"message","id":"msg_01a220cb","role":"` + role + `","content":[{"type":"input_text","text":` + quoted(text) + `}]}`
}

// TestCodex: Codex finds no WebSocket, continues with POST at once, gets the call of a tool, sends
// the result of the tool, and compacts the conversation. Prefill and decode run on two engines.
func TestCodex(t *testing.T) {
	agentConnectors(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{})
		// codex-rs/codex-api/src/endpoint/models.rs ModelsClient::list_models
		if got := f.call("GET", "/v1/models?client_version=0.171.0"); got.status != 200 || !strings.Contains(got.body, `"id":"sim"`) {
			t.Errorf("models: got status %d: %s", got.status, got.body)
		}
		// codex-rs/core/src/client.rs RESPONSES_WEBSOCKETS_V2_BETA_HEADER_VALUE, and 426 in
		// stream_responses_websocket
		_, resp, err := websocket.Dial(t.Context(), f.url+responsesPath, &websocket.DialOptions{HTTPHeader: http.Header{"OpenAI-Beta": {"responses_websockets=2026-02-06"}}})
		if err == nil || resp == nil || resp.StatusCode != http.StatusUpgradeRequired {
			t.Errorf("WebSocket: got %v, %v, want 426", resp, err)
		}
		items := []string{codexMessage("developer", "You are a coding agent."), codexMessage("user", "run it <call exec_command cmd> <eos6>")}
		call := codexCall(t, f.codexTurn(codexBody(true, items...)))
		if want := codexCall(t, f.post(t.Context(), f.alone.URL(), responsesPath, codexBody(true, items...))); call.Name != "exec_command" || call.Arguments != want.Arguments {
			t.Errorf("got the call %q, one engine alone makes %q", call, want)
		}
		// codex-rs/protocol/src/models.rs ResponseItem::FunctionCall and FunctionCallOutput
		items = append(items,
			fmt.Sprintf(`{"type":"function_call","status":"completed","name":%s,"arguments":%s,"call_id":%s}`, quoted(call.Name), quoted(call.Arguments), quoted(call.ID)),
			fmt.Sprintf(`{"type":"function_call_output","id":"fco_01a220d6","call_id":%s,"output":"Process exited with code 0\nOutput:\nwords\n"}`, quoted(call.ID)))
		second := codexBody(true, items...)
		f.right(f.codexTurn(second), responsesPath, second)
		// codex-rs/codex-client/src/request.rs RequestCompression::Zstd
		encoder, _ := zstd.NewWriter(nil)
		coded := string(encoder.EncodeAll([]byte(second), nil))
		f.right(f.post(t.Context(), f.url, responsesPath, coded, codexHeader("Content-Encoding", "zstd")...), responsesPath, second)
		// codex-rs/core/src/compact.rs: a turn without tools
		compaction := codexBody(false, append(items, codexMessage("user", "Create a handoff summary <eos9>"))...)
		f.right(f.codexTurn(compaction), responsesPath, compaction)
		// codex-rs/codex-api/src/endpoint/compact.rs: only with OpenAI's own endpoint. No engine has
		// the route.
		if got := f.try(responsesPath+"/compact", `{"model":"sim","input":[],"instructions":""}`); got.status != 404 || !strings.Contains(got.body, `"code":"not_found"`) {
			t.Errorf("compact: got status %d: %s", got.status, got.body)
		}
	})
}

// codexTurn sends a turn and returns the stream, which both engines made.
func (f *fleet) codexTurn(body string) answer {
	f.t.Helper()
	got := f.post(f.t.Context(), f.url, responsesPath, body, codexHeader()...)
	whole := f.connector == enginesim.ConnectorVLLMNixlPush // no header names a response on both legs
	if got.status != 200 || got.err != nil || !got.done || (got.header.Get("X-Pdproxy-Prefill") == "") != whole || got.header.Get("Content-Encoding") != "" {
		f.t.Fatalf("got status %d, done %v, err %v, header %v: %s", got.status, got.done, got.err, got.header, got.body)
	}
	return got
}

// codexCall reads the call of a stream as Codex does: from response.output_item.done, and the
// stream is complete only with response.completed (codex-rs/codex-api/src/sse/responses.rs).
func codexCall(t *testing.T, a answer) (call agentCall) {
	t.Helper()
	var deltas strings.Builder
	completed := ""
	eachEvent(t, a, func(event []byte) {
		var e struct {
			Type, Delta string
			Item        struct {
				Type, Name, Arguments string
				CallID                string `json:"call_id"`
			}
			Response struct{ ID string }
		}
		if err := json.Unmarshal(event, &e); err != nil {
			t.Fatal(err)
		}
		switch e.Type {
		case "response.function_call_arguments.delta":
			deltas.WriteString(e.Delta)
		case "response.output_item.done":
			call = agentCall{e.Item.CallID, e.Item.Name, e.Item.Arguments}
		case "response.completed":
			completed = e.Response.ID
		}
	})
	if completed == "" || call.ID == "" || call.Arguments != deltas.String() || !json.Valid([]byte(call.Arguments)) {
		t.Fatalf("got the call %q with the deltas %q in %s", call, &deltas, a.body)
	}
	return call
}

// eachEvent calls do with the data of each event of a stream.
func eachEvent(t *testing.T, a answer, do func(data []byte)) {
	t.Helper()
	for line := range strings.SplitSeq(a.body, "\n") {
		if data, ok := strings.CutPrefix(line, "data: "); ok && data != "[DONE]" {
			do([]byte(data))
		}
	}
}

const claudePath = "/v1/messages?beta=true"

// claudeHeader are the header lines of a request. Source:
// https://code.claude.com/docs/en/llm-gateway-protocol (anthropic-*, X-Claude-Code-Session-Id).
func claudeHeader() []string {
	return []string{
		"Accept", "application/json", "Accept-Encoding", "gzip, deflate, br, zstd", "X-Api-Key", "none", "User-Agent", "claude-cli/2.1.332 (external, sdk-cli)",
		"X-Claude-Code-Session-Id", "0ae3b157", "X-App", "cli", "X-Stainless-Retry-Count", "0", "X-Stainless-Timeout", "600",
		"Anthropic-Beta", "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27", "Anthropic-Version", "2023-06-01",
		"Anthropic-Dangerous-Direct-Browser-Access", "true",
	}
}

// claudeBody is the body of a request with those messages after the first two, which have the roles
// user and system.
func claudeBody(messages ...string) string {
	list := append([]string{
		`{"role":"user","content":[{"type":"text","text":"<system-reminder>\nBe brief.\n</system-reminder>"},{"type":"text","text":"run it <call Bash command> <eos6>"}]}`,
		`{"role":"system","content":[{"type":"text","text":"# Environment\nlinux","cache_control":{"type":"ephemeral"}}]}`,
	}, messages...)
	return `{"model":"sim","messages":[` + strings.Join(list, ",") + `],` +
		`"system":[{"type":"text","text":"x-anthropic-billing-header: cc_version=2.1.332.1c9; cc_entrypoint=sdk-cli;"},{"type":"text","text":"You are an agent.","cache_control":{"type":"ephemeral"}}],` +
		`"tools":[{"name":"Bash","description":"Executes a command.","input_schema":{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","properties":{"command":{"type":"string"}},"required":["command"],"additionalProperties":false}}],` +
		`"metadata":{"user_id":"{\"device_id\":\"4556\",\"session_id\":\"0ae3b157\"}"},"max_tokens":3200,"thinking":{"type":"adaptive","display":"omitted"},` +
		`"context_management":{"edits":[{"type":"clear_thinking_20251015","keep":"all"}]},"output_config":{"effort":"high"},"stream":true}`
}

// TestClaudeCode: Claude Code probes the address, lists the models, gets the call of a tool, and
// sends the result of the tool. Prefill and decode run on two engines.
func TestClaudeCode(t *testing.T) {
	agentConnectors(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, fleetOptions{})
		// The program ignores the status of this probe.
		if got := f.call("HEAD", "/api/hello"); got.status != 404 || got.body != "" {
			t.Errorf("probe: got status %d: %s", got.status, got.body)
		}
		// https://code.claude.com/docs/en/llm-gateway-protocol, model discovery: data[].id
		if got := f.call("GET", "/v1/models?limit=1000"); got.status != 200 || !strings.Contains(got.body, `"data":[{"id":"sim"`) {
			t.Errorf("models: got status %d: %s", got.status, got.body)
		}
		first := claudeBody()
		call := claudeCall(t, f.claudeTurn(first))
		if want := claudeCall(t, f.post(t.Context(), f.alone.URL(), claudePath, first)); call.Name != "Bash" || call.Arguments != want.Arguments {
			t.Errorf("got the call %q, one engine alone makes %q", call, want)
		}
		second := claudeBody(
			fmt.Sprintf(`{"role":"assistant","content":[{"type":"tool_use","id":%s,"name":"Bash","input":%s}]}`, quoted(call.ID), call.Arguments),
			fmt.Sprintf(`{"role":"user","content":[{"tool_use_id":%s,"type":"tool_result","content":"words","is_error":false,"cache_control":{"type":"ephemeral"}}]}`, quoted(call.ID)))
		f.right(f.claudeTurn(second), claudePath, second)
		// The optional endpoint of the same page.
		const count = "/v1/messages/count_tokens?beta=true"
		tokens := `{"model":"sim","messages":[{"role":"user","content":"how many"}],"tools":[]}`
		got, want := f.post(t.Context(), f.url, count, tokens, claudeHeader()...), f.post(t.Context(), f.alone.URL(), count, tokens)
		if got.status != 200 || got.body != want.body || !strings.Contains(got.body, `"input_tokens":`) {
			t.Errorf("count_tokens: got status %d: %s, want %s", got.status, got.body, want.body)
		}
		unknown := f.post(t.Context(), f.url, claudePath, strings.Replace(first, `"sim"`, `"claude-none"`, 1), claudeHeader()...)
		if unknown.status != 404 || !strings.HasPrefix(unknown.body, `{"type":"error","error":{`) {
			t.Errorf("unknown model: got status %d: %s", unknown.status, unknown.body)
		}
	})
}

// claudeTurn sends a request and returns the stream, which both engines made.
func (f *fleet) claudeTurn(body string) answer {
	f.t.Helper()
	got := f.post(f.t.Context(), f.url, claudePath, body, claudeHeader()...)
	if got.status != 200 || got.err != nil || !got.done || got.header.Get("X-Pdproxy-Prefill") == "" || got.header.Get("Content-Encoding") != "" {
		f.t.Fatalf("got status %d, done %v, err %v, header %v: %s", got.status, got.done, got.err, got.header, got.body)
	}
	return got
}

// claudeCall reads the call of a stream as Anthropic's client does: the input is the concatenation
// of input_json_delta, and stop_reason is tool_use.
func claudeCall(t *testing.T, a answer) (call agentCall) {
	t.Helper()
	var input strings.Builder
	stop := ""
	eachEvent(t, a, func(event []byte) {
		var e struct {
			Type  string
			Block struct{ Type, ID, Name string } `json:"content_block"`
			Delta struct {
				Part string `json:"partial_json"`
				Stop string `json:"stop_reason"`
			}
		}
		if err := json.Unmarshal(event, &e); err != nil {
			t.Fatal(err)
		}
		switch e.Type {
		case "content_block_start":
			call = agentCall{ID: e.Block.ID, Name: e.Block.Name}
		case "content_block_delta":
			input.WriteString(e.Delta.Part)
		case "message_delta":
			stop = e.Delta.Stop
		}
	})
	call.Arguments = input.String()
	if stop != "tool_use" || call.ID == "" || !json.Valid([]byte(call.Arguments)) {
		t.Fatalf("got the call %q and stop_reason %q in %s", call, stop, a.body)
	}
	return call
}
