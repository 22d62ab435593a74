package main

import (
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

func TestConfigure(t *testing.T) {
	for config, want := range map[string]bool{
		"north=0.08 south=0.24": true,
		"":                      false,
		"north":                 false,
		"=0.08":                 false,
		"north=cheap":           false,
		"north=0":               false,
		"north=-1":              false,
	} {
		clear(prices)
		if got := configure(config); got != want {
			t.Errorf("%q: configure is %v", config, got)
		}
	}
}

func TestScore(t *testing.T) {
	clear(prices)
	if !configure("north=0.08 south=0.16 east=0.04") {
		t.Fatal("the prices are refused")
	}
	in := func(zone string) abi.Detail { return abi.Detail{Zone: abi.LabelID(zone)} }
	details := []abi.Detail{in("south"), in("east"), in("north"), in(""), in("west")}
	for name, tt := range map[string]struct {
		open    []bool
		details []abi.Detail
		want    []float32
	}{
		"all":               {[]bool{true, true, true, true, true}, details, []float32{0.25, 1, 0.5, 0, 0}},
		"the cheapest left": {[]bool{true, false, true, true, true}, details, []float32{0.5, 0, 1, 0, 0}},
		"no known price":    {[]bool{false, false, false, true, true}, details, []float32{0, 0, 0, 0, 0}},
		"no labels":         {[]bool{true, true, true, true, true}, nil, []float32{0, 0, 0, 0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			to := abi.Scores{Rows: make([]abi.RowScore, len(tt.open))}
			score(&abi.ScoreFacts{PlaceFacts: &abi.PlaceFacts{Details: tt.details}, Open: tt.open}, &to)
			var got []float32
			for _, r := range to.Rows {
				got = append(got, r.Score)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
	to := abi.Scores{Rows: make([]abi.RowScore, 1)}
	score(&abi.ScoreFacts{PlaceFacts: &abi.PlaceFacts{Details: details}, Open: []bool{true}}, &to)
	if to.Rows[0].Value != 0.16 {
		t.Errorf("the value is %v, want the price", to.Rows[0].Value)
	}
}
