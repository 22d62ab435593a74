package param

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

func TestTable(t *testing.T) {
	var a, b float64
	table := Table{{Name: "a", Value: &a, Default: 3, Most: 10}, {Name: "b", Value: &b, Default: -1, Least: -2, Most: 0.5}}
	table.Reset()
	if a != 3 || b != -1 {
		t.Errorf("defaults %v and %v", a, b)
	}
	if err := table.Set("a", 10); err != nil || a != 10 || b != -1 {
		t.Errorf("%v, %v and %v", err, a, b)
	}
	for _, tt := range []struct {
		name  string
		value float64
		want  string
	}{
		{"a", 10.5, "a is 0 to 10, not 10.5"},
		{"a", -1, "a is 0 to 10, not -1"},
		{"b", math.NaN(), "b is -2 to 0.5, not NaN"},
		{"b", math.Inf(-1), "b is -2 to 0.5, not -Inf"},
		{"c", 1, `no parameter "c"; there are a, b`},
	} {
		if err := table.Set(tt.name, tt.value); err == nil || err.Error() != tt.want {
			t.Errorf("%s = %v: table.Set(tt.name, tt.value) = %v, want %s", tt.name, tt.value, err, tt.want)
		}
	}
	if a != 10 || b != -1 {
		t.Errorf("a refused value was set: %v and %v", a, b)
	}
}

// TestLabels: a parameter with labels has a number for each label, and none for a label that was
// set to 0.
func TestLabels(t *testing.T) {
	var l Labels
	table := Table{{Name: "cost", Labels: &l, Most: 10}}
	zone, rack := abi.LabelID("zone"), abi.LabelID("example.com/rack")
	for name, value := range map[string]float64{"cost.zone": 1, "cost.example.com/rack": 2} {
		if err := table.Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	if err := table.Set("cost.zone", 3); err != nil || len(l.Names) != 2 || l.Values[slices.Index(l.Names, zone)] != 3 || l.Values[slices.Index(l.Names, rack)] != 2 {
		t.Errorf("%v, %+v", err, l)
	}
	if err := table.Set("cost.zone", 0); err != nil || !slices.Equal(l.Names, []uint32{rack}) || !slices.Equal(l.Values, []float64{2}) {
		t.Errorf("%v, %+v", err, l)
	}
	for name, want := range map[string]string{
		"cost": `no parameter "cost"; there are cost.LABEL`, "cost.": "1 to 63 bytes", "cost." + strings.Repeat("x", 64): "1 to 63 bytes",
	} {
		if err := table.Set(name, 1); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: table.Set = %v, want %q", name, err, want)
		}
	}
	if err := table.Set("cost.zone", 11); err == nil || err.Error() != "cost.zone is 0 to 10, not 11" {
		t.Errorf("table.Set = %v", err)
	}
	for i := range MaxLabels {
		_ = table.Set("cost."+strconv.Itoa(i), 1) // the last ones do not fit
	}
	if err := table.Set("cost.more", 1); err == nil || len(l.Names) != MaxLabels {
		t.Errorf("%v, %d labels", err, len(l.Names))
	}
	if table.Reset(); len(l.Names) != 0 {
		t.Errorf("after a reset: %+v", l)
	}
}

func TestFormat(t *testing.T) {
	for _, v := range []float64{0, 1, -2.5, 0.1, 1e9, 1e-12, math.MaxFloat64, math.SmallestNonzeroFloat64} {
		text := Format(v)
		if back, err := strconv.ParseFloat(text, 64); err != nil || back != v || strings.ContainsAny(text, " \n=") {
			t.Errorf("Format(%v) = %q, and parsing gives %v, %v", v, text, back, err)
		}
	}
}
