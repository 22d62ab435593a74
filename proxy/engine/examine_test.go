package engine

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestExamine: one probe makes an instance ready, or returns why it is not.
func TestExamine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.engines.facts["a:80"], f.engines.down["b:80"] = "model m\npage 16\n", true
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake"), f.spec("b", "both", "fake"), f.spec("c", "both", "fake")}, 0))
		f.engines.set(func() { f.engines.facts["c:80"] = "bad 1\n" })
		for name, want := range map[string]string{"a": "", "b": "refused", "c": "bad"} {
			err := f.Examine(t.Context(), f.get(t, name))
			if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want %q", name, err, want)
			}
		}
		if i := f.get(t, "a"); i.State() != Ready || i.Facts().PageSize != 16 {
			t.Errorf("state %v, facts %+v", i.State(), i.Facts())
		}
	})
}

// TestMisfit: the reasons that exclude a pair of engines whose roles, models and connectors fit.
func TestMisfit(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(p, d *config.Engine, rules *config.Pairs)
		pages  [2]int
		ok     bool
		want   string
	}{
		"fits":                 {pages: [2]int{16, 16}, ok: true},
		"other blocks":         {pages: [2]int{16, 24}, ok: true, want: "page sizes differ"},
		"other blocks allowed": {pages: [2]int{16, 24}, ok: true, change: func(_, _ *config.Engine, r *config.Pairs) { r.AllowIncompatible = true }},
		"two prefill":          {change: func(_, d *config.Engine, _ *config.Pairs) { d.Role = "prefill" }},
		"other models":         {change: func(_, d *config.Engine, _ *config.Pairs) { d.Model = "n" }},
		"other connectors":     {change: func(_, d *config.Engine, _ *config.Pairs) { d.Connector = "epoch" }},
		"no connector":         {change: func(p, d *config.Engine, _ *config.Pairs) { p.Connector, d.Connector = "none", "none" }},
		"a label": {ok: true, want: ErrLabels.Error(), change: func(p, d *config.Engine, r *config.Pairs) {
			r.SameLabels = []string{"zone"}
			p.Labels = "zone=a"
		}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t)
			p, d, rules := f.spec("p", "prefill", "fake"), f.spec("d", "decode", "fake"), config.Pairs{}
			p.Model, d.Model = "m", "m"
			if tt.change != nil {
				tt.change(&p, &d, &rules)
			}
			f.Configure(config.Health{}, config.Circuit{}, rules)
			f.must(t, f.Apply(SourceStatic, []config.Engine{p, d}, 0))
			a, b := f.get(t, "p"), f.get(t, "d")
			a.facts.Store(&Facts{PageSize: tt.pages[0]})
			b.facts.Store(&Facts{PageSize: tt.pages[1]})
			reason, ok := f.Misfit(a, b)
			if ok != tt.ok || (reason != nil) != (tt.want != "") || reason != nil && !strings.Contains(reason.Error(), tt.want) {
				t.Errorf("got %v, %v, want %q, %v", reason, ok, tt.want, tt.ok)
			}
		})
	}
}
