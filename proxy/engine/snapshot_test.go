package engine

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// made returns an instance with facts and a state. The instance belongs to no
// registry.
func made(id int, name string, role abi.Role, connector string, s State, ranks int, facts Facts) *Instance {
	p := fakeProtocol{flow: abi.FlowPrefillFirst}
	if connector == "none" {
		p.flow = abi.FlowAggregated
	}
	p.oneMode = connector == "one mode"
	i := &Instance{
		ID: uint32(id), Spec: config.Engine{Name: name, Connector: connector}, Role: role,
		Flow: p.flow, protocol: p, Load: make([]load.Counter, ranks),
	}
	i.facts.Store(&facts)
	i.setState(s)
	return i
}

// show writes each row as "name/rank role group".
func show(rows []Row) string {
	var s []string
	for _, r := range rows {
		s = append(s, fmt.Sprintf("%s/%d %s %d", r.Name(), r.Rank, r.Facts.Roles, r.Facts.Group))
	}
	return strings.Join(s, ", ")
}

// The placement never sees encoders. Encoders form no group and make no model
// servable.
func TestEncoders(t *testing.T) {
	m := Facts{Models: []string{"m"}}
	s := newSnapshot([]*Instance{
		made(1, "e", abi.RoleEncode, "x", Ready, 2, m), made(2, "p", abi.RolePrefill, "x", Ready, 1, m),
		made(3, "d", abi.RoleDecode, "x", Ready, 1, m), made(4, "away", abi.RoleEncode, "x", Unhealthy, 1, m),
		made(5, "alone", abi.RoleEncode, "x", Ready, 1, Facts{Models: []string{"other"}}),
	}, pairing{})
	p, _ := s.Pool("m")
	if got := show(p.Encode); got != "e/0 encode 0, e/1 encode 0" || !p.Encoders {
		t.Errorf("encoders %q", got)
	}
	if got := show(p.Paired); got != "p/0 prefill 1, d/0 decode 1" || show(p.Ready) != got || p.Plan != (Counts{Prefill: 1, Decode: 1}) || p.Configured != (Counts{Prefill: 1, Decode: 1}) {
		t.Errorf("paired %q, ready %q, plan %+v, configured %+v", got, show(p.Ready), p.Plan, p.Configured)
	}
	if got := s.Models(); len(got) != 1 || got[0] != "m" || !s.Ready() {
		t.Errorf("models %q", got)
	}
	if other, ok := s.Pool("other"); !ok || len(other.Encode) != 1 || len(other.Ready) != 0 {
		t.Error("the pool of an encoder alone")
	}
}

func TestPool(t *testing.T) {
	m := []string{"m"}
	for _, tt := range []struct {
		name      string
		instances []*Instance
		ready     string
		both      string
		paired    string
		groups    string
		plan      Counts
	}{
		{
			"one pair with ranks",
			[]*Instance{
				made(1, "p", abi.RolePrefill, "x", Ready, 2, Facts{Models: m}),
				made(2, "d", abi.RoleDecode, "x", Ready, 1, Facts{Models: m}),
			},
			"p/0 prefill 1, p/1 prefill 1, d/0 decode 1", "",
			"p/0 prefill 1, p/1 prefill 1, d/0 decode 1", "[3]", Counts{2, 1, 0},
		},
		{
			"an instance is no partner of itself",
			[]*Instance{made(1, "b", abi.RoleBoth, "x", Ready, 2, Facts{Models: m})},
			"b/0 both 1, b/1 both 1", "b/0 both 1, b/1 both 1", "", "[]", Counts{0, 0, 2},
		},
		{
			"both and decode: both only prefills in a pair",
			[]*Instance{
				made(1, "b", abi.RoleBoth, "x", Ready, 1, Facts{Models: m}),
				made(2, "d", abi.RoleDecode, "x", Ready, 1, Facts{Models: m}),
			},
			"b/0 both 1, d/0 decode 1", "b/0 both 1", "b/0 prefill 1, d/0 decode 1", "[2]", Counts{1, 1, 1},
		},
		{
			"both of one mode takes no leg of a pair",
			[]*Instance{
				made(1, "p", abi.RolePrefill, "one mode", Ready, 1, Facts{Models: m}),
				made(2, "d", abi.RoleDecode, "one mode", Ready, 1, Facts{Models: m}),
				made(3, "b", abi.RoleBoth, "one mode", Ready, 1, Facts{Models: m}),
			},
			"b/0 both 0, p/0 prefill 1, d/0 decode 1", "b/0 both 0", "p/0 prefill 1, d/0 decode 1", "[2]", Counts{1, 1, 1},
		},
		{
			"connectors are apart",
			[]*Instance{
				made(1, "p", abi.RolePrefill, "x", Ready, 1, Facts{Models: m}),
				made(2, "d", abi.RoleDecode, "y", Ready, 1, Facts{Models: m}),
				made(3, "n", abi.RoleBoth, "none", Ready, 1, Facts{Models: m}),
			},
			"n/0 both 0, p/0 prefill 1, d/0 decode 2", "n/0 both 0", "", "[]", Counts{0, 0, 1},
		},
		{
			"facts are apart",
			[]*Instance{
				made(1, "p1", abi.RolePrefill, "x", Ready, 1, Facts{Models: m, PageSize: 16}),
				made(2, "p2", abi.RolePrefill, "x", Ready, 1, Facts{Models: m, PageSize: 64}),
				made(3, "d2", abi.RoleDecode, "x", Ready, 1, Facts{Models: m, PageSize: 64}),
				made(4, "d1", abi.RoleDecode, "x", Ready, 1, Facts{Models: m, PageSize: 16}),
				made(5, "p3", abi.RolePrefill, "x", Ready, 1, Facts{Models: m, PageSize: 16}),
			},
			"p1/0 prefill 1, d1/0 decode 1, p3/0 prefill 1, p2/0 prefill 2, d2/0 decode 2", "",
			"p1/0 prefill 1, d1/0 decode 1, p3/0 prefill 1, p2/0 prefill 2, d2/0 decode 2", "[3 5]", Counts{3, 2, 0},
		},
		{
			"an engine without facts joins the first group",
			[]*Instance{
				made(1, "p", abi.RolePrefill, "x", Ready, 1, Facts{Models: m, PageSize: 16}),
				made(2, "q", abi.RolePrefill, "x", Ready, 1, Facts{Models: m}),
				made(3, "d", abi.RoleDecode, "x", Ready, 1, Facts{Models: m, PageSize: 64}),
			},
			"p/0 prefill 1, q/0 prefill 1, d/0 decode 2", "", "", "[]", Counts{},
		},
		{
			"not ready is not offered",
			[]*Instance{
				made(1, "p", abi.RolePrefill, "x", Draining, 1, Facts{Models: m}),
				made(2, "q", abi.RolePrefill, "x", Unhealthy, 1, Facts{Models: m}),
				made(3, "d", abi.RoleDecode, "x", Ready, 1, Facts{Models: m}),
			},
			"d/0 decode 1", "", "", "[]", Counts{0, 0, 0},
		},
		{
			"fewer ranks than configured",
			[]*Instance{made(1, "b", abi.RoleBoth, "x", Ready, 4, Facts{Models: m, DPSize: 2})},
			"b/0 both 1, b/1 both 1", "b/0 both 1, b/1 both 1", "", "[]", Counts{0, 0, 2},
		},
		{
			"more ranks than configured",
			[]*Instance{made(1, "b", abi.RoleBoth, "x", Ready, 1, Facts{Models: m, DPSize: 8})},
			"b/0 both 1", "b/0 both 1", "", "[]", Counts{0, 0, 1},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, ok := newSnapshot(tt.instances, pairing{}).Pool("m")
			if !ok {
				t.Fatal("no pool")
			}
			if got := show(p.Ready); got != tt.ready {
				t.Errorf("ready  %q\n  want %q", got, tt.ready)
			}
			if got := show(p.Both); got != tt.both {
				t.Errorf("both   %q\n  want %q", got, tt.both)
			}
			if got := show(p.Paired); got != tt.paired {
				t.Errorf("paired %q\n  want %q", got, tt.paired)
			}
			if got := fmt.Sprint(p.Groups); got != tt.groups {
				t.Errorf("groups %s, want %s", got, tt.groups)
			}
			if p.Plan != tt.plan {
				t.Errorf("plan %+v, want %+v", p.Plan, tt.plan)
			}
		})
	}
}

func TestSnapshotModels(t *testing.T) {
	a := made(1, "a", abi.RoleBoth, "x", Ready, 1, Facts{Models: []string{"base", "lora", "base"}})
	b := made(2, "b", abi.RoleBoth, "x", Unhealthy, 1, Facts{Models: []string{"away"}})
	c := made(3, "c", abi.RoleBoth, "x", Down, 1, Facts{})
	d := made(4, "d", abi.RoleBoth, "x", Ready, 1, Facts{Models: []string{"ignored"}})
	d.Spec.Model = "mine"
	s := newSnapshot([]*Instance{a, b, c, d}, pairing{})
	if got := strings.Join(s.Models(), " "); got != "away base lora mine" {
		t.Errorf("models %q", got)
	}
	if !s.Unlearned {
		t.Error("Unlearned = false although the models of c are unknown")
	}
	for model, rows := range map[string]int{"base": 1, "lora": 1, "mine": 1, "away": 0} {
		if p, ok := s.Pool(model); !ok || len(p.Ready) != rows {
			t.Errorf("pool %q: %v", model, ok)
		}
	}
	if _, ok := s.Pool("ignored"); ok {
		t.Error("the engine's model is used although a model is configured")
	}
	if p, n := s.Only(); p != nil || n != 4 {
		t.Errorf("only: %v, %d", p, n)
	}
	if p, n := newSnapshot([]*Instance{b}, pairing{}).Only(); p == nil || p.Model != "away" || n != 1 {
		t.Errorf("only: %v, %d", p, n)
	}
	if p, n := newSnapshot(nil, pairing{}).Only(); p != nil || n != 0 {
		t.Errorf("only: %v, %d", p, n)
	}
}

func TestSnapshotReady(t *testing.T) {
	m := Facts{Models: []string{"m"}}
	p := made(1, "p", abi.RolePrefill, "x", Ready, 1, m)
	d := made(2, "d", abi.RoleDecode, "x", Ready, 1, m)
	b := made(3, "b", abi.RoleBoth, "none", Ready, 1, m)
	for _, tt := range []struct {
		instances []*Instance
		want      bool
	}{
		{nil, false},
		{[]*Instance{p}, false},
		{[]*Instance{d}, false},
		{[]*Instance{p, d}, true},
		{[]*Instance{b}, true},
	} {
		if got := newSnapshot(tt.instances, pairing{}).Ready(); got != tt.want {
			t.Errorf("%d instances: %v", len(tt.instances), got)
		}
	}
}

func TestSnapshotInstance(t *testing.T) {
	old := made(1, "a", abi.RoleBoth, "x", Draining, 1, Facts{})
	if s := newSnapshot([]*Instance{old}, pairing{}); s.Instance("a") != old || s.Instance("b") != nil {
		t.Error("a draining instance is not found although no other instance has its name")
	}
	now := made(2, "a", abi.RoleBoth, "x", Ready, 1, Facts{})
	if newSnapshot([]*Instance{old, now}, pairing{}).Instance("a") != now {
		t.Error("the draining instance was returned instead of the ready one")
	}
}

func TestPeer(t *testing.T) {
	m := Facts{Models: []string{"m"}}
	p := made(1, "p", abi.RolePrefill, "x", Ready, 1, m)
	d1 := made(2, "d1", abi.RoleDecode, "x", Unhealthy, 1, m)
	d2 := made(3, "d2", abi.RoleDecode, "x", Ready, 2, m)
	other := made(4, "o", abi.RoleDecode, "y", Ready, 1, m)
	s := newSnapshot([]*Instance{other, p, d1, d2}, pairing{})
	gone := made(9, "gone", abi.RoleDecode, "x", Draining, 1, m)
	at := func(i *Instance, rank int) Target { return Target{Instance: i, Rank: rank} }
	for _, tt := range []struct {
		name  string
		of    Target
		phase abi.Phase
		tried []Target
		want  Target
	}{
		{"another decode", at(d1, 0), abi.Decode, []Target{at(d1, 0)}, at(d2, 0)},
		{"its other rank", at(d1, 0), abi.Decode, []Target{at(d1, 0), at(d2, 0)}, at(d2, 1)},
		{"none left", at(d1, 0), abi.Decode, []Target{at(d2, 1), at(d2, 0)}, Target{}},
		{"a prefill", at(d2, 0), abi.Prefill, nil, at(p, 0)},
		{"of an instance that has left: by connector", at(gone, 0), abi.Decode, nil, at(d2, 0)},
		{"of an unknown model", at(made(8, "z", abi.RoleDecode, "x", Ready, 1, Facts{Models: []string{"z"}}), 0), abi.Decode, nil, Target{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := s.Peer(tt.of, tt.phase, tt.tried); got != tt.want {
				t.Errorf("got %s/%d, want %s/%d", got.Name(), got.Rank, tt.want.Name(), tt.want.Rank)
			}
		})
	}
}

// TestPoolGroupOfAway: a target that drains or is unhealthy keeps its group,
// because transfers from the target still need the group.
func TestPoolGroupOfAway(t *testing.T) {
	m := Facts{Models: []string{"m"}}
	p := made(1, "p", abi.RolePrefill, "x", Draining, 1, m)
	q := made(2, "q", abi.RolePrefill, "x", Down, 1, m)
	d := made(3, "d", abi.RoleDecode, "x", Ready, 1, m)
	pool, _ := newSnapshot([]*Instance{p, q, d}, pairing{}).Pool("m")
	gp, ok := pool.Group(Target{Instance: p})
	gd, _ := pool.Group(Target{Instance: d})
	if !ok || gp != gd || gp == 0 {
		t.Errorf("groups %d and %d", gp, gd)
	}
	if _, ok := pool.Group(Target{Instance: q}); ok {
		t.Error("an instance that never answered has no group")
	}
	if pool.Configured != (Counts{Prefill: 2, Decode: 1}) {
		t.Errorf("configured %+v", pool.Configured)
	}
}

// TestRegistryPublishesGroups: a registry derives the groups from the answers to
// its probes.
func TestRegistryPublishesGroups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.engines.facts["p2:80"] = "model m\npage 64"
		f.engines.facts["d2:80"] = "model m\npage 64"
		f.engines.facts["p1:80"] = "model m\npage 16"
		f.engines.facts["d1:80"] = "model m\npage 16"
		f.must(t, f.Apply(SourceStatic, []config.Engine{
			f.spec("p1", "prefill", "fake"), f.spec("d1", "decode", "fake"),
			f.spec("p2", "prefill", "fake"), f.spec("d2", "decode", "fake"),
		}, 0))
		f.start(t)
		p, _ := f.Snapshot().Pool("m")
		if got, want := show(p.Paired), "p1/0 prefill 1, d1/0 decode 1, p2/0 prefill 2, d2/0 decode 2"; got != want {
			t.Errorf("paired %q\n  want %q", got, want)
		}
	})
}

func BenchmarkSnapshot(b *testing.B) {
	var instances []*Instance
	for n := range 512 {
		role := abi.RolePrefill
		if n%2 == 1 {
			role = abi.RoleDecode
		}
		instances = append(instances, made(n+1, fmt.Sprint("e", n), role, "x", Ready, 1, Facts{Models: []string{"m"}}))
	}
	for b.Loop() {
		newSnapshot(instances, pairing{})
	}
}
