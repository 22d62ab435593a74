package config

import (
	"slices"
	"strings"
	"testing"
)

func TestSidecarOrder(t *testing.T) {
	for _, tt := range []struct{ role, connector, picker, want string }{
		{RoleDecode, ConnectorVLLMNixl, "", "prefill_named local prefill_placed"},
		{RolePrefill, ConnectorVLLMNixl, "", "decode_named decode_placed local"},
		{RolePrefill, ConnectorVLLMNixl, "http://p", "decode_named decode_picked decode_placed local"},
		{RoleBoth, ConnectorVLLMNixl, "http://p", "prefill_named decode_picked local prefill_placed"},
		{RoleBoth, ConnectorNone, "", "local"},
	} {
		s := Sidecar{Role: tt.role, Connector: tt.connector, Picker: tt.picker}
		if got := strings.Join(s.Order(), " "); got != tt.want {
			t.Errorf(`%+v: strings.Join(s.Order(), " ") = %s, want %s`, tt, got, tt.want)
		}
		if err := s.CheckOrder(s.Order()); err != nil {
			t.Errorf("%+v: s.CheckOrder(s.Order()) = %v, want nil", tt, err)
		}
	}
	s := defaultSidecar()
	if s.Policies = []string{CoordinatePrefillPlaced}; !slices.Equal(s.Order(), s.Policies) {
		t.Errorf("the configured order is %v", s.Order())
	}
	if s.CheckOrder(nil) == nil {
		t.Error("an empty order is accepted")
	}
}

// TestLocalEngine: the local engine is the [[engine]] with the sidecar's url. Without
// such an entry the sidecar makes an engine.
func TestLocalEngine(t *testing.T) {
	cfg, err := Parse([]byte(twoEngines + "[sidecar]\nlocal = 'http://127.0.0.1:8200'\n"))
	if err != nil {
		t.Fatal(err)
	}
	if name, among := cfg.LocalEngine(); name != "d0" || !among || len(cfg.AllEngines()) != 2 {
		t.Errorf("%s %v of %v", name, among, cfg.AllEngines())
	}
	cfg, err = Parse([]byte(twoEngines + "[sidecar]\nlocal = 'http://127.0.0.1:8300'\n"))
	if err != nil {
		t.Fatal(err)
	}
	all := cfg.AllEngines()
	if name, among := cfg.LocalEngine(); name != "local" || among || len(all) != 3 || len(cfg.Engines) != 2 {
		t.Errorf("%s %v of %v", name, among, all)
	}
	if e := all[2]; e.Name != "local" || e.URL != "http://127.0.0.1:8300" || e.Role != RoleDecode || e.Connector != ConnectorVLLMNixl || e.Ranks != 1 {
		t.Errorf("the local engine is %+v", e)
	}
	if cfg, err = Parse([]byte("[sidecar]\nlocal = 'http://x'\n")); err != nil || len(cfg.Warnings()) > 0 {
		t.Errorf("alone: %v, warnings %v", err, cfg.Warnings())
	}
}

func TestSidecarNetworks(t *testing.T) {
	s := Sidecar{Callers: []string{"10.0.0.0/8", "::1"}}
	if got := s.Networks(); len(got) != 2 || got[0].String() != "10.0.0.0/8" || got[1].String() != "::1/128" {
		t.Errorf("got %v", got)
	}
	if (Sidecar{}).Networks() != nil {
		t.Error("Networks of the zero Sidecar is not nil")
	}
}
