package policies

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// turner calls a place policy with the sequence and random numbers that the
// coordinator gives for one model and shape of legs.
type turner struct {
	policy Placer
	turn   uint64
	random *rand.Rand
}

func placer(t testing.TB, name string) *turner {
	t.Helper()
	p, ok := Place(name)
	if !ok {
		t.Fatalf("Place(%q) is unknown", name)
	}
	return &turner{policy: p, random: rand.New(rand.NewPCG(3, 4))}
}

func (p *turner) Place(f *abi.PlaceFacts) abi.PlaceDecision {
	f.Sequence, f.Random = p.turn, p.random.Uint64()
	p.turn++
	return p.policy(f)
}

// pd returns p prefill and d decode instances with so many ranks each, in one
// group.
func pd(p, d, ranks int) []abi.Candidate {
	var rows []abi.Candidate
	for i := range p + d {
		role := abi.RolePrefill
		if i >= p {
			role = abi.RoleDecode
		}
		for r := range ranks {
			rows = append(rows, abi.Candidate{Roles: role, Group: 1, Instance: uint32(i + 1), Rank: int32(r)})
		}
	}
	return rows
}

func both(n, ranks int, group uint32) []abi.Candidate {
	var rows []abi.Candidate
	for i := range n {
		for r := range ranks {
			rows = append(rows, abi.Candidate{Roles: abi.RoleBoth, Group: group, Instance: group*1000 + uint32(i), Rank: int32(r)})
		}
	}
	return rows
}

// TestPlaceHoldsTheContract draws random tables that keep the promise of
// abi.PlaceFacts and checks every decision against it.
func TestPlaceHoldsTheContract(t *testing.T) {
	for _, name := range PlaceNames() {
		t.Run(name, func(t *testing.T) {
			p := placer(t, name)
			rnd := rand.New(rand.NewPCG(1, 2))
			for range 3000 {
				var rows []abi.Candidate
				for g := range 1 + rnd.IntN(3) {
					rows = append(rows, pd(1+rnd.IntN(3), 1+rnd.IntN(3), 1+rnd.IntN(3))...)
					rows = append(rows, both(rnd.IntN(3), 1+rnd.IntN(2), 0)...)
					for i := range rows {
						if rows[i].Group < 2 {
							rows[i].Group = uint32(g + 2)
							rows[i].Instance += uint32(g) * 10000
						}
					}
				}
				for i := range rows {
					rows[i].Requests = rnd.Int32N(4)
					rows[i].Tokens = int64(rows[i].Requests) * rnd.Int64N(100)
					rows[i].Trial = rnd.IntN(5) == 0
				}
				f := &abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: -1, Candidates: rows}
				checkPair(t, f, p.Place(f))
				for i := range rows {
					if rows[i].Roles&abi.RolePrefill != 0 && rnd.IntN(4) == 0 {
						f.Fixed = int32(i)
						d := p.Place(f)
						if d.Prefill != f.Fixed {
							t.Fatalf("prefill = %d, fixed %d", d.Prefill, f.Fixed)
						}
						checkPair(t, f, d)
					}
				}
				f.Flow, f.Fixed = abi.FlowAggregated, -1
				if d := p.Place(f); d.Prefill != -1 || d.Decode < 0 || int(d.Decode) >= len(rows) {
					t.Fatalf("aggregated: %+v of %d rows", d, len(rows))
				}
			}
		})
	}
}

func checkPair(t *testing.T, f *abi.PlaceFacts, d abi.PlaceDecision) {
	t.Helper()
	n := int32(len(f.Candidates))
	if d.Prefill < 0 || d.Prefill >= n || d.Decode < 0 || d.Decode >= n {
		t.Fatalf("decision %+v of %d rows", d, n)
	}
	p, q := f.Candidates[d.Prefill], f.Candidates[d.Decode]
	if p.Roles&abi.RolePrefill == 0 || q.Roles&abi.RoleDecode == 0 {
		t.Fatalf("wrong roles: %+v %+v", p, q)
	}
	if p.Group != q.Group {
		t.Fatalf("groups %d and %d", p.Group, q.Group)
	}
	if p.Instance == q.Instance {
		t.Fatalf("both legs on instance %d though others could serve", p.Instance)
	}
	for _, c := range []struct {
		row  abi.Candidate
		role abi.Role
	}{{p, abi.RolePrefill}, {q, abi.RoleDecode}} {
		if !c.row.Trial || c.row.Requests == 0 || c.role == abi.RolePrefill && f.Fixed >= 0 {
			continue
		}
		for _, o := range f.Candidates {
			calm := o.Roles&c.role != 0 && (!o.Trial || o.Requests == 0)
			if c.role == abi.RolePrefill && calm || calm && o.Group == p.Group && o.Instance != p.Instance {
				t.Fatalf("%s was placed on %+v, whose trial is running, although %+v was available", c.role, c.row, o)
			}
		}
	}
}

func TestPlaceFindsNothing(t *testing.T) {
	for _, name := range PlaceNames() {
		for _, tt := range []struct {
			name string
			f    abi.PlaceFacts
			want abi.PlaceDecision
		}{
			{"empty aggregated", abi.PlaceFacts{Flow: abi.FlowAggregated, Fixed: -1}, abi.PlaceDecision{Prefill: -1, Decode: -1}},
			{"empty pair", abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1}, abi.PlaceDecision{Prefill: -1, Decode: -1}},
			{"no prefill", abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1, Candidates: pd(0, 2, 1)}, abi.PlaceDecision{Prefill: -1, Decode: -1}},
			{"no decode", abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1, Candidates: pd(1, 0, 1)}, abi.PlaceDecision{Prefill: 0, Decode: -1}},
			{"one row cannot be both legs", abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1, Candidates: both(1, 1, 1)}, abi.PlaceDecision{Prefill: 0, Decode: -1}},
		} {
			t.Run(name+"/"+tt.name, func(t *testing.T) {
				if got := placer(t, name).Place(&tt.f); got != tt.want {
					t.Errorf("got %+v, want %+v", got, tt.want)
				}
			})
		}
	}
}

// TestPlaceInsideOneInstance: two ranks of one instance pair only when there is
// no other instance.
func TestPlaceInsideOneInstance(t *testing.T) {
	for _, name := range PlaceNames() {
		t.Run(name, func(t *testing.T) {
			f := &abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: -1, Candidates: both(1, 2, 1)}
			d := placer(t, name).Place(f)
			if d.Prefill < 0 || d.Decode < 0 || d.Prefill == d.Decode {
				t.Errorf("got %+v, want the two ranks", d)
			}
		})
	}
}

// TestTrialGetsOneRequest: an idle half-open candidate is chosen like any
// other. While its trial request runs, it is not chosen.
func TestTrialGetsOneRequest(t *testing.T) {
	for _, name := range PlaceNames() {
		t.Run(name, func(t *testing.T) {
			p := placer(t, name)
			rows := pd(1, 2, 1)
			rows[1].Requests, rows[1].Tokens = 9, 900
			rows[2].Trial = true
			f := &abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1, Candidates: rows}
			seen := false
			for range 20 {
				seen = seen || p.Place(f).Decode == 2
			}
			if !seen {
				t.Error("the idle trial row was never tried")
			}
			rows[2].Requests = 1
			for range 20 {
				if d := p.Place(f); d.Decode != 1 {
					t.Fatalf("got %+v, want decode 1", d)
				}
			}
		})
	}
}

// TestPlaceSpreads: over idle targets each policy uses every slot (instance and
// rank) of each phase equally, for all numbers of instances and ranks.
func TestPlaceSpreads(t *testing.T) {
	const rounds = 4800
	tables := []struct {
		name string
		rows []abi.Candidate
	}{
		{"4x4 and 4x4", pd(4, 4, 4)},
		{"2x4 and 4x4", append(pd(2, 0, 4), pd(0, 4, 4)...)},
		{"3 and 2", pd(3, 2, 1)},
		{"both 4x2", both(4, 2, 1)},
		{"both 2x8", both(2, 8, 1)},
		{"two groups", append(both(2, 2, 1), both(2, 2, 2)...)},
	}
	for i := range tables[1].rows {
		tables[1].rows[i].Instance = uint32(i / 4)
	}
	for _, name := range PlaceNames() {
		for _, tt := range tables {
			t.Run(name+"/"+tt.name, func(t *testing.T) {
				p := placer(t, name)
				hits := [2]map[int32]int{{}, {}}
				for range rounds {
					d := p.Place(&abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: -1, Candidates: tt.rows})
					hits[0][d.Prefill]++
					hits[1][d.Decode]++
				}
				for i, role := range []abi.Role{abi.RolePrefill, abi.RoleDecode} {
					slots := 0
					for _, c := range tt.rows {
						if c.Roles&role != 0 {
							slots++
						}
					}
					if len(hits[i]) != slots {
						t.Fatalf("%s: %d of %d slots used", role, len(hits[i]), slots)
					}
					for row, n := range hits[i] {
						want := rounds / slots
						tolerance := want/3 + 1
						if name == "round_robin" {
							tolerance = 1
						}
						if n < want-tolerance || n > want+tolerance {
							t.Errorf("%s row %d: %d requests, want about %d", role, row, n, want)
						}
					}
				}
			})
		}
	}
}

// TestPlaceIsPure: the decision depends only on the facts.
func TestPlaceIsPure(t *testing.T) {
	for _, name := range PlaceNames() {
		t.Run(name, func(t *testing.T) {
			p := placer(t, name)
			for i := range 200 {
				f := &abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: -1, Candidates: pd(1+i%3, 1+i%5, 1+i%2)}
				first := p.Place(f)
				p.policy(&abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1, Sequence: 5, Random: 6, Candidates: pd(3, 3, 3)})
				if again := p.policy(f); first != again {
					t.Fatalf("decision %d: %+v and %+v", i, first, again)
				}
			}
		})
	}
}

// TestRoundRobinStrandsNone: a decode slot is reached even where the numbers of
// slots share a divisor and each prefill slot has its own partners.
func TestRoundRobinStrandsNone(t *testing.T) {
	rows := append(both(2, 1, 1), abi.Candidate{Roles: abi.RoleDecode, Group: 1, Instance: 9})
	p, hits := placer(t, "round_robin"), map[abi.PlaceDecision]int{}
	for range 400 {
		hits[p.Place(&abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: -1, Candidates: rows})]++
	}
	for _, d := range []abi.PlaceDecision{{Prefill: 0, Decode: 1}, {Prefill: 0, Decode: 2}, {Prefill: 1, Decode: 0}, {Prefill: 1, Decode: 2}} {
		if hits[d] != 100 {
			t.Errorf("%+v: %d of 400", d, hits[d])
		}
	}
}

func TestPlaceDoesNotAllocate(t *testing.T) {
	for _, name := range PlaceNames() {
		t.Run(name, func(t *testing.T) {
			p := placer(t, name)
			pair := &abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: -1, Candidates: pd(8, 8, 4)}
			one := &abi.PlaceFacts{Flow: abi.FlowAggregated, Fixed: -1, Candidates: both(8, 4, 1)}
			if n := testing.AllocsPerRun(100, func() { p.Place(pair); p.Place(one) }); n != 0 {
				t.Errorf("%v allocations a decision", n)
			}
		})
	}
}

// TestNamesAreThere: each name in the lists belongs to a policy.
func TestNamesAreThere(t *testing.T) {
	for _, plan := range PlanNames() {
		for _, place := range PlaceNames() {
			for _, mint := range MintNames() {
				if _, err := NewNative(Names{Plan: plan, Place: place, Mint: mint}); err != nil {
					t.Error(err)
				}
			}
		}
	}
}

func TestNative(t *testing.T) {
	n, err := NewNative(Names{Plan: "auto", Place: "least_load", Mint: "snowflake"})
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	if a, by, ok := n.Plan(ctx, &abi.PlanFacts{BothTargets: 1}); a != (abi.PlanAnswer{Decision: abi.PlanAggregate}) || by != "auto" || !ok {
		t.Errorf("plan: %v %q %v", a, by, ok)
	}
	d, by, ok := n.Place(ctx, &abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1, Candidates: pd(1, 1, 1)})
	if want := (abi.PlaceDecision{Prefill: 0, Decode: 1}); d != want || by != "least_load" || !ok {
		t.Errorf("place: %v %q %v", d, by, ok)
	}
	if id, by, ok := n.Mint(ctx, &abi.MintFacts{UnixMilli: abi.DisaggEpochMilli}); id != abi.MinDisaggID || by != "snowflake" || !ok {
		t.Errorf("mint: %v %q %v", id, by, ok)
	}
	plan, place, mint := &abi.PlanFacts{}, &abi.PlaceFacts{Fixed: -1, Candidates: pd(2, 2, 1)}, &abi.MintFacts{}
	if a := testing.AllocsPerRun(100, func() { n.Plan(ctx, plan); n.Place(ctx, place); n.Mint(ctx, mint) }); a != 0 {
		t.Errorf("%v allocations a decision", a)
	}
}

func TestNativeUnknown(t *testing.T) {
	for _, names := range []Names{
		{Plan: "x", Place: "least_load", Mint: "snowflake"},
		{Plan: "always", Place: "x", Mint: "snowflake"},
		{Plan: "never", Place: "power_of_two", Mint: "x"},
	} {
		if _, err := NewNative(names); err == nil {
			t.Errorf("%+v: no error", names)
		}
	}
}

func BenchmarkPlace(b *testing.B) {
	for _, name := range PlaceNames() {
		for _, rows := range []int{8, 64, 512} {
			b.Run(fmt.Sprintf("%s/%d", name, rows), func(b *testing.B) {
				p := placer(b, name)
				f := &abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: -1, Candidates: pd(rows/2, rows/2, 1)}
				b.ReportAllocs()
				for b.Loop() {
					p.Place(f)
				}
			})
		}
	}
}
