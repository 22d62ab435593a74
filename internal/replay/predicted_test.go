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

// TestMovesKeepPrefixes: on a busy fleet with long shared prefixes, the moves of slo_aware
// do not increase the work so far that more requests are late.
func TestMovesKeepPrefixes(t *testing.T) {
	if raceEnabled {
		t.Skip("one goroutine, and ten times as long with the race detector")
	}
	tr := vary(t, wholeTrace(t), "mixed", 1)
	for _, load := range []float64{0.8, 0.9, 1} {
		l := newLab(t, Config{Prefill: 4, Ranks: 4, Decode: 4, BlocksPerRank: 4000, BlockTokens: 512, Load: load, Seed: 1, Model: preset(t, "llama70b-h100")}, tr)
		slo, kv := l.Run("slo_aware", builtin(t, "slo_aware")), l.Run("kv_aware", builtin(t, "kv_aware"))
		if slo.Goodput < kv.Goodput || slo.HitRatio < 0.96*kv.HitRatio {
			t.Errorf("load %v: goodput %.2f and hits %.3f, kv_aware has %.2f and %.3f", load, slo.Goodput, slo.HitRatio, kv.Goodput, kv.HitRatio)
		}
	}
}
