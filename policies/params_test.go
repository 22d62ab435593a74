package policies

import (
	"reflect"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/builtin"
)

func TestNew(t *testing.T) {
	for _, tt := range []struct {
		params Params
		want   string
	}{
		{nil, ""},
		{Params{"kv_aware": {"patience": 8}, "dynamo_cost": {}}, ""},
		{Params{"kv_aware": {"patients": 8}}, `kv_aware: no parameter "patients"; there are queue_weight,`},
		{Params{"kv_aware": {"patience": -8}}, "kv_aware: patience is 0 to 10000, not -8"},
		{Params{"kv_unaware": {"patience": 8}}, `no policy "kv_unaware" has parameters; there are pd_auto,`},
		{Params{"round_robin": {}}, `no policy "round_robin" has parameters`},
	} {
		if _, err := New(tt.params); (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v: New(tt.params) = %v, want %q", tt.params, err, tt.want)
		}
	}
}

// TestParamsHold: a parameter changes the decisions of that set's policy, and
// of no other set's.
func TestParamsHold(t *testing.T) {
	f := &abi.PlaceFacts{Flow: abi.FlowAggregated, Fixed: -1, Request: abi.RequestFacts{PromptTokens: 100}, Candidates: both(2, 1, 1)}
	for i := range f.Candidates {
		f.Candidates[i].BlockTokens = 1
	}
	f.Candidates[0].BlocksGPU, f.Candidates[0].Requests = 50, 1
	for max, want := range map[float64]int32{64: 0, 1: 1} {
		s, err := New(Params{"trtllm_kv_cache_aware": {"max_batch_size": max}})
		if err != nil {
			t.Fatal(err)
		}
		p, _ := s.Place("trtllm_kv_cache_aware")
		if d := p(f); d.Decode != want {
			t.Errorf("max_batch_size %v: %+v", max, d)
		}
	}
	p, _ := Place("trtllm_kv_cache_aware")
	if d := p(f); d.Decode != 0 {
		t.Errorf("defaults: %+v", d)
	}
}

// TestText: the module's configuration text sets the same values as New.
func TestText(t *testing.T) {
	p := Params{"kv_aware": {"patience": 8, "balance_weight": 0.1, "label_micros.a.b/c": 5}, "conversation": {"overload_factor": 1e3}}
	want := "conversation.overload_factor=1000\nkv_aware.balance_weight=0.1\nkv_aware.label_micros.a.b/c=5\nkv_aware.patience=8\n"
	if got := p.Text(); got != want {
		t.Fatalf("p.Text() = %q, want %q", got, want)
	}
	a := builtin.New()
	if err := a.Configure(p.Text()); err != nil {
		t.Fatal(err)
	}
	b, err := New(p)
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range AllParams() {
		for i, one := range a.Table(q.Policy) {
			if other := b.all.Table(q.Policy)[i]; one.Labels != nil && !reflect.DeepEqual(one.Labels, other.Labels) || one.Labels == nil && *one.Value != *other.Value {
				t.Errorf("%s.%s: %v and %v", q.Policy, one.Name, one, other)
			}
		}
	}
	if Params(nil).Text() != "" {
		t.Error("no parameters have a text")
	}
}

func TestNeeds(t *testing.T) {
	for name, want := range map[string]abi.Needs{
		"least_load": 0, "auto": 0, "snowflake": 0, "nothing": 0,
		"conversation": abi.NeedConversation, "kv_aware": abi.NeedConversation | abi.NeedBlocks,
		"pair_aware": abi.NeedConversation | abi.NeedBlocks | abi.NeedPairs, "pd_auto": abi.NeedBlocks,
	} {
		if got := Needs(name); got != want {
			t.Errorf("%s needs %v, want %v", name, got.Names(), want.Names())
		}
	}
	all := []string{"kv_aware", "pair_aware", "slo_aware"}
	for _, name := range all {
		s, err := New(Params{name: {"label_micros.zone": 1}})
		if err != nil {
			t.Fatal(err)
		}
		for _, other := range all {
			want := Needs(other)
			if other == name {
				want |= abi.NeedDetails
			}
			if got := s.Needs(other); got != want {
				t.Errorf("with labels of %s, %s needs %v", name, other, got.Names())
			}
		}
	}
	n, err := NewNative(Names{Plan: "pd_auto", Place: "conversation", Mint: "snowflake"})
	if err != nil {
		t.Fatal(err)
	}
	if got := n.Needs(); got != abi.NeedBlocks|abi.NeedConversation {
		t.Errorf("together %v", got.Names())
	}
}

func TestAllParams(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range AllParams() {
		if seen[p.Policy+"."+p.Name] || p.Meaning == "" {
			t.Errorf("%+v", p)
		}
		seen[p.Policy+"."+p.Name] = true
	}
	if !seen["kv_aware.patience"] || !seen["pair_aware.warming_micros"] || !seen["pd_auto.margin"] {
		t.Errorf("parameters %v", seen)
	}
}
