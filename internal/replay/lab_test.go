package replay

import (
	"math"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// one is a fleet of one rank and one decode instance, at recorded speed.
func one(t *testing.T, m Model, tr *Trace) (*Lab, func() *run) {
	t.Helper()
	l := newLab(t, Config{Prefill: 1, Ranks: 1, Decode: 1, BlocksPerRank: 100, BlockTokens: 100, Load: 1, Model: m}, tr)
	l.scale = 1
	return l, func() *run { return l.play(always(0, 1)) }
}

func line(at time.Duration, input, output int, ids ...uint64) Request {
	return Request{Line: Line{InputLength: input, OutputLength: output, HashIDs: ids}, Arrival: at}
}

const ms = time.Millisecond

// Each case is computed by hand, with 0.1 ms per prompt token, steps of 1,000
// tokens, 10 ms per decode step, and 1 ms plus 1 µs per token for a transfer.
func TestTimes(t *testing.T) {
	type times struct{ prefilled, first, ended time.Duration }
	for name, tt := range map[string]struct {
		change   func(*Model)
		requests []Request
		want     []times
		hits     int
	}{
		"alone": {
			requests: []Request{line(0, 200, 3, 1, 2)},
			// 20 ms; 1.2 ms of transfer; three steps
			want: []times{{20 * ms, 31200 * time.Microsecond, 51200 * time.Microsecond}},
		},
		"chunks": {
			requests: []Request{line(0, 1500, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)},
			want:     []times{{150 * ms, 162500 * time.Microsecond, 162500 * time.Microsecond}},
		},
		"queue": {
			// The second waits 15 ms, has the first block cached and computes
			// 100 tokens. At decode it also has that block, and joins after a
			// step.
			requests: []Request{line(0, 200, 2, 1, 2), line(5*ms, 200, 1, 1, 3)},
			want: []times{
				{20 * ms, 31200 * time.Microsecond, 41200 * time.Microsecond},
				{30 * ms, 41200 * time.Microsecond, 41200 * time.Microsecond},
			},
			hits: 1,
		},
		"one step for two": {
			// Both wait for the previous step and are computed in one step.
			requests: []Request{line(0, 100, 1, 9), line(1*ms, 200, 1, 1, 2), line(2*ms, 200, 1, 1, 2)},
			want: []times{
				{10 * ms, 21100 * time.Microsecond, 21100 * time.Microsecond},
				// 200 tokens, and the last token of the same prompt again
				{30100 * time.Microsecond, 41300 * time.Microsecond, 41300 * time.Microsecond},
				// its KV arrives when the step of the other request has just begun
				{30100 * time.Microsecond, 51300 * time.Microsecond, 51300 * time.Microsecond},
			},
			hits: 2,
		},
		"attention and requests": {
			change: func(m *Model) { m.PrefillAttentionMicros, m.PrefillRequestMicros = 0.1, 5000 },
			// 20 ms + 0.1 µs * 200 * 100 + 5 ms
			requests: []Request{line(0, 200, 1, 1, 2)},
			want:     []times{{27 * ms, 38200 * time.Microsecond, 38200 * time.Microsecond}},
		},
		"growing steps": {
			change: func(m *Model) { m.DecodeRequestMicros, m.DecodeTokenMicros = 1000, 10 },
			// 11 ms + 10 µs for each of 200, then 201 tokens
			requests: []Request{line(0, 200, 2, 1, 2)},
			want:     []times{{20 * ms, 34200 * time.Microsecond, 47210 * time.Microsecond}},
		},
		"decode is full": {
			change: func(m *Model) { m.DecodeTokens = 300 },
			// The second's transfer begins when the first has ended, and its
			// blocks at prefill wait until then.
			requests: []Request{line(0, 200, 2, 1, 2), line(0, 200, 1, 3, 4)},
			want: []times{
				{20 * ms, 31200 * time.Microsecond, 41200 * time.Microsecond},
				{40 * ms, 52400 * time.Microsecond, 52400 * time.Microsecond},
			},
		},
		"batch is full": {
			change:   func(m *Model) { m.DecodeRequests = 1 },
			requests: []Request{line(0, 200, 2, 1, 2), line(0, 200, 1, 3, 4)},
			want: []times{
				{20 * ms, 31200 * time.Microsecond, 41200 * time.Microsecond},
				{40 * ms, 52400 * time.Microsecond, 52400 * time.Microsecond},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := simple()
			if tt.change != nil {
				tt.change(&m)
			}
			_, play := one(t, m, &Trace{Requests: tt.requests})
			r := play()
			for i, want := range tt.want {
				j := r.jobs[i]
				if got := (times{j.prefilled, j.first, j.ended}); got != want {
					t.Errorf("request %d: %v, want %v", i, got, want)
				}
			}
			if r.hits != tt.hits {
				t.Errorf("got %d hits, want %d", r.hits, tt.hits)
			}
		})
	}
}

// A rank without room for a prompt waits until a transfer has ended.
func TestPrefillWaitsForRoom(t *testing.T) {
	m := simple()
	m.TransferMicros = 1e6
	m.TransferTokenMicros = 0
	tr := &Trace{Requests: []Request{line(0, 200, 1, 1, 2), line(0, 200, 1, 3, 4)}}
	l := newLab(t, Config{Prefill: 1, Ranks: 1, Decode: 1, BlocksPerRank: 3, BlockTokens: 100, Load: 1, Model: m}, tr)
	r := l.play(always(0, 1))
	if got, want := r.jobs[1].prefilled, 20*ms+time.Second+20*ms; got != want {
		t.Errorf("prefilled at %v, want %v", got, want)
	}
}

// At a low load the mean time in the queue is that of the textbook's queue with
// random arrivals and equal work: ρS/2(1-ρ).
func TestQueueIsThatOfTheBook(t *testing.T) {
	const (
		n    = 40000
		work = 100 * ms // of a prompt
	)
	m := simple()
	m.TransferMicros, m.TransferTokenMicros, m.DecodeMicros = 0, 0, 1
	for _, load := range []float64{0.5, 0.8} {
		rnd := rand.New(rand.NewPCG(7, uint64(100*load)))
		tr := new(Trace)
		var at float64
		for i := range n {
			tr.Requests = append(tr.Requests, line(time.Duration(at), 1000, 1, uint64(10*i), uint64(10*i+1)))
			at += rnd.ExpFloat64() * float64(work)
		}
		l := newLab(t, Config{Prefill: 1, Ranks: 1, Decode: 1, BlocksPerRank: 100, BlockTokens: 500, Load: load, Model: m}, tr)
		r := l.play(always(0, 1))
		var wait time.Duration
		for i := range r.jobs {
			wait += r.jobs[i].prefilled - r.jobs[i].arrived - work
		}
		got, want := float64(wait)/n, load*float64(work)/2/(1-load)
		if math.Abs(got/want-1) > .05 {
			t.Errorf("load %v: a wait of %v, want %v", load, time.Duration(got), time.Duration(want))
		}
		if span := r.jobs[n-1].arrived; math.Abs(float64(n)*work.Seconds()/span.Seconds()/load-1) > 1e-3 {
			t.Errorf("load %v: %d requests arrive in %v", load, n, span)
		}
	}
}

func fleet(t *testing.T) Config {
	return Config{Prefill: 2, Ranks: 2, Decode: 2, BlocksPerRank: 300, BlockTokens: 512, Load: 0.9, Seed: 1, Model: preset(t, "llama70b-h100")}
}

func TestSameSeedSameResult(t *testing.T) {
	l := newLab(t, fleet(t), mooncake(t))
	for name, p := range map[string]Placer{
		"anywhere": decider(anywhere), "power_of_two": builtin(t, "power_of_two"), "least_load": builtin(t, "least_load"),
	} {
		a, b := l.Run(name, p), l.Run(name, p)
		a.DecisionsPerS, b.DecisionsPerS = 0, 0
		if !reflect.DeepEqual(a, b) {
			t.Errorf("%s: %+v\nthen %+v", name, a.Row, b.Row)
		}
		cfg := fleet(t)
		cfg.Seed = 2
		if name == "least_load" {
			continue // it draws only among equals, and few are equal
		}
		if c := newLab(t, cfg, mooncake(t)).Run(name, p); reflect.DeepEqual(a.ttft, c.ttft) {
			t.Errorf("%s: another seed changes nothing", name)
		}
	}
}

// Every request passes its stages in order and ends, and nothing remains.
func TestNothingIsLost(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"as it is":     func(*Config) {},
		"little cache": func(c *Config) { c.BlocksPerRank = 250 },
		"full decode":  func(c *Config) { c.Model.DecodeTokens = 260 * 512 },
		"overload":     func(c *Config) { c.Load = 3 },
		"one chunk":    func(c *Config) { c.Model.ChunkTokens = 1 << 20 },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := fleet(t)
			change(&cfg)
			l := newLab(t, cfg, mooncake(t))
			r := l.play(decider(anywhere))
			if r.left != 0 {
				t.Fatalf("%d requests did not end", r.left)
			}
			hits, uncached := 0, 0
			for i := range r.jobs {
				j := &r.jobs[i]
				if !(j.arrived < j.prefilled && j.prefilled < j.first && j.first <= j.ended) {
					t.Fatalf("request %d: %v %v %v %v", i, j.arrived, j.prefilled, j.first, j.ended)
				}
				hits += j.held
			}
			for i, p := range r.ranks {
				uncached += p.uncached
				if p.cache.pinned() != 0 || len(p.queue) != 0 || p.busy {
					t.Errorf("rank %d: %d pinned, %d in queue", i, p.cache.pinned(), len(p.queue))
				}
				if got, want := r.view.index.Held(r.view.targets[i].slot), whole(p.cache); got != want {
					t.Errorf("rank %d: the index has %d blocks, the cache %d", i, got, want)
				}
			}
			for i, d := range r.decode {
				if d.cache.pinned() != 0 || d.active != 0 || d.running != 0 || d.tokens != 0 || len(d.ends) != 0 || len(d.waiting) != 0 {
					t.Errorf("decode %d: %d pinned, %d active, %d running, %d tokens", i, d.cache.pinned(), d.active, d.running, d.tokens)
				}
			}
			for i := range r.view.targets {
				if v := r.view.targets[i].load.View(epoch); v.Requests != 0 || v.Tokens != 0 || v.Queued != 0 || v.Decode != 0 {
					t.Errorf("target %d carries %+v", i, v)
				}
			}
			if hits != r.hits || hits+uncached != l.trace.Blocks {
				t.Errorf("%d hits (%d), %d uncached, of %d", r.hits, hits, uncached, l.trace.Blocks)
			}
		})
	}
}

// whole returns the number of whole blocks in a cache.
func whole(c *cache) (n int) {
	for _, at := range c.blocks {
		if c.slots[at].whole {
			n++
		}
	}
	return n
}

// A policy sees its own placements at once, the blocks that they stored, and
// the conversation's home.
func TestFacts(t *testing.T) {
	m := simple()
	tr := &Trace{Requests: []Request{
		line(0, 250, 5, 1, 2, 3),
		line(1*ms, 450, 5, 1, 2, 4, 5, 6),
		line(time.Second, 650, 5, 1, 2, 4, 5, 7, 8, 9),
	}}
	l := newLab(t, Config{Prefill: 1, Ranks: 2, Decode: 1, BlocksPerRank: 100, BlockTokens: 100, Load: 1, Model: m}, tr)
	l.scale = 1
	var seen []abi.PlaceFacts
	l.play(decider(func(f *abi.PlaceFacts) (abi.PlaceDecision, bool) {
		c := *f
		c.Candidates = append([]abi.Candidate(nil), f.Candidates...)
		c.Pairs = append([]abi.Pair(nil), f.Pairs...)
		seen = append(seen, c)
		return abi.PlaceDecision{Prefill: 1, Decode: 2}, true
	}))
	first, second, third := seen[0], seen[1], seen[2]
	if len(first.Candidates) != 3 || len(first.Pairs) != 2 || first.Request.Turn != 1 || first.Flow != abi.FlowPrefillFirst || first.Fixed != -1 {
		t.Errorf("%+v", first)
	}
	for i, want := range []abi.Candidate{
		{Instance: 1, Rank: 0, Group: 1, Roles: abi.RolePrefill, BlockTokens: 100},
		{Instance: 1, Rank: 1, Group: 1, Roles: abi.RolePrefill, BlockTokens: 100},
		{Instance: 2, Rank: 0, Group: 1, Roles: abi.RoleDecode, BlockTokens: 100},
	} {
		if first.Candidates[i] != want {
			t.Errorf("row %d: %+v", i, first.Candidates[i])
		}
	}
	if c := second.Candidates[1]; c.Requests != 1 || c.Tokens != 250 || c.Queued != 250 || c.BlocksGPU != 2 || c.Home != abi.RolePrefill || c.RecentRequests < .99 || c.RecentTokens < 249 {
		t.Errorf("the rank that has the first turn: %+v", c)
	}
	if c := second.Candidates[2]; c.Requests != 1 || c.Tokens != 250+usualAnswer || c.Queued != 0 || c.BlocksGPU != 2 || c.Home != abi.RoleDecode {
		t.Errorf("its decode: %+v", c)
	}
	if c := second.Candidates[0]; c.Requests != 0 || c.BlocksGPU != 0 || c.Home != 0 {
		t.Errorf("the rank that has nothing: %+v", c)
	}
	if second.Request.Turn != 2 || third.Request.Turn != 3 || second.Request.Conversation != first.Request.Conversation || len(first.Request.Conversation) != 16 {
		t.Errorf("turns %d and %d of %q and %q", second.Request.Turn, third.Request.Turn, first.Request.Conversation, second.Request.Conversation)
	}
	if c := third.Candidates[1]; c.Requests != 0 || c.Queued != 0 || c.BlocksGPU != 4 || math.Abs(float64(c.TokenMicros)-100) > 15 {
		t.Errorf("the rank at rest: %+v", c)
	}
	if p := third.Pairs[1]; p.Prefill != 1 || p.Decode != 2 || p.State != abi.PairReady || p.TransferMicros <= 0 {
		t.Errorf("the pair: %+v", p)
	}
}

// When a policy has no decision, or one that breaks the contract, the built-in
// rule decides, and this is counted.
func TestFallback(t *testing.T) {
	l := newLab(t, fleet(t), mooncake(t))
	for name, p := range map[string]Placer{
		"none":              decider(func(*abi.PlaceFacts) (abi.PlaceDecision, bool) { return abi.PlaceDecision{}, false }),
		"no prefill":        always(-1, 5),
		"wrong role":        always(4, 5),
		"no such row":       always(0, 6),
		"decode on prefill": always(0, 1),
	} {
		if r := l.Run(name, p); r.Fallbacks != 300 {
			t.Errorf("%s: %d fallbacks", name, r.Fallbacks)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"no prefill":           func(c *Config) { c.Prefill = 0 },
		"no ranks":             func(c *Config) { c.Ranks = 0 },
		"no decode":            func(c *Config) { c.Decode = 0 },
		"no blocks":            func(c *Config) { c.BlocksPerRank = 0 },
		"no load":              func(c *Config) { c.Load = 0 },
		"no number":            func(c *Config) { c.Load = math.NaN() },
		"a prompt of a rank":   func(c *Config) { c.BlocksPerRank = 50 },
		"an answer of decode":  func(c *Config) { c.Model.DecodeTokens = 10000 },
		"no tokens of a block": func(c *Config) { c.BlockTokens = 0 },
	} {
		cfg := fleet(t)
		change(&cfg)
		if _, err := New(cfg, mooncake(t)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
