package replay

import (
	"math/rand/v2"
	"testing"
	"time"
)

// sharedPrompt is a load of simultaneous conversations with a long common
// system prompt, as agents have: 96 conversations, 2,048 tokens, about fifty
// turns. Each turn adds a short answer and a text of a tool or a user. Blocks
// have 64 tokens, and only whole ones count. No conversation has an id.
func sharedPrompt(seed uint64) *Trace {
	const (
		conversations = 96
		system        = 2048
		block         = 64
	)
	rnd := rand.New(rand.NewPCG(seed, 96))
	between := func(from, to int) int { return from + rnd.IntN(to-from+1) }
	t := new(traceWriter)
	for c := range conversations {
		at := rnd.Float64() * 4
		tokens := system + between(200, 2000)
		for range between(44, 50) {
			answer := between(40, 120)
			ids := make([]uint64, 0, tokens/block)
			for i := range tokens / block {
				id := uint64(i)
				if (i+1)*block > system {
					id |= uint64(c+1) << 32
				}
				ids = append(ids, id)
			}
			t.add(time.Duration(at*float64(time.Second)), tokens, answer, ids)
			tokens += answer + between(60, 400)
			at += 4 * (.5 + rnd.Float64())
		}
	}
	return t.trace("shared-prompt", block)
}

// First turns go to the ranks in turn. Otherwise all conversations would go to
// the rank that had the shared prompt first (NVIDIA/TensorRT-LLM pull request
// 14744: 96 conversations over 8 ranks, CV of the routed requests 41-56 %
// against 7 %).
func TestSharedPromptDoesNotFunnel(t *testing.T) {
	m := preset(t, "deepseek-v3-h200")
	m.PrefillMicros, m.PrefillAttentionMicros = 4*m.PrefillMicros, 4*m.PrefillAttentionMicros // ranks with one GPU each
	tr := sharedPrompt(1)
	l := newLab(t, Config{Prefill: 1, Ranks: 8, Decode: 1, BlocksPerRank: 30000, BlockTokens: 64, Load: .4, Seed: 1, Model: m}, tr)
	ours, plain := l.Run("conversation", builtin(t, "conversation")), l.Run("trtllm_kv_cache_aware", builtin(t, "trtllm_kv_cache_aware"))
	if ours.RoutedCV > .07 || ours.RoutedMaxMin > 1.2 || ours.HitRatio < .965 {
		t.Errorf("conversation: CV %.3f, max/min %.2f, hits %.4f of %.4f, %v", ours.RoutedCV, ours.RoutedMaxMin, ours.HitRatio, tr.IdealHitRatio, ours.Routed)
	}
	for _, name := range []string{"kv_aware", "pair_aware"} {
		if r := l.Run(name, builtin(t, name)); r.RoutedCV > .1 || r.HitRatio < .99*ours.HitRatio {
			t.Errorf("%s: CV %.3f, hits %.4f of %.4f, %v", name, r.RoutedCV, r.HitRatio, ours.HitRatio, r.Routed)
		}
	}
	if plain.RoutedCV < .41 || plain.RoutedMaxMin < 4 || plain.HitRatio > ours.HitRatio || plain.TTFTP95 < 2*ours.TTFTP95 {
		t.Errorf("plain affinity does well: %+v", plain.Row)
	}
}

// shortTurns is sharedPrompt with six turns, each of which adds less than two
// blocks.
func shortTurns(seed uint64) *Trace {
	rnd := rand.New(rand.NewPCG(seed, 96))
	t := new(traceWriter)
	for c := range 96 {
		at, tokens := rnd.Float64()*4, 2048+20+rnd.IntN(100)
		for range 6 {
			ids := make([]uint64, 0, tokens/64)
			for i := range tokens / 64 {
				id := uint64(i)
				if (i+1)*64 > 2048 {
					id |= uint64(c+1) << 32
				}
				ids = append(ids, id)
			}
			t.add(time.Duration(at*float64(time.Second)), tokens, 20, ids)
			tokens += 20 + rnd.IntN(100)
			at += 4 * (.5 + rnd.Float64())
		}
	}
	return t.trace("short-turns", 64)
}

// Short turns go home. Otherwise each turn would go to a rank with a slightly
// shorter queue, because all ranks hold the long system prompt, and its
// conversation would be computed again.
func TestShortTurnsAreNotComputedTwice(t *testing.T) {
	m := preset(t, "deepseek-v3-h200")
	m.PrefillMicros, m.PrefillAttentionMicros = 4*m.PrefillMicros, 4*m.PrefillAttentionMicros
	for seed := range uint64(2) {
		tr := shortTurns(seed + 1)
		l := newLab(t, Config{Prefill: 1, Ranks: 8, Decode: 1, BlocksPerRank: 30000, BlockTokens: 64, Load: .4, Seed: 1, Model: m}, tr)
		for _, name := range []string{"kv_aware", "pair_aware"} {
			if r := l.Run(name, builtin(t, name)); r.HitRatio < 0.97*tr.IdealHitRatio || r.RoutedCV > .15 {
				t.Errorf("%s, seed %d: hits %.4f of %.4f, CV %.3f", name, seed+1, r.HitRatio, tr.IdealHitRatio, r.RoutedCV)
			}
		}
	}
}

// manyPrefixes makes four prefixes for each rank, with eight requests for each prefix in random
// order. No request continues another one.
func manyPrefixes(ranks int) *Trace {
	rnd := rand.New(rand.NewPCG(1, uint64(ranks)))
	order := make([]int, 0, 32*ranks)
	for n := range 32 * ranks {
		order = append(order, n/8)
	}
	rnd.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	t := new(traceWriter)
	for n, prefix := range order {
		ids := make([]uint64, 37)
		for i := range ids {
			ids[i] = uint64(prefix+1)<<32 | uint64(i)
			if i >= 32 {
				ids[i] = uint64(n+1)<<48 | uint64(i)
			}
		}
		t.add(time.Duration(n)*time.Second/time.Duration(ranks), 37*64, 4, ids)
	}
	return t.trace("many-prefixes", 64)
}

// Requests follow a prefix that a small share of the requests has. Otherwise each rank would compute
// each prefix.
func TestManyPrefixesStayWhereTheyAre(t *testing.T) {
	for _, ranks := range []int{4, 64} {
		tr := manyPrefixes(ranks)
		l := newLab(t, Config{Prefill: 1, Ranks: ranks, Decode: 1, BlocksPerRank: 1024, BlockTokens: 64, Load: .4, Seed: 1, Model: preset(t, "deepseek-v3-h200")}, tr)
		for _, name := range []string{"kv_aware", "pair_aware"} {
			if r := l.Run(name, builtin(t, name)); r.HitRatio < 0.97*tr.IdealHitRatio {
				t.Errorf("%s, %d ranks: hits %.4f of %.4f, CV %.3f", name, ranks, r.HitRatio, tr.IdealHitRatio, r.RoutedCV)
			}
		}
	}
}
