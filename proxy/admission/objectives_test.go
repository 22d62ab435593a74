package admission

import (
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestObjectives: a class of the configuration comes before an objective, by its name and then by its
// priority. Other priorities are classes of their own, whose weights follow the order.
func TestObjectives(t *testing.T) {
	cfg := config.Default()
	batch := config.DefaultPriorityClass()
	batch.Name, batch.Priority, batch.Weight = "batch", -10, 0.5
	cfg.PriorityClasses = []config.PriorityClass{batch}
	got := Objectives(&cfg, map[string]int{"batch": 7, "nightly": -10, "plain": 0, "high": 10, "higher": 20, "also-high": 10, "low": -1})
	for name, want := range map[string]struct {
		class     string
		priority  int
		weight    float64
		sheddable bool
	}{
		"nightly": {"batch", -10, 0.5, true}, "plain": {"default", 0, 1, false}, "high": {"priority_10", 10, 256, false},
		"also-high": {"priority_10", 10, 256, false}, "higher": {"priority_20", 20, 4096, false}, "low": {"priority_-1", -1, 1. / 16, true},
	} {
		if o := got[name]; o.Class.Name != want.class || o.Class.Priority != want.priority || o.Class.Weight != want.weight || o.Sheddable != want.sheddable {
			t.Errorf("%s: got %+v, want %+v", name, o, want)
		}
	}
	if _, found := got["batch"]; found {
		t.Error("an objective replaces a class of the configuration")
	}
	if Objectives(&cfg, nil) != nil {
		t.Error("without objects there are objectives")
	}
}

// TestSheddableGate: a sheddable request of a saturated model is refused at once, and one of another
// model runs.
func TestSheddableGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, _ := gated(map[string]int{"full": 0})
		c := modelClaim("a", "full")
		c.Sheddable = true
		if _, err := q.Enter(t.Context(), c, limits(2)); Reason(err) != "saturated" || q.Waiting() != 0 {
			t.Errorf("got %v, %d wait", err, q.Waiting())
		}
		c.Model = "free"
		p, err := q.Enter(t.Context(), c, limits(2))
		if err != nil {
			t.Fatal(err)
		}
		p.Sent()
		p.Leave(0)
		q.ends(t)
	})
}
