package enginesim

import (
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// TestForcedToolCall: older releases fail on a forced tool call that is cut off
// after one token, and keep the blocks for decode. A stream does not fail, nor
// does an answer with more tokens.
func TestForcedToolCall(t *testing.T) {
	const (
		leg   = `"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true}`
		named = `{"type":"function","function":{"name":"f"}}`
	)
	for _, tt := range []struct {
		version, route, body string
		status               int
		pinned               bool
	}{
		{"0.17.1", core.RouteChat, leg + `,"tool_choice":"required"`, 400, true},
		{"0.18.0", core.RouteChat, leg + `,"tool_choice":"required"`, 200, true},
		{"0.20.2", core.RouteChat, leg + `,"tool_choice":` + named, 500, true},
		{"0.21.0", core.RouteChat, leg + `,"tool_choice":` + named, 200, true},
		{"0.17.1", core.RouteChat, leg + `,"tool_choice":"auto"`, 200, true},
		{"0.17.1", core.RouteChat, `"max_tokens":9,"ignore_eos":true,"tool_choice":"required"`, 200, false},
		{"0.17.1", core.RouteChat, `"max_tokens":1,"stream":true,"tool_choice":"required"`, 200, false},
		{"0.17.1", core.RouteMessages, leg + `,"tool_choice":{"type":"any"}`, 400, true},
		{"0.17.1", core.RouteMessages, leg + `,"tool_choice":{"type":"auto"}`, 200, true},
		{"0.20.2", core.RouteMessages, leg + `,"tool_choice":{"type":"tool","name":"f"}`, 500, true},
	} {
		t.Run(tt.version+" "+tt.route+" "+tt.body, func(t *testing.T) {
			e := startEngine(t, Config{Connector: ConnectorVLLMNixl, Role: RolePrefill, Version: tt.version, Lease: time.Hour})
			a := post(t, e.URL()+tt.route, `{"model":"sim","messages":[{"role":"user","content":"a few words"}],`+tt.body+`}`)
			if s := e.State(); a.status != tt.status || s.BlocksPinned > 0 != tt.pinned {
				t.Errorf("got status %d, %d blocks pinned: %s", a.status, s.BlocksPinned, a.body)
			}
			e.Ranks[0].UnpinAll()
		})
	}
	e := startEngine(t, Config{Connector: ConnectorVLLMNixl, Role: RolePrefill, Version: "0.18.0", Lease: time.Hour})
	if a := post(t, e.URL()+core.RouteResponses, `{"input":"a few words","max_output_tokens":1,"tool_choice":"required"}`); a.status != 400 {
		t.Errorf("a response: status %d", a.status)
	}
}
