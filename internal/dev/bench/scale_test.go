package main

import (
	"errors"
	"math"
	"strings"
	"testing"
)

const scaleLines = `goos: linux
BenchmarkScaleTargets/kv_aware/4-2         	  100	 13207 ns/op	 10 cpu-µs/placement
BenchmarkScaleTargets/kv_aware/1000-2      	  100	 13207 ns/op	 30 cpu-µs/placement
BenchmarkScaleTargets/least_load/4-2       	  100	 13207 ns/op	 3.5 cpu-µs/placement
PASS
`

func TestScaleFigures(t *testing.T) {
	f, err := parseFigures(scaleLines)
	if err != nil {
		t.Fatal(err)
	}
	for size, want := range map[float64]float64{4: 10, 502: 20, 1000: 30, 1996: 50} {
		if got, err := f.at("kv_aware", "cpu-µs/placement", size); err != nil || math.Abs(got-want) > 1e-9 {
			t.Errorf("at %v: %v, %v, want %v", size, got, err, want)
		}
	}
	if _, err := f.at("least_load", "cpu-µs/placement", 8); !errors.Is(err, errNoFigures) {
		t.Errorf("a curve of one point: %v", err)
	}
	r := &scaleRow{size: "targets", about: "x", axis: "µs", columns: []scaleColumn{{"cpu-µs/placement", "CPU, µs", true}}}
	want := "| targets | `kv_aware` CPU, µs | `least_load` CPU, µs |\n| --- | --- | --- |\n| 4 | 10 | 3.5 |\n| 1000 | 30 | – |\n"
	if got := r.table(f); got != want {
		t.Errorf("table\n%s\nwant\n%s", got, want)
	}
	if svg := r.plot(f); strings.Count(svg, "<polyline") != 2 {
		t.Errorf("plot %s", svg)
	}
	if _, err := parseFigures("PASS\n"); !errors.Is(err, errNoFigures) {
		t.Errorf("no figures: %v", err)
	}
}

func TestReplaceBlock(t *testing.T) {
	const page = "a\n<!-- scale: x -->\nold\n<!-- end -->\nb\n<!-- scale: y -->\n<!-- end -->\n"
	got, err := replaceBlock([]byte(page), "x", "new\n")
	if want := strings.Replace(page, "old", "new", 1); err != nil || string(got) != want {
		t.Errorf("got %s, %v", got, err)
	}
	if _, err := replaceBlock([]byte(page), "z", "new"); err == nil {
		t.Error("a part that does not exist was replaced")
	}
}
