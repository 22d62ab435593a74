package replay

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// sharedPrompt is a load of conversations that go on at once and have a long
// system prompt in common, as agents have: 96 of them, 2,048 tokens, some sixty
// turns each of which adds a short answer and what a tool or a user has to say.
// Blocks are of 64 tokens. No conversation has an id.
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
		for range between(58, 66) {
			answer := between(40, 120)
			ids := make([]uint64, 0, tokens/block+1)
			for i := range tokens / block {
				id := uint64(i)
				if (i+1)*block > system {
					id |= uint64(c+1) << 32
				}
				ids = append(ids, id)
			}
			if rest := tokens % block; rest > 0 { // no other prompt ends here
				ids = append(ids, uint64(c+1)<<32|uint64(tokens)<<12)
			}
			t.add(time.Duration(at*float64(time.Second)), tokens, answer, ids)
			tokens += answer + between(60, 600)
			at += 4 * (.5 + rnd.Float64())
		}
	}
	return t.trace("shared-prompt", block)
}

// affinity is what the scene is about: the longest match, wherever it is.
func affinity(f *abi.PlaceFacts) (abi.PlaceDecision, bool) {
	d := abi.PlaceDecision{Prefill: -1, Decode: -1}
	for i := range f.Candidates {
		c, n := &f.Candidates[i], int32(i)
		switch {
		case c.Roles == abi.RoleDecode:
			if d.Decode < 0 || c.Tokens < f.Candidates[d.Decode].Tokens {
				d.Decode = n
			}
		case d.Prefill < 0 || c.BlocksGPU > f.Candidates[d.Prefill].BlocksGPU ||
			c.BlocksGPU == f.Candidates[d.Prefill].BlocksGPU && c.Queued < f.Candidates[d.Prefill].Queued:
			d.Prefill = n
		}
	}
	return d, true
}

// First turns go to the ranks in turn, or all conversations end up on the rank
// that had the shared prompt first (NVIDIA/TensorRT-LLM pull request 14744:
// 96 conversations over 8 ranks, CV of what is routed 41-56 % against 7 %).
func TestSharedPromptDoesNotFunnel(t *testing.T) {
	m := preset(t, "deepseek-v3-h200")
	m.PrefillMicros, m.PrefillAttentionMicros = 4*m.PrefillMicros, 4*m.PrefillAttentionMicros // ranks of one GPU
	tr := sharedPrompt(1)
	l := newLab(t, Config{Prefill: 1, Ranks: 8, Decode: 1, BlocksPerRank: 30000, BlockTokens: 64, Load: .7, Seed: 1, Model: m}, tr)
	t.Logf("%d requests, ideal %.4f, speed %.2f", len(tr.Requests), tr.IdealHitRatio, l.Speed())
	for _, r := range []*Result{l.Run("affinity", decider(affinity)), l.Run("first", decider(firstTurns))} {
		t.Logf("%+v", r.Row)
	}
}
func firstTurns(f *abi.PlaceFacts) (abi.PlaceDecision, bool) {
	d, _ := affinity(f)
	if f.Request.Turn == 1 {
		d.Prefill = int32(f.Sequence % 8)
	}
	return d, true
}
