package replay

import "testing"

// TestPredictions: on a part of a real trace, the share of near predictions and the goodput
// of slo_aware stay.
func TestPredictions(t *testing.T) {
	tr := wholeTrace(t)
	tr.Requests = tr.Requests[:2500]
	for _, load := range []float64{0.5, 0.9} {
		l := newLab(t, Config{Prefill: 4, Ranks: 4, Decode: 4, BlocksPerRank: 4000, BlockTokens: 512, Load: load, Seed: 1, Model: preset(t, "llama70b-h100")}, tr)
		slo, kv := l.Run("slo_aware", builtin(t, "slo_aware")), l.Run("kv_aware", builtin(t, "kv_aware"))
		if slo.Predicted == nil || *slo.Predicted < 0.88 || slo.Goodput < kv.Goodput {
			t.Errorf("load %v: %+v, kv_aware has goodput %.2f", load, slo.Row, kv.Goodput)
		}
	}
}
