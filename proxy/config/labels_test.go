package config

import (
	"reflect"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// TestLabels: the order in the file does not matter, JSON and TOML give the same
// engine, and policies get the numbers of the labels.
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
	d := e.Detail()
	if d.Zone != abi.LabelID("a") || d.Value(abi.LabelID("rack")) != abi.LabelID("7") || d.Weight != 2.5 || d.Running != -1 || d.Waiting != -1 {
		t.Errorf("detail %+v", d)
	}
	plain := DefaultEngine()
	if got, want := plain.Detail(), (abi.Detail{Weight: 1, Running: -1, Waiting: -1}); got != want || plain.Labels.Map() != nil {
		t.Errorf("detail of an engine without labels %+v", got)
	}
}
