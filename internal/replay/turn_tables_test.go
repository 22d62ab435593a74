package replay

import (
	"fmt"
	"testing"

	"github.com/pdproxy/pdproxy/internal/plot"
)

// chatFleet is the fleet of the tables of turns.
func chatFleet(t testing.TB, blocks int, load, volatile float64) Config {
	return Config{Prefill: 4, Ranks: 1, Decode: 4, BlocksPerRank: blocks, BlockTokens: 512, Load: load, Volatile: volatile, Seed: 1, Model: preset(t, "llama70b-h100")}
}

// turnSettings are the built-in retain policies of these names, without and with the filter.
func turnSettings(t testing.TB, names ...string) (list []Setting) {
	for _, stable := range []bool{false, true} {
		for _, name := range names {
			s := setting(t, name)
			s.Stable = stable
			list = append(list, s)
		}
	}
	return list
}

// BenchmarkTurnTables writes the tables of turns of docs/concepts/routing.md. It is a benchmark because it takes minutes.
func BenchmarkTurnTables(b *testing.B) {
	for b.Loop() {
		for _, name := range []string{"mooncake", "mooncake_synthetic"} {
			trace := publicTrace(b, name)
			for _, blocks := range []int{900, 4000} {
				writeTurnTable(b, trace, blocks)
			}
			writeShares(b, trace)
		}
	}
}

// writeTurnTable writes the figures of each setting: p50 and p95 at each load, and the others at load 0.5.
func writeTurnTable(b *testing.B, trace *Trace, blocks int) {
	loads := []float64{0.1, 0.3, 0.5, 0.7, 0.9}
	fmt.Printf("\n%s, %d blocks, half of the sessions change the beginning of their prompts:\n\n", trace.Name, blocks)
	fmt.Println("| `retain` | `stable_prefix` | 0.1 | 0.3 | 0.5 | 0.7 | 0.9 | hits | to decode | to prefill | KV held |")
	fmt.Println("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
	for _, s := range turnSettings(b, "none", "lease", "likely") {
		fmt.Printf("| `%s` | %s |", s.Retain, onOff(s.Stable))
		var middle *SessionRow
		for _, load := range loads {
			row := conversationLab(b, chatFleet(b, blocks, load, 0.5), trace).Run(builtin(b, "kv_aware"), s)
			fmt.Printf(" %s, %s |", plot.Milliseconds(row.TTFTP50), plot.Milliseconds(row.TTFTP95))
			if load == 0.5 {
				middle = row
			}
		}
		fmt.Printf(" %.3f | %.1f TB | %.2f TB | %.1f M block s |\n", middle.HitRatio, middle.ToDecode/1e12, middle.ToPrefill/1e12, middle.HeldSeconds/1e6)
	}
}

// writeShares writes the p95 of `likely` without the filter, by the share of sessions that change the beginning
// of their prompts. With the filter all shares have the figures of no such session.
func writeShares(b *testing.B, trace *Trace) {
	fmt.Printf("\n%s, 4000 blocks, likely, without the filter:\n\n", trace.Name)
	fmt.Println("| sessions | p95 at 0.3 | 0.5 | 0.7 | hits at 0.5 |")
	fmt.Println("| --- | --- | --- | --- | --- |")
	for _, share := range []float64{0, 0.5, 1} {
		fmt.Printf("| %.0f %% |", 100*share)
		hits := 0.0
		for _, load := range []float64{0.3, 0.5, 0.7} {
			row := conversationLab(b, chatFleet(b, 4000, load, share), trace).Run(builtin(b, "kv_aware"), setting(b, "likely"))
			fmt.Printf(" %s |", plot.Milliseconds(row.TTFTP95))
			if load == 0.5 {
				hits = row.HitRatio
			}
		}
		fmt.Printf(" %.3f |\n", hits)
	}
}
