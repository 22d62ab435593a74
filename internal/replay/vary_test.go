package replay

import (
	"os"
	"reflect"
	"testing"
	"time"
)

// A variant is a trace: ordered by arrival, within the time of the original,
// with conversations that hit their own blocks, and with ids that each stand for
// one block. The same seed gives the same trace, another seed another one.
func TestVary(t *testing.T) {
	base := wholeTrace(t)
	base.Requests = base.Requests[:2000]
	span := base.Requests[len(base.Requests)-1].Arrival
	for _, kind := range Variants() {
		v := vary(t, base, kind, 1)
		var last time.Duration
		tokens := make(map[uint64]int) // of the block of each id
		for i := range v.Requests {
			q := &v.Requests[i]
			for n, id := range q.HashIDs {
				of := min(512, q.InputLength-512*n)
				if before, ok := tokens[id]; ok && before != of {
					t.Fatalf("%s: an id stands for a block of %d tokens, and in request %d for one of %d", kind, before, i, of)
				}
				tokens[id] = of
			}
			if q.Arrival < last || q.Ideal > len(q.HashIDs) || len(q.HashIDs) != (q.InputLength+511)/512 {
				t.Fatalf("%s: request %d after %v: %+v", kind, i, last, q)
			}
			last = q.Arrival
		}
		if last > span+time.Second || last < span*8/10 {
			t.Errorf("%s: the last request arrives at %v of %v", kind, last, span)
		}
		if v.IdealHitRatio < 0.1 || v.IdealHitRatio > 0.7 {
			t.Errorf("%s: ideal hit ratio %.3f", kind, v.IdealHitRatio)
		}
		if again := vary(t, base, kind, 1); !reflect.DeepEqual(v, again) {
			t.Errorf("%s: the same seed gives another trace", kind)
		}
		if other := vary(t, base, kind, 2); reflect.DeepEqual(v.Requests, other.Requests) {
			t.Errorf("%s: another seed gives the same trace", kind)
		}
	}
	if _, err := Vary(base, "reversed", 1, 512); err == nil {
		t.Error("no error for an unknown kind")
	}
}

// Each request belongs to the conversation that it continues. A block that many
// requests share does not make a conversation.
func TestConversationsOfATrace(t *testing.T) {
	tr := new(Trace)
	for i := range maxTurns + 1 {
		tr.Requests = append(tr.Requests, line(time.Duration(i)*time.Second, 1024, 1, 0, uint64(100+i)))
	}
	tr.Requests = append(tr.Requests, line(time.Hour, 1536, 1, 0, 100, 7), line(2*time.Hour, 1536, 1, 0, 101, 8))
	s := newSource(tr, nil, 512)
	if len(s.conversations) != maxTurns+1 || len(s.conversations[0]) != 2 || len(s.conversations[1]) != 2 || !s.shared[0] || s.shared[100] {
		t.Errorf("%d conversations, the first of %d turns", len(s.conversations), len(s.conversations[0]))
	}
	c := s.copied(s.conversations[0], time.Minute)
	if ids := c[1].HashIDs; ids[0] != 0 || ids[1] == 100 || ids[1] != c[0].HashIDs[1] || c[1].Arrival-c[0].Arrival != time.Hour {
		t.Errorf("%+v", c)
	}
}

func vary(t testing.TB, base *Trace, kind string, seed uint64) *Trace {
	t.Helper()
	v, err := Vary(base, kind, seed, 512)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// pooled returns the hit ratio of one cache with the memory of all ranks, for
// one request after another: the best that a fleet with this memory can reach
// with LRU caches.
func pooled(cfg *Config, tr *Trace) float64 {
	c, hits := newCache(cfg.BlocksPerRank*cfg.Prefill*cfg.Ranks), 0
	for i := range tr.Requests {
		q := &tr.Requests[i]
		held, _ := c.take(q.HashIDs, 0)
		c.fill(q.HashIDs, held, q.whole(cfg.BlockTokens))
		c.release(q.HashIDs, 0)
		hits += held
	}
	return float64(hits) / float64(tr.Blocks)
}

// TestVariantsAreEven: on traces for which its default parameters were not
// tuned, kv_aware reaches 97 % of the hits that the fleet's memory allows, and
// spreads the work with a CV below 0.10. PDPROXY_ROUTING=long adds pair_aware
// and the variants of the tuning; -v shows the figures.
func TestVariantsAreEven(t *testing.T) {
	base, kinds, seeds, placers := wholeTrace(t), Variants(), []uint64{heldOut}, []string{"kv_aware"}
	switch {
	case os.Getenv("PDPROXY_ROUTING") == "long":
		seeds, placers = []uint64{1, 2, heldOut, heldOut + 1}, append(placers, "pair_aware")
	case raceEnabled:
		kinds = []string{"thinned"} // the others take ten times as long there
	}
	cfg := Config{Prefill: 4, Ranks: 4, Decode: 4, BlocksPerRank: 4000, BlockTokens: 512, Load: 0.9, Seed: 1, Model: preset(t, "llama70b-h100")}
	t.Logf("%-13s %-10s | requests | ideal | possible | hits | of possible | CV | TTFT p95, s | good", "variant", "policy")
	for _, seed := range seeds {
		for _, kind := range kinds {
			v := vary(t, base, kind, seed)
			possible := min(pooled(&cfg, v), v.IdealHitRatio)
			lab := newLab(t, cfg, v)
			for _, name := range placers {
				r := lab.Run(name, builtin(t, name))
				t.Logf("%-13s %-10s | %d | %.4f | %.4f | %.4f | %.3f | %.3f | %.1f | %.1f %%", v.Name, name, len(v.Requests),
					v.IdealHitRatio, possible, r.HitRatio, r.HitRatio/possible, r.LoadCV, r.TTFTP95/1000, 100*r.GoodRatio)
				if name == "kv_aware" && seed == heldOut && (r.LoadCV >= 0.10 || r.HitRatio < 0.97*possible) {
					t.Errorf("%s on %s: CV %.3f, hits %.4f of %.4f", name, v.Name, r.LoadCV, r.HitRatio, possible)
				}
			}
		}
	}
}

// heldOut is the seed of variants that were not used for tuning.
const heldOut = 11
