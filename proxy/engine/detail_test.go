package engine

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
)

func TestDetail(t *testing.T) {
	e := config.DefaultEngine()
	if got, want := detailOf(&e), (abi.Detail{Weight: 1, Running: -1, Waiting: -1}); got != want {
		t.Errorf("detail of an engine without labels %+v", got)
	}
	e.Labels, e.Weight = config.LabelsOf(map[string]string{"zone": "a", "rack": "7"}), 2.5
	d := detailOf(&e)
	if d.Zone != abi.LabelID("a") || d.Value(abi.LabelID("rack")) != abi.LabelID("7") || d.Weight != 2.5 || d.Running != -1 || d.Waiting != -1 {
		t.Errorf("detail %+v", d)
	}
}

// TestDetailBounds: a frame carries the largest labels that the configuration accepts,
// and the bounds of the two are the same.
func TestDetailBounds(t *testing.T) {
	if config.MaxLabelSize != abi.MaxLabelSize || config.OtherLabels != abi.OtherLabels {
		t.Errorf("bounds %d and %d, in the contract %d and %d", config.MaxLabelSize, config.OtherLabels, abi.MaxLabelSize, abi.OtherLabels)
	}
	long := strings.Repeat("x", config.MaxLabelSize)
	labels := map[string]string{"zone": long, "revision": long, "hardware": long}
	for i := range config.OtherLabels {
		labels[fmt.Sprint(long[1:], i)] = long
	}
	e := config.DefaultEngine()
	e.Name, e.URL, e.Role, e.Labels = "p0", "http://p0:1", "both", config.LabelsOf(labels)
	if err := e.Check(); err != nil {
		t.Fatal(err)
	}
	d := detailOf(&e)
	for name := range labels {
		if d.Value(abi.LabelID(name)) != abi.LabelID(long) {
			t.Errorf("label %q is not in the detail", name)
		}
	}
}
