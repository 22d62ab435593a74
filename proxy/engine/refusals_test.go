package engine

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// dividing is a connector that requires prefill's page size to divide decode's page size.
type dividing struct{ fakeProtocol }

func (dividing) Compatible(p, d *Facts) error {
	if p.PageSize != 0 && d.PageSize != 0 && d.PageSize%p.PageSize != 0 {
		return errNotDividing
	}
	return nil
}

var errNotDividing = &SpecError{Name: "page"}

// TestGroupsOfOneDirection: the connector's rule concerns a prefill and a decode. Two
// prefills that differ may share one decode.
func TestGroupsOfOneDirection(t *testing.T) {
	m := []string{"m"}
	of := func(id int, name string, role abi.Role, page int) *Instance {
		i := made(id, name, role, "x", Ready, 1, Facts{Models: m, PageSize: page})
		i.protocol = dividing{fakeProtocol{flow: abi.FlowPrefillFirst}}
		return i
	}
	for _, tt := range []struct {
		name      string
		instances []*Instance
		lax       bool
		want      string
	}{
		{"smaller pages of prefill", []*Instance{of(1, "p", abi.RolePrefill, 16), of(2, "d", abi.RoleDecode, 64)}, false,
			"p/0 prefill 1, d/0 decode 1"},
		{"larger ones", []*Instance{of(1, "p", abi.RolePrefill, 64), of(2, "d", abi.RoleDecode, 16)}, false, ""},
		{"larger ones, allowed", []*Instance{of(1, "p", abi.RolePrefill, 64), of(2, "d", abi.RoleDecode, 16)}, true,
			"p/0 prefill 1, d/0 decode 1"},
		{"two prefills of one decode", []*Instance{of(1, "p", abi.RolePrefill, 16), of(2, "q", abi.RolePrefill, 24), of(3, "d", abi.RoleDecode, 48)}, false,
			"p/0 prefill 1, q/0 prefill 1, d/0 decode 1"},
		{"each its own", []*Instance{of(1, "p", abi.RolePrefill, 16), of(2, "q", abi.RolePrefill, 24), of(3, "d", abi.RoleDecode, 24), of(4, "e", abi.RoleDecode, 16)}, false,
			"p/0 prefill 1, e/0 decode 1, q/0 prefill 2, d/0 decode 2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, _ := newSnapshot(tt.instances, pairing{lax: tt.lax}).Pool("m")
			if got := show(p.Paired); got != tt.want {
				t.Errorf("paired %q\n  want %q", got, tt.want)
			}
		})
	}
}

// TestSameLabels: with pairs.same_labels, both legs of a request share the values of these labels.
// An engine without one of the labels takes no leg of two, and can still answer alone.
func TestSameLabels(t *testing.T) {
	m := []string{"m"}
	of := func(id int, name string, role abi.Role, page int, labels config.Labels) *Instance {
		i := made(id, name, role, "x", Ready, 1, Facts{Models: m, PageSize: page})
		i.protocol, i.Spec.Labels = dividing{fakeProtocol{flow: abi.FlowPrefillFirst}}, labels
		return i
	}
	for _, tt := range []struct {
		name      string
		instances []*Instance
		rules     pairing
		want      string
	}{
		{"one label", []*Instance{
			of(1, "p", abi.RolePrefill, 16, "zone=a"), of(2, "q", abi.RolePrefill, 16, "zone=b"), of(3, "d", abi.RoleDecode, 16, "zone=b"), of(4, "e", abi.RoleDecode, 16, "rack=1\nzone=a"),
		}, pairing{same: []string{"zone"}}, "p/0 prefill 1, e/0 decode 1, q/0 prefill 2, d/0 decode 2"},
		{"two labels", []*Instance{
			of(1, "p", abi.RolePrefill, 16, "rack=1\nzone=a"), of(2, "d", abi.RoleDecode, 16, "rack=2\nzone=a"), of(3, "e", abi.RoleDecode, 16, "rack=1\nzone=a"),
		}, pairing{same: []string{"zone", "rack"}}, "p/0 prefill 1, e/0 decode 1"},
		{"no label", []*Instance{
			of(1, "p", abi.RolePrefill, 16, ""), of(2, "d", abi.RoleDecode, 16, ""), of(3, "e", abi.RoleDecode, 16, "zone=a"),
		}, pairing{same: []string{"zone"}}, ""},
		{"the common partner is in another zone", []*Instance{
			of(1, "p", abi.RolePrefill, 16, "zone=a"), of(2, "q", abi.RolePrefill, 24, "zone=a"), of(3, "d", abi.RoleDecode, 48, "zone=b"), of(4, "e", abi.RoleDecode, 16, "zone=a"),
		}, pairing{same: []string{"zone"}}, "p/0 prefill 1, e/0 decode 1"},
		{"also for pairs that the facts exclude", []*Instance{
			of(1, "p", abi.RolePrefill, 64, "zone=a"), of(2, "d", abi.RoleDecode, 16, "zone=b"), of(3, "e", abi.RoleDecode, 16, "zone=a"),
		}, pairing{lax: true, same: []string{"zone"}}, "p/0 prefill 1, e/0 decode 1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, _ := newSnapshot(tt.instances, tt.rules).Pool("m")
			if got := show(p.Paired); got != tt.want {
				t.Errorf("paired %q\n  want %q", got, tt.want)
			}
		})
	}
	p, _ := newSnapshot([]*Instance{of(1, "b", abi.RoleBoth, 16, ""), of(2, "c", abi.RoleBoth, 16, "")}, pairing{same: []string{"zone"}}).Pool("m")
	if len(p.Paired) != 0 || len(p.Both) != 2 || p.Plan != (Counts{Both: 2}) {
		t.Errorf("%+v", p)
	}
}

// TestRefusedPairs: the facts of two engines exclude a pair before the first request. The
// exclusion is visible and logged once. It ends if the facts change or the operator
// allows the pair.
func TestRefusedPairs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.engines.facts["p:80"] = "model m\nepoch 1\npage 16"
		f.engines.facts["d:80"] = "model m\nepoch 1\npage 64"
		f.engines.facts["e:80"] = "model m\nepoch 1\npage 16"
		d := f.spec("d", "decode", "fake")
		d.Ranks = 2
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("p", "prefill", "fake"), d, f.spec("e", "decode", "fake")}, 0))
		f.start(t)
		refused := func() string {
			var s []string
			for _, r := range f.Pairs() {
				if r.Refused != "" {
					s = append(s, r.Prefill+"-"+r.Decode+" "+r.State+" "+r.LastError+": "+r.Refused)
				}
			}
			return strings.Join(s, ", ")
		}
		const want = "p-d broken incompatible: page sizes differ, p-d broken incompatible: page sizes differ"
		if got := refused(); got != want {
			t.Errorf("refused %q, want %q", got, want)
		}
		f.Pair(Target{Instance: f.get(t, "p")}, Target{Instance: f.get(t, "e")}).Success()
		if got := refused(); got != want || len(f.Pairs()) != 3 {
			t.Errorf("%d pairs, refused %q, want %q", len(f.Pairs()), got, want)
		}
		time.Sleep(5 * time.Minute) // the facts are requested many times
		synctest.Wait()
		if n := strings.Count(f.logged(), "pairs refused"); n != 1 {
			t.Errorf("the exclusion was logged %d times: %s", n, f.logged())
		}

		f.Configure(*f.health.Load(), circuitOf3, config.Pairs{AllowIncompatible: true})
		if p, _ := f.Snapshot().Pool("m"); len(p.Paired) != 4 || refused() != "" {
			t.Errorf("allowed: paired %q, refused %q", show(p.Paired), refused())
		}
		f.Configure(*f.health.Load(), circuitOf3, config.Pairs{})
		if p, _ := f.Snapshot().Pool("m"); len(p.Paired) != 2 || refused() != want {
			t.Errorf("paired %q, refused %q", show(p.Paired), refused())
		}

		f.engines.set(func() { f.engines.facts["d:80"] = "model m\nepoch 2\npage 16" })
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if p, _ := f.Snapshot().Pool("m"); len(p.Paired) != 4 || refused() != "" {
			t.Errorf("after the restart: paired %q, refused %q", show(p.Paired), refused())
		}
	})
}

// TestRefusedOfOneInstance: the exclusions of one instance are those of all in which it takes part.
func TestRefusedOfOneInstance(t *testing.T) {
	of := func(id int, name string, role abi.Role, s State, page int, model string) *Instance {
		i := made(id, name, role, "x", s, 1, Facts{Models: []string{model}, PageSize: page})
		i.protocol = dividing{fakeProtocol{flow: abi.FlowPrefillFirst}}
		return i
	}
	all := []*Instance{
		of(1, "p", abi.RolePrefill, Ready, 16, "m"), of(2, "q", abi.RolePrefill, Ready, 24, "m"), of(3, "d", abi.RoleDecode, Ready, 16, "m"),
		of(4, "e", abi.RoleDecode, Ready, 24, "m"), of(5, "b", abi.RoleBoth, Ready, 40, "m"), of(6, "o", abi.RolePrefill, Ready, 64, "other"),
		of(7, "u", abi.RoleDecode, Unhealthy, 7, "m"),
	}
	s := newSnapshot(all, pairing{})
	list := func(i *Instance, part func(p, d *Instance) bool) (pairs []string) {
		s.refused(i, func(p, d *Instance, _ error) bool {
			if part(p, d) {
				pairs = append(pairs, p.Spec.Name+d.Spec.Name)
			}
			return true
		})
		return pairs
	}
	for _, i := range all {
		want := list(nil, func(p, d *Instance) bool { return p == i || d == i })
		if got := list(i, func(_, _ *Instance) bool { return true }); !slices.Equal(got, want) || (len(got) == 0) != (i.ID > 5) {
			t.Errorf("%s: got %v, want %v", i.Spec.Name, got, want)
		}
	}
}
