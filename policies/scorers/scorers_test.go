package scorers

import (
	"bytes"
	"flag"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// three returns facts with three candidates, which all can take the leg.
func three(phases abi.Role, change func(f *abi.ScoreFacts, c []abi.Candidate, d []abi.Detail)) *abi.ScoreFacts {
	f := &abi.ScoreFacts{
		PlaceFacts: &abi.PlaceFacts{Request: abi.RequestFacts{PromptTokens: 1000}, Candidates: make([]abi.Candidate, 3), Random: 1 << 40},
		Phases:     phases, Prefill: -1, Open: []bool{true, true, true},
	}
	f.Details = slices.Repeat([]abi.Detail{{Weight: 1, Running: -1, Waiting: -1}}, 3)
	change(f, f.Candidates, f.Details)
	return f
}

func labels(d *abi.Detail, labels map[string]string) {
	if err := d.SetLabels(labels); err != nil {
		panic(err)
	}
}

const removed = abi.Removed

// cases have the score of each candidate by each scorer.
var cases = []struct {
	name, scorer string
	params       map[string]string
	phases       abi.Role
	change       func(f *abi.ScoreFacts, c []abi.Candidate, d []abi.Detail)
	want         [3]float32
	unit         string
}{
	{"share of the prompt", "prefix", nil, 1, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) {
		c[0].BlocksGPU, c[0].BlockTokens = 25, 16
		c[1].BlocksGPU, c[1].BlocksDisk, c[1].BlockTokens = 40, 40, 16
	}, [3]float32{0.4, 1, 0}, "tokens"},
	{"length", "prefix", map[string]string{"match_length_weight": "1", "match_length_scale_tokens": "800"}, 1, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) {
		c[0].BlocksGPU, c[0].BlockTokens = 25, 16
		c[1].BlocksCPU, c[1].BlockTokens = 80, 16
	}, [3]float32{0.25, 1, 0}, "tokens"},
	{"no estimate of the prompt", "prefix", nil, 1, func(f *abi.ScoreFacts, _ []abi.Candidate, _ []abi.Detail) { f.Request.PromptTokens = 0 }, [3]float32{}, "tokens"},

	{"queues", "queue", nil, 1, func(_ *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) { d[0].Waiting, d[1].Waiting = 8, 2 }, [3]float32{0, 0.75, 1}, "requests"},
	{"equal queues", "queue", nil, 1, func(_ *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) {
		d[0].Waiting, d[1].Waiting, d[2].Waiting = 3, 3, 3
	}, [3]float32{1, 1, 1}, "requests"},
	{"a closed row has no part", "queue", nil, 1, func(f *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) {
		d[0].Waiting, d[1].Waiting, f.Open[0] = 8, 2, false
	}, [3]float32{0, 0, 1}, "requests"},
	{"without reports", "queue", nil, 1, func(f *abi.ScoreFacts, _ []abi.Candidate, _ []abi.Detail) { f.Details = nil }, [3]float32{1, 1, 1}, "requests"},
	{"running", "running_requests", nil, 2, func(_ *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) {
		d[0].Running, d[1].Running, d[2].Running = 10, 20, 15
	}, [3]float32{1, 0, 0.5}, "requests"},
	{"usage", "kv_usage", nil, 2, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) { c[0].Usage, c[1].Usage = 0.25, 1.5 }, [3]float32{0.75, 0, 1}, "share"},
	{"active", "active_requests", nil, 1, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) { c[0].Requests, c[1].Requests = 4, 1 }, [3]float32{0, 0.75, 1}, "requests"},
	{"idle", "active_requests", map[string]string{"idle_threshold": "1", "max_busy_score": "0.5"}, 1, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) {
		c[0].Requests, c[1].Requests, c[2].Requests = 4, 1, 2
	}, [3]float32{0, 1, 0.25}, "requests"},
	{"threshold", "load_aware", map[string]string{"threshold": "10"}, 1, func(_ *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) { d[0].Waiting, d[1].Waiting = 5, 20 }, [3]float32{0.25, 0, 0.5}, "requests"},
	{"tokens", "token_load", map[string]string{"queue_threshold_tokens": "4000"}, 1, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) {
		c[0].Tokens = 1000 // and 1000 of this request
		c[1].Tokens, c[1].BlocksGPU, c[1].BlockTokens = 1000, 50, 20
		c[2].Tokens = 9000
	}, [3]float32{0.5, 0.75, 0}, "tokens"},
	{"home of decode", "session", nil, 2, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) {
		c[0].Home, c[1].Home = abi.RolePrefill, abi.RoleBoth
	}, [3]float32{0, 1, 0}, ""},
	{"home of one leg", "session", nil, 3, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) {
		c[0].Home, c[1].Home = abi.RolePrefill, abi.RoleDecode
	}, [3]float32{0, 1, 0}, ""},
	{"adapters", "lora", nil, 2, func(f *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) {
		f.Adapters, c[0].Adapter, c[1].Adapter, c[2].Adapter = true, abi.AdapterFree, abi.AdapterRunning, abi.AdapterWaiting
	}, [3]float32{0.8, 1, 0.6}, ""},
	{"no room for the adapter", "lora", nil, 2, func(f *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) {
		f.Adapters, c[0].Adapter = true, abi.AdapterFull
	}, [3]float32{}, ""},
	{"ranges", "context_length", nil, 1, func(_ *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) {
		labels(&d[0], map[string]string{"context_length": "0-10000"})               // half of the width's score, 0.9 of the room
		labels(&d[1], map[string]string{"llm-d.ai/context-length-range": "2000-9"}) // no range
		labels(&d[2], map[string]string{"context_length": "2000-4000"})
	}, [3]float32{0.3 + 0.7*(0.7*0.5+0.3*0.9), 0.5, 0.15}, "tokens"},
	{"label", "label", map[string]string{"label": "tier", "values": "gold silver"}, 1, func(_ *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) {
		labels(&d[0], map[string]string{"tier": "silver"})
		labels(&d[1], map[string]string{"tier": "bronze"})
	}, [3]float32{1, 0, 0}, ""},
	{"header", "header_label", map[string]string{"header": "X-Tier", "label": "tier"}, 1, func(f *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) {
		f.Request.Headers = []abi.RequestHeader{{Name: "x-tier", Value: "gold", Present: true}}
		labels(&d[0], map[string]string{"tier": "gold"})
		labels(&d[1], map[string]string{"tier": "silver"})
	}, [3]float32{1, 0, 0}, ""},
	{"no header", "header_label", map[string]string{"header": "X-Tier", "label": "tier"}, 1, func(*abi.ScoreFacts, []abi.Candidate, []abi.Detail) {}, [3]float32{}, ""},
	{"places", "topology", nil, 2, func(f *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) {
		f.Prefill, f.Open[0] = 0, false
		labels(&d[0], map[string]string{"host": "h1", "rack": "r1", "zone": "z1"})
		labels(&d[1], map[string]string{"host": "h2", "rack": "r1", "zone": "z1"})
		labels(&d[2], map[string]string{"host": "h3", "rack": "r2", "zone": "z1"})
	}, [3]float32{0, 0.2, 0.05}, ""},
	{"no place of prefill", "topology", nil, 2, func(f *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) {
		f.Prefill = 0
		labels(&d[1], map[string]string{"zone": "z1"})
	}, [3]float32{}, ""},

	{"no prediction", "latency", nil, 1, func(_ *abi.ScoreFacts, c []abi.Candidate, d []abi.Detail) {
		c[0].Usage, d[1].Waiting, c[2].BlocksGPU, c[2].BlockTokens = 0.6, 3, 25, 40
	}, [3]float32{1.4 / 3, 1.0 / 3, 1}, "share"},
	{"shortest", "latency", nil, 1, func(f *abi.ScoreFacts, _ []abi.Candidate, _ []abi.Detail) {
		f.Predictions = []abi.Prediction{{Prefill: 3e6}, {Prefill: 1e6}, {Prefill: 2e6}}
	}, [3]float32{0.01, 1, 0.505}, "s"},
	{"least room", "latency", nil, 1, func(f *abi.ScoreFacts, _ []abi.Candidate, _ []abi.Detail) {
		f.Request.Remaining = 2500
		f.Predictions = []abi.Prediction{{Prefill: 3e6}, {Prefill: 1e6}, {Prefill: 2e6}}
	}, [3]float32{0, 0.01, 1}, "s"},
	{"most room", "latency", map[string]string{"most_headroom": "1"}, 1, func(f *abi.ScoreFacts, _ []abi.Candidate, _ []abi.Detail) {
		f.Request.Remaining = 2500
		f.Predictions = []abi.Prediction{{Prefill: 3e6}, {Prefill: 1e6}, {Prefill: 2e6}}
	}, [3]float32{0, 1, 0.01}, "s"},
	{"slow tokens come last", "latency", nil, 2, func(f *abi.ScoreFacts, _ []abi.Candidate, _ []abi.Detail) {
		f.Request.TokenMicros = 20_000
		f.Predictions = []abi.Prediction{{Start: 1e6, Token: 15_000}, {Start: 5e5, Token: 25_000}, {Start: 1e6, Token: 18_000}}
	}, [3]float32{1, 0, 0.01}, "s"},
	{"time between tokens", "latency", map[string]string{"ttft_weight": "0.5", "tpot_weight": "0.5"}, 2, func(f *abi.ScoreFacts, _ []abi.Candidate, _ []abi.Detail) {
		f.Predictions = []abi.Prediction{{Start: 1, Token: 30}, {Start: 2, Token: 10}, {Start: 3, Token: 20}}
	}, [3]float32{0.505, 0.7525, 0.2575}, "s"},

	{"cold", "no_hit_lru", nil, 1, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) {
		c[0].RecentRequests, c[1].RecentRequests, c[2].RecentRequests = 4, 2, 3
	}, [3]float32{0, 1, 0.5}, "requests"},
	{"warm", "no_hit_lru", nil, 1, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) {
		c[0].RecentRequests, c[1].BlocksGPU, c[1].BlockTokens = 4, 1, 16
	}, [3]float32{0.5, 0.5, 0.5}, "requests"},

	{"some of the media", "mm_cache", nil, 1, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) {
		for i := range c {
			c[i].Media = 4
		}
		c[1].MediaSent, c[2].MediaSent = 1, 4
	}, [3]float32{0, 0.25, 1}, "share"},
	{"aggregated", "mm_cache", nil, 3, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) { c[1].Media, c[1].MediaSent = 1, 1 }, [3]float32{0, 1, 0}, "share"},
	{"decode after prefill", "mm_cache", nil, 2, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) { c[1].Media, c[1].MediaSent = 1, 1 }, [3]float32{}, "share"},
	{"no media", "mm_cache", nil, 1, func(*abi.ScoreFacts, []abi.Candidate, []abi.Detail) {}, [3]float32{}, "share"},

	{"values", "label_filter", map[string]string{"label": "tier", "values": "gold silver"}, 1, func(_ *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) {
		labels(&d[0], map[string]string{"tier": "silver"})
		labels(&d[1], map[string]string{"tier": "bronze"})
	}, [3]float32{0, removed, removed}, ""},
	{"not the values", "label_filter", map[string]string{"label": "tier", "values": "gold", "not": "1"}, 1, func(_ *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) {
		labels(&d[0], map[string]string{"tier": "gold"})
		labels(&d[1], map[string]string{"tier": "bronze"})
	}, [3]float32{removed, 0, 0}, ""},
	{"any value", "label_filter", map[string]string{"label": "tier"}, 1, func(_ *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) {
		labels(&d[0], map[string]string{"tier": "gold"})
	}, [3]float32{0, removed, removed}, ""},
	{"no value", "label_filter", map[string]string{"label": "tier", "not": "1"}, 1, func(_ *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) {
		labels(&d[0], map[string]string{"tier": "gold"})
	}, [3]float32{removed, 0, 0}, ""},
	{"limits", "utilization_filter", map[string]string{"max_waiting_requests": "2", "max_kv_usage": "0.8"}, 1, func(_ *abi.ScoreFacts, c []abi.Candidate, d []abi.Detail) {
		d[0].Waiting, c[1].Usage, d[2].Waiting, c[2].Usage = 3, 0.9, 2, 0.5
	}, [3]float32{removed, removed, 0}, ""},
	{"no limits", "utilization_filter", nil, 1, func(_ *abi.ScoreFacts, c []abi.Candidate, d []abi.Detail) {
		d[0].Running, c[1].Requests, c[1].Usage = 900, 900, 1
	}, [3]float32{}, ""},
	{"outside the range", "context_length_filter", nil, 1, func(_ *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) {
		labels(&d[0], map[string]string{"context_length": "0-999"})
		labels(&d[1], map[string]string{"context_length": "1000-1000"})
	}, [3]float32{removed, 0, 0}, ""},
	{"most of the prompt", "prefix_affinity_filter", nil, 1, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) {
		c[0].BlocksGPU, c[0].BlockTokens = 79, 10
		c[1].BlocksGPU, c[1].BlockTokens = 80, 10
	}, [3]float32{removed, 0, removed}, ""},
	{"nowhere", "prefix_affinity_filter", nil, 1, func(*abi.ScoreFacts, []abi.Candidate, []abi.Detail) {}, [3]float32{}, ""},
	{"too late with the prefix", "prefix_affinity_filter", map[string]string{"max_ttft_penalty_ms": "500"}, 1, func(f *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) {
		c[1].BlocksGPU, c[1].BlockTokens = 80, 10
		f.Predictions = []abi.Prediction{{Prefill: 4e5}, {Prefill: 1e6}, {Prefill: 9e5}}
	}, [3]float32{}, ""},
	{"explores", "prefix_affinity_filter", map[string]string{"exploration_probability": "1"}, 1, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) {
		c[1].BlocksGPU, c[1].BlockTokens = 80, 10
	}, [3]float32{}, ""},
	{"home", "session_filter", nil, 1, func(_ *abi.ScoreFacts, c []abi.Candidate, _ []abi.Detail) { c[1].Home = abi.RolePrefill }, [3]float32{removed, 0, removed}, ""},
	{"same rack", "topology_filter", map[string]string{"min_affinity": "2", "rack": "row"}, 2, func(f *abi.ScoreFacts, _ []abi.Candidate, d []abi.Detail) {
		f.Prefill = 0
		labels(&d[0], map[string]string{"row": "r1", "zone": "z1"})
		labels(&d[1], map[string]string{"row": "r1"})
		labels(&d[2], map[string]string{"row": "r2", "zone": "z1"})
	}, [3]float32{0, 0, removed}, ""},
	{"in time", "slo_headroom_filter", map[string]string{"epsilon_explore_neg": "0"}, 1, func(f *abi.ScoreFacts, _ []abi.Candidate, _ []abi.Detail) {
		f.Request.Remaining = 1500
		f.Predictions = []abi.Prediction{{Prefill: 2e6}, {Prefill: 1e6}, {}}
	}, [3]float32{removed, 0, removed}, ""},
	{"decode after prefill", "slo_headroom_filter", map[string]string{"epsilon_explore_neg": "0"}, 2, func(f *abi.ScoreFacts, _ []abi.Candidate, _ []abi.Detail) {
		f.Request.Remaining, f.Prefill = 1500, 0
		f.Predictions = []abi.Prediction{{Prefill: 1e6, Start: 9e5}, {Start: 4e5}, {Start: 6e5}}
	}, [3]float32{removed, 0, removed}, ""},
	{"late ones now and then", "slo_headroom_filter", map[string]string{"epsilon_explore_neg": "1"}, 1, func(f *abi.ScoreFacts, _ []abi.Candidate, _ []abi.Detail) {
		f.Request.Remaining = 1500
		f.Predictions = []abi.Prediction{{Prefill: 2e6}, {Prefill: 1e6}, {}}
	}, [3]float32{0, removed, 0}, ""},
	{"tokens in time", "slo_headroom_filter", map[string]string{"epsilon_explore_neg": "0"}, 2, func(f *abi.ScoreFacts, _ []abi.Candidate, _ []abi.Detail) {
		f.Request.TokenMicros = 20_000
		f.Predictions = []abi.Prediction{{Start: 1e6, Token: 15_000}, {Start: 1e6, Token: 25_000}, {Start: 1e6}}
	}, [3]float32{0, removed, removed}, ""},
	{"the limit for tokens is not of prefill", "slo_headroom_filter", map[string]string{"epsilon_explore_neg": "0"}, 1, func(f *abi.ScoreFacts, _ []abi.Candidate, _ []abi.Detail) {
		f.Request.TokenMicros = 20_000
		f.Predictions = []abi.Prediction{{Prefill: 1e6, Token: 15_000}, {Prefill: 1e6, Token: 25_000}, {Prefill: 1e6}}
	}, [3]float32{}, ""},
	{"no limit", "slo_headroom_filter", nil, 1, func(f *abi.ScoreFacts, _ []abi.Candidate, _ []abi.Detail) {
		f.Predictions = []abi.Prediction{{Prefill: 2e6}, {Prefill: 1e6}, {}}
	}, [3]float32{}, ""},
}

func TestScores(t *testing.T) {
	tested := map[string]bool{}
	for _, tt := range cases {
		tested[tt.scorer] = true
		t.Run(tt.scorer+"/"+tt.name, func(t *testing.T) {
			s, err := New(ID(tt.scorer, tt.params))
			if err != nil {
				t.Fatal(err)
			}
			f := three(tt.phases, tt.change)
			got := abi.Scores{Rows: make([]abi.RowScore, 3)}
			s.Score(f, &got)
			for i, want := range tt.want {
				if f.Open[i] && math.Abs(float64(got.Rows[i].Score-want)) > 1e-6 {
					t.Errorf("candidate %d: score %v, want %v", i, got.Rows[i].Score, want)
				}
			}
			if got.Unit.Unit() != tt.unit {
				t.Errorf("unit %q, want %q", got.Unit.Unit(), tt.unit)
			}
			out := &abi.Scores{Rows: got.Rows}
			if n := testing.AllocsPerRun(10, func() { s.Score(f, out) }); n != 0 {
				t.Errorf("got %v allocations", n)
			}
		})
	}
	for _, name := range Names() {
		if !tested[name] {
			t.Errorf("no case of %s", name)
		}
	}
}

// TestCheck: an error names the parameter.
func TestCheck(t *testing.T) {
	for _, tt := range []struct {
		scorer    string
		params    map[string]string
		key, want string
	}{
		{"magic", nil, "", `no built-in scorer is named "magic"; there are prefix, `},
		{"prefix", map[string]string{"match_length_weight": "2"}, "match_length_weight", "match_length_weight is 0 to 1, not 2"},
		{"prefix", map[string]string{"match_length_weight": "much"}, "match_length_weight", `match_length_weight is a number, not "much"`},
		{"prefix", map[string]string{"length": "1"}, "length", `no parameter "length"; there are match_length_weight, match_length_scale_tokens`},
		{"queue", map[string]string{"length": "1"}, "length", `no parameter "length"; there is none`},
		{"label", nil, "", "needs the parameter label"},
		{"header_label", map[string]string{"label": "tier"}, "", "needs the parameters header"},
		{"header_label", map[string]string{"label": "tier", "header": "Authorization"}, "", "carries credentials"},
		{"label", map[string]string{"label": "a&b"}, "label", "without & = , and ?"},
	} {
		if _, key, err := Check(tt.scorer, tt.params); err == nil || key != tt.key || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s %v: %q, %v", tt.scorer, tt.params, key, err)
		}
	}
}

// TestID: New reads what ID writes.
func TestID(t *testing.T) {
	id := ID("label", map[string]string{"label": "tier", "values": " gold  silver ", "not": "1"})
	if want := "label?label=tier&not=1&values=gold,silver"; id != want {
		t.Errorf("ID %q, want %q", id, want)
	}
	s, err := New(id)
	if err != nil || s.ID != id || s.Needs != abi.NeedDetails {
		t.Errorf("New = %+v, %v", s, err)
	}
	if s, err := New("header_label?header=X-Tier&label=tier"); err != nil || !slices.Equal(s.Headers, []string{"x-tier"}) {
		t.Errorf("New = %+v, %v", s, err)
	}
	if _, err := New("magic"); err == nil {
		t.Error("an unknown scorer is accepted")
	}
}

var update = flag.Bool("update", false, "write the table of README.md anew")

// plain writes a number without an exponent.
func plain(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }

// TestREADME: README.md has each scorer with its parameters.
func TestREADME(t *testing.T) {
	var table strings.Builder
	table.WriteString("\n| name | score | parameters |\n| --- | --- | --- |\n")
	for _, name := range Names() {
		one := Table(name)
		one.Reset()
		var params []string
		for _, p := range one {
			text := fmt.Sprintf("`%s`: %s", p.Name, p.Meaning)
			switch {
			case p.Text == nil:
				text += fmt.Sprintf(" (%s; %s to %s", plain(p.Default), plain(p.Least), plain(p.Most))
				if text += ")"; p.Unit != "" {
					text = strings.TrimSuffix(text, ")") + " " + p.Unit + ")"
				}
			case p.DefaultText != "":
				text += fmt.Sprintf(" (`%s`)", p.DefaultText)
			}
			params = append(params, text)
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s |\n", name, Meaning(name), strings.Join(params, "<br>"))
	}
	table.WriteString("\n")
	const begin, end = "<!-- begin: go test ./policies/scorers -run README -update -->\n", "<!-- end -->\n"
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	before, rest, _ := bytes.Cut(text, []byte(begin))
	_, after, found := bytes.Cut(rest, []byte(end))
	want := string(before) + begin + table.String() + end + string(after)
	switch {
	case !found:
		t.Fatal("README.md has no table")
	case *update:
		err = os.WriteFile("README.md", []byte(want), 0o644)
	case want != string(text):
		t.Error("the table of README.md is not that of the code: run go test ./policies/scorers -run README -update")
	}
	if err != nil {
		t.Fatal(err)
	}
}
