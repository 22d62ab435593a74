package config

import (
	"reflect"
	"testing"
)

// TestLabels: the order in the file does not matter, and JSON and TOML give the same
// engine.
func TestLabels(t *testing.T) {
	e, err := EngineFromJSON([]byte(`{"name": "p0", "url": "http://p0:1", "role": "both", "labels": {"zone": "a", "rack": "7"}, "weight": 2.5}`))
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := Parse([]byte("[[engine]]\nname = 'p0'\nurl = 'http://p0:1'\nrole = 'both'\nlabels = { rack = '7', zone = 'a' }\nweight = 2.5\n"))
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Engines[0] != e {
		t.Errorf("TOML %+v\nJSON %+v", cfg.Engines[0], e)
	}
	if got, want := e.Labels.Map(), map[string]string{"zone": "a", "rack": "7"}; !reflect.DeepEqual(got, want) {
		t.Errorf("labels %v", got)
	}
	if plain := DefaultEngine(); plain.Labels.Map() != nil {
		t.Errorf("labels of an engine without labels: %v", plain.Labels.Map())
	}
}

// TestLabelsSame: two engines share a label only if both have it with the same value.
func TestLabelsSame(t *testing.T) {
	for _, tt := range []struct {
		a, b  Labels
		names []string
		want  bool
	}{
		{"", "", nil, true},
		{"zone=a", "zone=b", nil, true},
		{"zone=a", "rack=1\nzone=a", []string{"zone"}, true},
		{"zone=a", "zone=b", []string{"zone"}, false},
		{"rack=1\nzone=a", "rack=2\nzone=a", []string{"zone", "rack"}, false},
		{"zone=a", "", []string{"zone"}, false},
		{"", "", []string{"zone"}, false},
	} {
		if got := tt.a.Same(tt.b, tt.names); got != tt.want {
			t.Errorf("%q and %q share %q: got %v, want %v", tt.a, tt.b, tt.names, got, tt.want)
		}
	}
}
