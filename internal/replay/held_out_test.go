package replay

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// heldOutTraces are public traces on which no parameter was tuned.
var heldOutTraces = []string{"mooncake_synthetic", "azure_code", "azure_conv"}

// compared are the policies of the tables.
var compared = []string{
	"kv_aware", "pair_aware", "slo_aware", "dynamo_cost",
	"sglang_cache_aware", "trtllm_kv_cache_aware", "trtllm_conversation",
}

func fleetAt(t testing.TB, model string, load float64, seed uint64) Config {
	return Config{Prefill: 4, Ranks: 4, Decode: 4, BlocksPerRank: 4000, BlockTokens: 512, Load: load, Seed: seed, Model: preset(t, model)}
}

// TestHeldOutTraces: on traces on which no parameter was tuned, the p95 and the good requests of
// kv_aware are at most 5 % worse than those of the routers that it is compared with.
func TestHeldOutTraces(t *testing.T) {
	names := heldOutTraces
	if raceEnabled {
		names = names[:1] // the others take ten times as long there
	}
	for _, name := range names {
		lab := newLab(t, fleetAt(t, "llama70b-h100", 0.7, 1), publicTrace(t, name))
		own := lab.Run("kv_aware", builtin(t, "kv_aware"))
		for _, peer := range []string{"dynamo_cost", "sglang_cache_aware", "trtllm_kv_cache_aware"} {
			r := lab.Run(peer, builtin(t, peer))
			if own.TTFTP95 > 1.05*r.TTFTP95 || own.GoodRatio < 0.95*r.GoodRatio {
				t.Errorf("%s: kv_aware has p95 %.0f ms, good %.4f, %s %.0f ms, %.4f", name, own.TTFTP95, own.GoodRatio, peer, r.TTFTP95, r.GoodRatio)
			}
		}
	}
}

// BenchmarkTables writes the tables of docs/concepts/routing.md: the medians of three seeds. It is a
// benchmark because its 250 replays take minutes.
func BenchmarkTables(b *testing.B) {
	for b.Loop() {
		for _, name := range append([]string{"mooncake"}, heldOutTraces...) {
			trace := publicTrace(b, name)
			for _, load := range []float64{0.5, 0.7, 0.9} {
				fmt.Printf("\n%s, load %.1f:\n\n", name, load)
				fmt.Println("| policy | TTFT p50 | p95 | p99 | good | hits, of ideal | CV of work |")
				fmt.Println("| --- | --- | --- | --- | --- | --- | --- |")
				writeTable(tableRows(b, trace, load), trace.IdealHitRatio)
			}
		}
	}
}

// tableRows returns the results of the compared policies, by policy and seed.
func tableRows(b *testing.B, trace *Trace, load float64) (rows [][]Row) {
	for _, policy := range compared {
		var seeds []Row
		for seed := range uint64(3) {
			lab := newLab(b, fleetAt(b, "llama70b-h100", load, seed+1), trace)
			seeds = append(seeds, lab.Run(policy, builtin(b, policy)).Row)
		}
		rows = append(rows, seeds)
	}
	return rows
}

// column is one figure of a table. sign is -1 if a larger figure is better.
type column struct {
	of     func(*Row) float64
	sign   float64
	format func(median, least, most float64) string
}

// writeTable writes one line for each policy, with the medians of the seeds, and the range of some.
// The best median of a column is bold.
func writeTable(rows [][]Row, ideal float64) {
	seconds := func(m, _, _ float64) string { return fmt.Sprintf("%.2f s", m/1000) }
	columns := []column{
		{func(r *Row) float64 { return r.TTFTP50 }, 1, seconds},
		{func(r *Row) float64 { return r.TTFTP95 }, 1, seconds},
		{func(r *Row) float64 { return r.TTFTP99 }, 1, func(m, a, b float64) string {
			return fmt.Sprintf("%.2f s (%.2f–%.2f)", m/1000, a/1000, b/1000)
		}},
		{func(r *Row) float64 { return 100 * r.GoodRatio }, -1, func(m, a, b float64) string {
			return fmt.Sprintf("%.2f %% (%.2f–%.2f)", m, a, b)
		}},
		{func(r *Row) float64 { return r.HitRatio }, -1, func(m, _, _ float64) string {
			if ideal == 0 {
				return "–"
			}
			return fmt.Sprintf("%.3f", m/ideal)
		}},
		{func(r *Row) float64 { return r.LoadCV }, 1, func(m, _, _ float64) string { return fmt.Sprintf("%.3f", m) }},
	}
	cells := make([][]string, len(rows))
	for _, c := range columns {
		var texts []string
		best := ""
		least := 0.0
		for i, seeds := range rows {
			var values []float64
			for k := range seeds {
				values = append(values, c.of(&seeds[k]))
			}
			slices.Sort(values)
			m := values[len(values)/2]
			text := c.format(m, values[0], values[len(values)-1])
			texts = append(texts, text)
			if i == 0 || c.sign*m < least {
				least, best = c.sign*m, text
			}
		}
		for i, text := range texts {
			if text == best && text != "–" {
				text = "**" + text + "**"
			}
			cells[i] = append(cells[i], text)
		}
	}
	for i, seeds := range rows {
		fmt.Printf("| `%s` | %s |\n", seeds[0].Policy, strings.Join(cells[i], " | "))
	}
}
