package indexcheck

import (
	"math/rand/v2"
	"sync"
	"testing"
)

// fleet makes the observations of one engine that serves conversations.
type fleet struct {
	rng    *rand.Rand
	ranks  int
	stored map[int]uint64
}

func newFleet(ranks int) *fleet {
	return &fleet{rng: rand.New(rand.NewPCG(3, uint64(ranks))), ranks: ranks, stored: make(map[int]uint64)}
}

// healthy returns a request whose prefix is cached as predicted. A part of the requests
// lacks some evicted blocks, and a part is cold.
func (f *fleet) healthy(evicted, cold float64) Observation {
	prompt := 200 + f.rng.IntN(6000)
	held := f.rng.IntN(prompt) / 16 * 16
	o := Observation{Engine: "p0", Rank: f.rng.IntN(f.ranks), Exact: true, Prompt: prompt, Predicted: held, Reported: held, Held: prompt / 16 * 16, Block: 16}
	if f.rng.Float64() < evicted {
		o.Reported = f.rng.IntN(held+16) / 16 * 16
	}
	if f.rng.Float64() < cold {
		o.Predicted, o.Reported = 0, 0
	}
	f.stored[o.Rank] += uint64(prompt / 16)
	o.Stored = f.stored[o.Rank]
	return o
}

// run makes n observations. It returns the number of observations before the first
// verdict.
func run(c *Check, told *[]Verdict, n int, next func() Observation) (after int) {
	for i := range n {
		c.Observe(next())
		if after == 0 && len(*told) > 0 {
			after = i + 1
		}
	}
	return after
}

func TestEachTroubleIsNamedWithin100Requests(t *testing.T) {
	for _, tt := range []struct {
		name  string
		ranks int
		rank  int // the rank in trouble, or All
		spoil func(f *fleet, o *Observation)
		want  Reason
	}{
		{"another tokenizer, events come", 1, All, func(_ *fleet, o *Observation) { o.Predicted, o.Held = 0, 0 }, TokenizerMismatch},
		{"another tokenizer on eight ranks", 8, All, func(_ *fleet, o *Observation) { o.Predicted, o.Held = 0, 0 }, TokenizerMismatch},
		{"another tokenizer, hidden by guesses", 1, All, func(_ *fleet, o *Observation) { o.Held = 0 }, TokenizerMismatch},
		{"no events, hidden by guesses", 1, All, func(_ *fleet, o *Observation) { o.Held, o.Stored = 0, 0 }, MissingEvents},
		{"no events", 1, All, func(_ *fleet, o *Observation) { o.Predicted, o.Held, o.Stored = 0, 0, 0 }, MissingEvents},
		{"events stopped", 2, All, func(_ *fleet, o *Observation) { o.Predicted, o.Held, o.Stored = 0, 0, 77 }, MissingEvents},
		{"most events are lost", 1, All, func(f *fleet, o *Observation) {
			if f.rng.IntN(4) > 0 {
				o.Predicted, o.Held = 0, 0
			}
		}, MissingEvents},
		{"events know a part of each prompt", 1, All, func(_ *fleet, o *Observation) { o.Predicted /= 4; o.Held = o.Predicted }, MissingEvents},
		{"one rank without events", 8, 3, func(_ *fleet, o *Observation) { o.Predicted, o.Held, o.Stored = 0, 0, 0 }, MissingEvents},
		{"the engine lost its cache", 1, All, func(_ *fleet, o *Observation) { o.Reported = 0 }, StaleIndex},
		{"removals are lost", 4, All, func(f *fleet, o *Observation) {
			if f.rng.IntN(5) > 0 {
				o.Reported = 0
			}
		}, StaleIndex},
		{"guesses never come true", 1, All, func(_ *fleet, o *Observation) { o.Exact, o.Reported = false, 0 }, TokenizerMismatch},
		{"guesses outlive the blocks", 1, All, func(f *fleet, o *Observation) {
			o.Exact = false
			if f.rng.IntN(5) > 0 {
				o.Reported = 0
			}
		}, StaleIndex},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, history := range []int{0, 500} {
				f := newFleet(tt.ranks)
				var told []Verdict
				c := New(func(v Verdict) { told = append(told, v) })
				run(c, &told, history, func() Observation { return f.healthy(0.1, 0.2) })
				seen := 0
				after := run(c, &told, 2000, func() Observation {
					o := f.healthy(0.1, 0.2)
					if tt.rank == All || o.Rank == tt.rank {
						tt.spoil(f, &o)
					}
					seen++
					return o
				})
				if len(told) != 1 {
					t.Fatalf("after %d healthy requests: %d verdicts: %+v", history, len(told), told)
				}
				v := told[0]
				if v.Engine != "p0" || v.Reason != tt.want || v.Rank != tt.rank {
					t.Errorf("after %d healthy requests: verdict %+v", history, v)
				}
				// With one rank in trouble, only an eighth of the requests are on that
				// rank.
				if after > 100 && tt.rank == All || after > 200 {
					t.Errorf("after %d healthy requests: first verdict after %d observations", history, after)
				}
				run(c, &told, 300, func() Observation { return f.healthy(0.1, 0.2) })
				if len(told) != 2 || told[1].Reason != Agrees {
					t.Errorf("after %d healthy requests: verdicts of the recovery %+v", history, told[1:])
				}
				if all := c.Verdicts(); len(all) != 1 || all[0].Reason != Agrees {
					t.Errorf("got %+v", all)
				}
			}
		})
	}
}

func TestNormalLifeRaisesNothing(t *testing.T) {
	for _, tt := range []struct {
		name string
		next func(f *fleet) Observation
	}{
		{"evictions", func(f *fleet) Observation { return f.healthy(0.25, 0.3) }},
		{"cold prompts only", func(f *fleet) Observation { return f.healthy(0, 1) }},
		{"late events of equal prompts at once", func(f *fleet) Observation {
			o := f.healthy(0, 0)
			o.Predicted, o.Reported = 0, 2048
			o.Held, o.Prompt = 3000, 3000
			return o
		}},
		{"the last block is computed again", func(f *fleet) Observation {
			o := f.healthy(0, 0)
			o.Prompt, o.Predicted, o.Reported = 64, 64, 48
			return o
		}},
		{"engines without events have other clients", func(f *fleet) Observation {
			o := f.healthy(0, 0)
			o.Exact, o.Predicted, o.Held = false, 0, 0
			return o
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFleet(4)
			c := New(func(v Verdict) { t.Errorf("unexpected verdict %+v", v) })
			for range 20000 {
				c.Observe(tt.next(f))
			}
		})
	}
}

func TestHeldIsLookedUpWhereItMatters(t *testing.T) {
	o := Observation{Prompt: 1000, Reported: 512, Block: 16}
	if !o.Surplus() {
		t.Error("512 cached tokens are explained by nothing")
	}
	if o.Reported = 64; o.Surplus() {
		t.Error("four blocks are enough for a verdict")
	}
}

func TestForgottenEnginesStartAnew(t *testing.T) {
	c := New(nil)
	f := newFleet(1)
	for range 50 {
		o := f.healthy(0, 0)
		o.Reported = 0
		c.Observe(o)
	}
	if v := c.Verdicts(); len(v) != 1 || v[0].Reason != StaleIndex {
		t.Fatalf("got %+v", v)
	}
	c.Forget("p0")
	if v := c.Verdicts(); len(v) != 0 {
		t.Errorf("got %+v", v)
	}
}

func TestHammer(t *testing.T) {
	var mu sync.Mutex
	last := make(map[string]Reason)
	c := New(func(v Verdict) {
		mu.Lock()
		defer mu.Unlock()
		last[v.Engine] = v.Reason
	})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			f := newFleet(2)
			for n := range 2000 {
				o := f.healthy(0, 0)
				o.Engine = string(rune('a' + (i+n)%4))
				if o.Engine == "a" {
					o.Reported = 0
				}
				c.Observe(o)
				if n%500 == 0 {
					c.Verdicts()
					c.Forget("gone")
				}
			}
		})
	}
	wg.Wait()
	for _, v := range c.Verdicts() {
		want := Agrees
		if v.Engine == "a" {
			want = StaleIndex
		}
		if v.Reason != want || last[v.Engine] != want {
			t.Errorf("verdict %+v, last notified %v", v, last[v.Engine])
		}
	}
}

func BenchmarkObserve(b *testing.B) {
	c := New(nil)
	f := newFleet(8)
	o := f.healthy(0, 0)
	b.ReportAllocs()
	for b.Loop() {
		c.Observe(o)
	}
}
