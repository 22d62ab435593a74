package turns

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/gaps"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// kv is the KV of one turn, at an engine.
type kv struct {
	name   string
	holder engine.Target
}

// world is a keeper with a policy of the test. The keeper frees KV into freed.
type world struct {
	*Keeper[*kv]
	t      *testing.T
	policy func(*abi.RetainFacts) abi.RetainDecision // nil: there is none

	mu      sync.Mutex
	freed   []string       // guarded by mu
	results map[string]int // guarded by mu
	asked   []abi.RetainFacts
}

// run runs a test in simulated time.
func run(t *testing.T, name string, test func(t *testing.T, w *world)) {
	t.Run(name, func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := &world{t: t, results: make(map[string]int)}
			w.Keeper = New(Options[*kv]{
				Decide: func(f *abi.RetainFacts) (abi.RetainDecision, string, bool) {
					w.asked = append(w.asked, *f)
					if w.policy == nil {
						return abi.RetainDecision{}, "trap", false
					}
					return w.policy(f), "test", true
				},
				Free: func(k *kv) {
					w.mu.Lock()
					defer w.mu.Unlock()
					w.freed = append(w.freed, k.name)
				},
				Counter:  func(k *kv) *load.Counter { return CounterOf(k.holder) },
				Observer: w,
			})
			test(t, w)
			w.Clear(time.Now())
			if !w.Empty() {
				t.Error("turns are left")
			}
			time.Sleep(time.Hour) // no timer runs on
			if w.stop != nil {
				t.Error("a timer is left")
			}
		})
	})
}

func (w *world) TurnKept(result string, _ time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.results[result]++
}

func (w *world) Fallback(what, reason string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.results[what+" "+reason]++
}

// wantFreed fails the test unless exactly this KV was freed, in this order, with these results.
func (w *world) wantFreed(results map[string]int, names ...string) {
	w.t.Helper()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if !slices.Equal(w.freed, names) || !maps.Equal(w.results, results) {
		w.t.Errorf("freed %q with results %v, want %q with %v", w.freed, w.results, names, results)
	}
}

// put stores KV of a conversation whose ids are 1, 2, id. Its engine keeps it for a minute.
func (w *world) put(name string, id uint32, at engine.Target, tools ...string) Decision {
	var e gaps.Ending
	for _, tool := range tools {
		e.Call([]byte(tool))
	}
	now := time.Now()
	return w.Put(conversation.OnShelf[*kv]{
		Scope: "m", Name: name, IDs: []uint32{1, 2, id}, Expires: now.Add(time.Minute), Turn: gaps.Turn{Ending: e}, Value: &kv{fmt.Sprint(id), at},
	}, now)
}

// takes returns the KV that the next turn gets, "" for none, and the gap before it.
func (w *world) takes(name string, ids ...uint32) (string, time.Duration) {
	if retained, _ := w.Named("m", name, time.Now()); !retained {
		name = ""
	}
	k, gap, taken, _ := w.Take("m", name, ids, time.Now())
	if !taken {
		return "", 0
	}
	return k.name, gap
}

// keep is a policy that retains all KV for d.
func keep(d time.Duration) func(*abi.RetainFacts) abi.RetainDecision {
	return func(*abi.RetainFacts) abi.RetainDecision {
		return abi.RetainDecision{Millis: uint32(d.Milliseconds()), Likelihood: abi.FullLikelihood}
	}
}

var nowhere engine.Target

func TestKeeper(t *testing.T) {
	run(t, "the next turn comes in time", func(t *testing.T, w *world) {
		w.policy = keep(10 * time.Second)
		if d := w.put("c", 3, nowhere); d != (Decision{10 * time.Second, 1, "test"}) {
			t.Errorf("decision %+v", d)
		}
		time.Sleep(9 * time.Second)
		if k, gap := w.takes("c", 1, 2, 3, 4); k != "3" || gap != 9*time.Second {
			t.Errorf("got %q after %v", k, gap)
		}
		w.wantFreed(map[string]int{Returned: 1})
	})
	run(t, "the next turn comes late", func(t *testing.T, w *world) {
		w.policy = keep(10 * time.Second)
		w.put("c", 3, nowhere)
		w.put("", 4, nowhere)
		time.Sleep(11 * time.Second)
		w.wantFreed(map[string]int{Expired: 2}, "3", "4")
		if retained, late := w.Named("m", "c", time.Now()); retained || !late {
			t.Errorf("freed KV is found by its name: retained %v, late %v", retained, late)
		}
		if retained, late := w.Named("m", "c", time.Now()); retained || late {
			t.Error("the conversation returns twice")
		}
		if k, _ := w.takes("", 1, 2, 4, 5); k != "" {
			t.Errorf("got %q", k)
		}
		w.put("c", 6, nowhere)
		if f := w.asked[2]; f.All.Turns != 2 || f.All.Back != 1 || f.All.P50 != 12288 || f.Conversation.Turns != 1 {
			t.Errorf("the keeper has not learned from the late turns: %+v", f)
		}
	})
	run(t, "the next turn never comes", func(t *testing.T, w *world) {
		w.policy = keep(10 * time.Second)
		w.put("c", 3, nowhere, "search")
		time.Sleep(61 * time.Second)
		w.put("d", 4, nowhere, "search")
		want := abi.Gaps{Turns: 1}
		if f := w.asked[1]; f.All != want || f.Tools != want || f.Conversation.Turns != 0 || !f.ToolCall || f.Tokens != 3 || f.MostMillis != 60_000 {
			t.Errorf("facts %+v", f)
		}
		w.wantFreed(map[string]int{Expired: 1}, "3")
	})
	run(t, "the next turn begins in another way", func(t *testing.T, w *world) {
		w.policy = keep(10 * time.Second)
		w.put("c", 3, nowhere)
		if k, _ := w.takes("c", 9); k != "" {
			t.Errorf("got %q", k)
		}
		w.put("c", 4, nowhere)
		if f := w.asked[1]; f.All.Turns != 1 || f.All.Back != 0 {
			t.Errorf("KV of no use counts as returned: %+v", f)
		}
		w.wantFreed(map[string]int{Unusable: 1}, "3")
	})
	run(t, "the client did not get the end", func(t *testing.T, w *world) {
		for n, d := range []time.Duration{10 * time.Second, 0} {
			w.policy = keep(d)
			w.put("c", 3, nowhere)
			k, taken := w.Recall("m", []uint32{1, 2, 3}, time.Now())
			if taken != (d > 0) || taken && k.name != "3" {
				t.Errorf("recalled %+v, %v", k, taken)
			}
			if _, taken := w.Recall("m", []uint32{1, 2, 3}, time.Now()); taken {
				t.Error("recalled twice")
			}
			w.put("d", 4, nowhere)
			if f := w.asked[2*n+1]; f.All.Turns != 0 || f.Conversation.Turns != 0 {
				t.Errorf("the turn counts as a gap: %+v", f)
			}
			w.Recall("m", []uint32{1, 2, 4}, time.Now())
		}
		w.wantFreed(map[string]int{Recalled: 2, Freed: 2}, "3", "4")
	})
	run(t, "the next turn comes late and before the tick", func(t *testing.T, w *world) {
		w.policy = keep(10 * time.Millisecond)
		w.put("c", 3, nowhere)
		time.Sleep(20 * time.Millisecond)
		if k, _ := w.takes("c", 9); k != "" {
			t.Errorf("got %q", k)
		}
		w.put("c", 4, nowhere)
		if f := w.asked[1]; f.All.Turns != 1 || f.All.Back != 1 {
			t.Errorf("facts %+v", f)
		}
		w.wantFreed(map[string]int{Expired: 1}, "3")
	})
	run(t, "a newer turn takes its place", func(t *testing.T, w *world) {
		w.policy = keep(10 * time.Second)
		w.put("c", 3, nowhere)
		w.put("c", 4, nowhere)
		w.wantFreed(map[string]int{Replaced: 1}, "3")
	})
	run(t, "the policy retains nothing", func(t *testing.T, w *world) {
		w.policy = keep(0)
		w.put("c", 3, nowhere)
		w.wantFreed(map[string]int{Freed: 1}, "3")
		time.Sleep(time.Second)
		if k, _ := w.takes("c", 1, 2, 3, 4); k != "" {
			t.Errorf("got %q", k)
		}
		w.put("c", 5, nowhere)
		if f := w.asked[1]; f.All.Back != 1 || f.Conversation.P50 != 1024 {
			t.Errorf("the keeper has not learned from a turn whose KV was freed: %+v", f)
		}
	})
	run(t, "the policy fails", func(t *testing.T, w *world) {
		if d := w.put("c", 3, nowhere); d != (Decision{time.Minute, 1, "native"}) {
			t.Errorf("decision %+v", d)
		}
		time.Sleep(59 * time.Second)
		w.wantFreed(map[string]int{"retain trap": 1})
		time.Sleep(2 * time.Second)
		w.wantFreed(map[string]int{"retain trap": 1, Expired: 1}, "3")
	})
	run(t, "a time above the longest one", func(t *testing.T, w *world) {
		w.policy = keep(time.Hour)
		if d := w.put("c", 3, nowhere); d.Keep != time.Minute {
			t.Errorf("decision %+v", d)
		}
	})
	run(t, "the process ends", func(t *testing.T, w *world) {
		w.policy = keep(10 * time.Second)
		w.put("c", 3, nowhere)
		w.Clear(time.Now())
		time.Sleep(time.Minute)
		w.wantFreed(map[string]int{Drained: 1}, "3")
	})
}

// TestMemoryIsShort: the keeper frees the least likely KV of an engine whose report shows that its
// memory is short, as much as is above the limit, and once for each report.
func TestMemoryIsShort(t *testing.T) {
	at := func() engine.Target { return engine.Target{Instance: &engine.Instance{Load: make([]load.Counter, 1)}} }
	run(t, "of one engine", func(t *testing.T, w *world) {
		likelihood := uint16(0)
		w.policy = func(*abi.RetainFacts) abi.RetainDecision {
			likelihood += 100
			return abi.RetainDecision{Millis: 50_000, Likelihood: likelihood}
		}
		full, idle := at(), at()
		w.put("", 3, idle)
		for id := range uint32(5) {
			w.put("", 10+id, full)
		}
		report := func(usage float32, capacity int64) {
			full.Load[0].Report(load.Report{At: time.Now(), Every: time.Second, Usage: usage, Capacity: capacity}, load.Mark{})
			time.Sleep(1100 * time.Millisecond)
		}
		report(0.85, 100)
		w.wantFreed(map[string]int{})
		report(0.95, 100) // 5 tokens above the limit; each turn has 3
		w.wantFreed(map[string]int{Evicted: 2}, "10", "11")
		time.Sleep(3 * time.Second)
		w.wantFreed(map[string]int{Evicted: 2}, "10", "11") // the same report
		report(0.95, 0)
		w.wantFreed(map[string]int{Evicted: 3}, "10", "11", "12")
		if k, _ := w.takes("", 1, 2, 13, 7); k != "13" {
			t.Errorf("got %q", k)
		}
	})
	run(t, "as the policy sees it", func(t *testing.T, w *world) {
		w.policy = keep(time.Second)
		full := at()
		full.Load[0].Report(load.Report{At: time.Now(), Every: time.Second, Usage: 0.5}, load.Mark{})
		if w.put("", 3, full); w.asked[0].Usage != 0.5 {
			t.Errorf("usage %v", w.asked[0].Usage)
		}
	})
}

// TestKeeperHammer: turns end and begin at the same time. No KV is taken or freed twice, and none is
// left.
func TestKeeperHammer(t *testing.T) {
	run(t, "", func(t *testing.T, w *world) {
		w.Keeper.o.Decide = func(f *abi.RetainFacts) (abi.RetainDecision, string, bool) {
			return abi.RetainDecision{Millis: uint32(f.All.Turns) * 7 % 300, Likelihood: 9}, "test", true
		}
		var wg sync.WaitGroup
		var mu sync.Mutex
		taken := map[string]int{}
		for g := range uint32(8) {
			wg.Go(func() {
				for n := range uint32(200) {
					id := 10 + g*1000 + n
					w.put(fmt.Sprint(n%11), id, nowhere)
					time.Sleep(time.Duration(n%13) * 30 * time.Millisecond)
					if k, _ := w.takes("", 1, 2, id, 5); k != "" {
						mu.Lock()
						taken[k]++
						mu.Unlock()
					}
				}
			})
		}
		wg.Wait()
		w.Clear(time.Now())
		for _, k := range w.freed {
			taken[k]++
		}
		for k, n := range taken {
			if n != 1 {
				t.Errorf("%s left %d times", k, n)
			}
		}
		if len(taken) != 8*200 {
			t.Errorf("%d of %d turns left", len(taken), 8*200)
		}
	})
}
