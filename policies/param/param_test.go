package param

import (
	"math"
	"strconv"
	"strings"
	"testing"
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

func TestFormat(t *testing.T) {
	for _, v := range []float64{0, 1, -2.5, 0.1, 1e9, 1e-12, math.MaxFloat64, math.SmallestNonzeroFloat64} {
		text := Format(v)
		if back, err := strconv.ParseFloat(text, 64); err != nil || back != v || strings.ContainsAny(text, " \n=") {
			t.Errorf("Format(%v) = %q, and parsing gives %v, %v", v, text, back, err)
		}
	}
}
