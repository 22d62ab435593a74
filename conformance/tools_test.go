package conformance

import (
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// forced returns requests that force a tool call, by path.
func forced() map[string]string {
	const (
		tool = `{"type":"function","function":{"name":"look_up","parameters":{"type":"object"}}}`
		flat = `{"type":"function","name":"look_up","parameters":{"type":"object"}}`
	)
	messages, _ := strings.CutPrefix(chat(long, 9, false), "{")
	return map[string]string{
		chatPath + " required":   `{"tools":[` + tool + `],"tool_choice":"required",` + messages,
		chatPath + " named":      `{"tools":[` + tool + `],"tool_choice":{"type":"function","function":{"name":"look_up"}},` + messages,
		"/v1/responses required": `{"model":"sim","input":"` + long + `","max_output_tokens":9,"tools":[` + flat + `],"tool_choice":"required"}`,
		"/v1/responses named":    `{"model":"sim","input":"` + long + `","max_output_tokens":9,"tools":[` + flat + `],"tool_choice":{"type":"function","name":"look_up"}}`,
		"/v1/messages required":  `{"tools":[{"name":"look_up","input_schema":{}}],"tool_choice":{"type":"any"},` + messages,
		"/v1/messages named":     `{"tools":[{"name":"look_up","input_schema":{}}],"tool_choice":{"type":"tool","name":"look_up"},` + messages,
	}
}

// For a forced tool call prefill makes one token. Releases that fail on it
// while they hold blocks for decode do not get it: a decode engine answers the
// whole request. The fleet's end asserts that nothing is held, long before any
// lease expires.
func TestForcedToolCalls(t *testing.T) {
	for _, connector := range []string{
		enginesim.ConnectorVLLMNixl, enginesim.ConnectorVLLMNixlPush, enginesim.ConnectorVLLMStore, enginesim.ConnectorVLLMMoRIIORead,
		enginesim.ConnectorVLLMMooncake, enginesim.ConnectorVLLMP2PTier,
	} {
		for _, version := range []string{"0.17.1", "0.32.0", "0.1.dev1+g0123abc"} {
			t.Run(connector+" "+version, func(t *testing.T) {
				f := startFleet(t, connector, fleetOptions{prefill: 1, decode: 1, engine: func(_ string, _ int, c *enginesim.Config) { c.Version = version }})
				whole := 0.0
				for name, body := range forced() {
					path, _, _ := strings.Cut(name, " ")
					if path == "/v1/responses" && connector == enginesim.ConnectorVLLMNixlPush { // it is never split
						continue
					}
					f.right(f.try(path, body), path, body)
					if version != "0.32.0" {
						whole++
					}
				}
				body := chat(long, 9, true) // other requests run as two legs
				f.right(f.try(chatPath, body), chatPath, body)
				if n := f.metric("pdproxy_fallbacks_total", `what="aggregated"`, `reason="forced_tool"`); n != whole {
					t.Errorf("got %v aggregated requests, want %v", n, whole)
				}
				for _, e := range append(f.prefill, f.decode...) {
					if s := e.State(); s.Errors != 0 || s.LeasesExpired != 0 {
						t.Errorf("e.State() = %+v", s)
					}
				}
			})
		}
	}
}

// If no engine answers whole requests, a forced tool call that is certain to
// fail is rejected before anything is computed. A tool call that may succeed is
// tried.
func TestForcedToolCallsOfPairs(t *testing.T) {
	for version, refused := range map[string]bool{"0.17.1": true, "0.32.0": false, "0.1.dev1+g0123abc": false} {
		t.Run(version, func(t *testing.T) {
			f := startFleet(t, enginesim.ConnectorVLLMMoRIIO, fleetOptions{prefill: 1, decode: 1, engine: func(_ string, _ int, c *enginesim.Config) { c.Version = version }})
			body := forced()[chatPath+" required"]
			a := f.try(chatPath, body)
			if !refused {
				f.right(a, chatPath, body)
			} else if a.status != 400 || !strings.Contains(a.body, `"tool_choice"`) {
				t.Errorf("got status %d: %s", a.status, a.body)
			}
			if s := f.prefill[0].State(); s.Errors != 0 || (s.Requests == 0) != refused {
				t.Errorf("f.prefill[0].State() = %+v", s)
			}
		})
	}
}
