package replay

import (
	"testing"

	"github.com/pdproxy/pdproxy/policies"
)

// sloAware returns slo_aware with that target for the time between tokens, in seconds.
func sloAware(t testing.TB, token float64) Placer {
	t.Helper()
	set, err := policies.New(policies.Params{"slo_aware": {"token_seconds": token}})
	if err != nil {
		t.Fatal(err)
	}
	place, _ := set.Place("slo_aware")
	return native{place}
}

// TestTokenTarget: with a target for the time between tokens slo_aware has more good requests than
// without one, if about half of the requests would miss the limit, also on a trace on which no parameter was
// tuned. With the limit of the preset, which no request misses, nothing changes.
func TestTokenTarget(t *testing.T) {
	names := []string{"mooncake", "azure_conv"}
	if raceEnabled {
		names = names[:1]
	}
	for _, name := range names {
		trace := publicTrace(t, name)
		for _, load := range []float64{0.5, 0.7} {
			cfg := fleetAt(t, "llama70b-h100", load, 1)
			lab := newLab(t, cfg, trace)
			off := lab.Run("off", sloAware(t, 1e6))
			if on := lab.Run("on", sloAware(t, cfg.Model.ITLMillis/1000)); on.GoodRatio != off.GoodRatio {
				t.Errorf("%s, load %.1f: %.4f good requests with a target that holds, %.4f without", name, load, on.GoodRatio, off.GoodRatio)
			}
			cfg.Model.ITLMillis = 0.95 * off.ITLP50
			lab = newLab(t, cfg, trace)
			off, on := lab.Run("off", sloAware(t, 1e6)), lab.Run("on", sloAware(t, cfg.Model.ITLMillis/1000))
			if on.GoodRatio < 1.1*off.GoodRatio {
				t.Errorf("%s, load %.1f, limit %.1f ms: %.4f good requests with the target, %.4f without", name, load, cfg.Model.ITLMillis, on.GoodRatio, off.GoodRatio)
			}
		}
	}
}
