package admission

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// testClass returns a priority class with default values.
func testClass(name string, edit func(*config.PriorityClass)) config.PriorityClass {
	c := config.DefaultPriorityClass()
	c.Name, c.PromoteAfter = name, 0
	if edit != nil {
		edit(&c)
	}
	return c
}

// source sends requests without a pause: as soon as one ends, it sends the next one.
type source struct {
	claim    Claim
	requests int           // at the same time
	used     int64         // tokens of one request; 0: as claimed
	takes    time.Duration // of one request
	tokens   int64         // that the requests have used; guarded by mu of run
	ended    int           // guarded by mu of run
}

// compete lets the sources send requests for d to a queue of so many places.
func compete(t *testing.T, places int, d time.Duration, sources ...*source) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		var q Queue
		var mu sync.Mutex
		var wg sync.WaitGroup
		ctx, cancel := context.WithTimeout(t.Context(), d)
		defer cancel()
		l := config.Limits{MaxExchanges: places, Queue: 10_000, QueueTimeout: config.Duration(time.Hour)}
		for _, s := range sources {
			for range s.requests {
				wg.Go(func() {
					for ctx.Err() == nil {
						p, err := q.Enter(ctx, s.claim, l)
						if err != nil {
							return
						}
						time.Sleep(s.takes)
						if ctx.Err() == nil {
							mu.Lock()
							s.ended++
							s.tokens += max(s.used, s.claim.Tokens)
							mu.Unlock()
						}
						p.Leave(s.used)
					}
				})
			}
		}
		wg.Wait()
		q.empty(t)
	})
}

// jain returns Jain's fairness index of tokens per weight: 1 if all sources got the same.
func jain(sources ...*source) float64 {
	sum, squares := 0.0, 0.0
	for _, s := range sources {
		x := float64(s.tokens) / max(s.claim.Weight, 1)
		sum, squares = sum+x, squares+x*x
	}
	return sum * sum / (float64(len(sources)) * squares)
}

// TestFairTenants: a tenant that floods gets no more tokens than its weight. Requests of
// different sizes, and wrong expectations of their sizes, change nothing.
func TestFairTenants(t *testing.T) {
	class := testClass("default", nil)
	tenant := func(name string, weight float64, requests int, tokens, used int64) *source {
		takes := time.Duration(max(tokens, used)) * time.Millisecond
		return &source{claim: Claim{Client: name, Class: class, Weight: weight, Tokens: tokens}, requests: requests, used: used, takes: takes}
	}
	for name, sources := range map[string][]*source{
		"a flood":                {tenant("a", 0, 500, 100, 0), tenant("b", 0, 20, 100, 0), tenant("c", 0, 20, 100, 0)},
		"large requests":         {tenant("a", 0, 50, 1000, 0), tenant("b", 0, 50, 100, 0), tenant("c", 0, 50, 10, 0)},
		"larger than expected":   {tenant("a", 0, 50, 1, 1000), tenant("b", 0, 50, 100, 0), tenant("c", 0, 50, 300, 0)},
		"weights":                {tenant("a", 1, 50, 100, 0), tenant("b", 2, 50, 100, 0), tenant("c", 5, 50, 100, 0)},
		"weights and large ones": {tenant("a", 4, 50, 10, 0), tenant("b", 1, 500, 1000, 0)},
	} {
		t.Run(name, func(t *testing.T) {
			compete(t, 8, 2*time.Minute, sources...)
			if j := jain(sources...); j < 0.98 {
				t.Errorf("Jain index %.3f", j)
				for _, s := range sources {
					t.Logf("%s: %d tokens in %d requests", s.claim.Client, s.tokens, s.ended)
				}
			}
		})
	}
}

// TestFairClasses: classes share the places by weight, whatever the number of their tenants.
func TestFairClasses(t *testing.T) {
	high := testClass("high", func(c *config.PriorityClass) { c.Weight = 9 })
	low := testClass("low", nil)
	h := &source{claim: Claim{Client: "h", Class: high, Tokens: 100}, requests: 30, takes: time.Second}
	sources := []*source{h}
	lows := int64(0)
	for i := range 10 {
		sources = append(sources, &source{claim: Claim{Client: fmt.Sprint(i), Class: low, Tokens: 100}, requests: 30, takes: time.Second})
	}
	compete(t, 10, 20*time.Minute, sources...)
	for _, s := range sources[1:] {
		lows += s.tokens
	}
	if share := float64(h.tokens) / float64(h.tokens+lows); math.Abs(share-0.9) > 0.01 {
		t.Errorf("the class of weight 9 of 10 got %.3f of the tokens", share)
	}
	if j := jain(sources[1:]...); j < 0.98 {
		t.Errorf("Jain index %.3f within a class", j)
	}
}

// TestMaxShare: a class leaves places free, so that a request of another class never waits.
func TestMaxShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q Queue
		l := limits(4)
		low := Claim{Client: "l", Class: testClass("low", func(c *config.PriorityClass) { c.MaxShare = 0.5 })}
		high := Claim{Client: "h", Class: testClass("high", nil)}
		var running []Place
		take := func(c Claim) {
			t.Helper()
			p, err := q.Enter(t.Context(), c, l)
			if err != nil {
				t.Fatal(err)
			}
			running = append(running, p)
		}
		take(low)
		take(low)
		third := make(chan Place)
		go func() {
			p, err := q.Enter(t.Context(), low, l)
			if err != nil {
				t.Error(err)
			}
			third <- p
		}()
		synctest.Wait()
		if q.Waiting() != 1 {
			t.Errorf("%d requests wait, want 1: half of four places is two", q.Waiting())
		}
		take(high)
		take(high)
		running[3].Leave(1) // of the other class: the place stays free
		synctest.Wait()
		if q.Waiting() != 1 {
			t.Error("a class got more than its share")
		}
		running[0].Leave(1)
		p := <-third
		p.Leave(1)
		running[1].Leave(1)
		running[2].Leave(1)
		q.empty(t)
	})
}

// TestPromotion: a class with hardly any weight gets a place after promote_after.
func TestPromotion(t *testing.T) {
	high := testClass("high", func(c *config.PriorityClass) { c.Weight = 1e9 })
	for _, after := range []time.Duration{0, 5 * time.Second} {
		low := testClass("low", func(c *config.PriorityClass) { c.PromoteAfter = config.Duration(after) })
		h := &source{claim: Claim{Client: "h", Class: high, Tokens: 100}, requests: 4, takes: time.Second}
		l := &source{claim: Claim{Client: "l", Class: low, Tokens: 100}, requests: 1, takes: time.Second}
		compete(t, 1, time.Minute, h, l)
		if after == 0 && l.ended > 2 || after > 0 && (l.ended < 8 || l.ended > 12) {
			t.Errorf("promote_after %v: the class got %d of %d places", after, l.ended, h.ended+l.ended)
		}
	}
}

// TestPromotionKeepsShares: all requests wait longer than promote_after. The tenants of a class
// and the classes keep their shares, also beside a tenant whose many requests are older.
func TestPromotionKeepsShares(t *testing.T) {
	class := func(name string, weight float64) config.PriorityClass {
		return testClass(name, func(c *config.PriorityClass) {
			c.Weight, c.PromoteAfter = weight, config.Duration(5*time.Second)
		})
	}
	flood := &source{claim: Claim{Client: "flood", Class: class("default", 1), Tokens: 100}, requests: 300, takes: time.Second}
	small := &source{claim: Claim{Client: "small", Class: class("default", 1), Tokens: 100}, requests: 60, takes: time.Second}
	compete(t, 4, 10*time.Minute, flood, small)
	if j := jain(flood, small); j < 0.999 {
		t.Errorf("tenants of one class: %d and %d requests, Jain's index %.3f", flood.ended, small.ended, j)
	}
	urgent := &source{claim: Claim{Client: "u", Class: class("urgent", 9), Tokens: 100}, requests: 60, takes: time.Second}
	batch := &source{claim: Claim{Client: "b", Class: class("batch", 1), Tokens: 100}, requests: 300, takes: time.Second}
	compete(t, 4, 10*time.Minute, urgent, batch)
	if share := float64(batch.ended) / float64(batch.ended+urgent.ended); share < 0.09 || share > 0.11 {
		t.Errorf("the class of weight 1 beside one of weight 9 got %.3f of the places", share)
	}
}

// TestNoCredit: a tenant that sent nothing for a while gets no more than its share afterwards,
// and one that used an idle proxy owes nothing.
func TestNoCredit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q Queue
		l := config.Limits{MaxExchanges: 1, Queue: 1000, QueueTimeout: config.Duration(time.Hour)}
		a := Claim{Client: "a", Class: testClass("default", nil), Tokens: 1000}
		for range 1000 { // alone
			p, err := q.Enter(t.Context(), a, l)
			if err != nil {
				t.Fatal(err)
			}
			p.Leave(0)
		}
		busy, err := q.Enter(t.Context(), a, l)
		if err != nil {
			t.Fatal(err)
		}
		var order []string
		var wg sync.WaitGroup
		for i, name := range []string{"a", "b", "a", "b", "a", "b"} {
			claim := a
			claim.Client, claim.Tokens = name, 100
			wg.Go(func() {
				p, err := q.Enter(t.Context(), claim, l)
				if err != nil {
					t.Errorf("request %d: %v", i, err)
					return
				}
				order = append(order, name) // one request runs at a time
				p.Leave(0)
			})
			synctest.Wait()
		}
		busy.Leave(0)
		wg.Wait()
		if got := fmt.Sprint(order); got != "[a b a b a b]" {
			t.Errorf("order %s", got)
		}
		q.empty(t)
	})
}

// TestNoCreditAfterTheMemory: a request that got its place before the order forgot all, and that
// used fewer tokens than expected, earns its class nothing among the requests that wait later.
func TestNoCreditAfterTheMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q Queue
		l := config.Limits{MaxExchanges: 1, Queue: 1000, QueueTimeout: config.Duration(time.Hour)}
		claim := func(name string, tokens int64) Claim {
			return Claim{Client: name, Class: testClass(name, nil), Tokens: tokens}
		}
		enter := func(c Claim) (p Place) {
			p, err := q.Enter(t.Context(), c, l)
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
		first := enter(claim("a", 1))
		var long Place // waits, so that its class is charged with the expected tokens
		got := make(chan struct{})
		go func() {
			defer close(got)
			long = enter(claim("a", 10_000))
		}()
		synctest.Wait()
		first.Leave(1)
		<-got // no request waits now: the memory of the order ends
		var order []string
		var wg sync.WaitGroup
		for range 5 {
			for _, name := range []string{"b", "a"} {
				wg.Go(func() {
					p := enter(claim(name, 100))
					order = append(order, name) // one request runs at a time
					p.Leave(100)
				})
				synctest.Wait()
			}
		}
		long.Leave(1) // 9,999 tokens less than expected
		wg.Wait()
		if got := fmt.Sprint(order); got != "[a b a b a b a b a b]" {
			t.Errorf("order %s", got)
		}
		q.empty(t)
	})
}

// TestFairHammer: whatever happens, every place is given back and no request is lost.
func TestFairHammer(t *testing.T) {
	var q Queue
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for range 300 {
				ctx, cancel := context.WithCancel(t.Context())
				if rand.N(3) == 0 {
					go cancel()
				}
				l := config.Limits{MaxExchanges: 2 + rand.N(3), Queue: 4, QueueTimeout: config.Duration(rand.N(time.Millisecond) + 1)}
				rank := rand.N(3)
				c := Claim{Client: fmt.Sprint(i % 4), Weight: rand.Float64(), Tokens: rand.N(int64(1000)),
					Class: testClass([]string{"a", "b", "c"}[rank], func(c *config.PriorityClass) {
						c.Priority, c.MaxShare, c.PromoteAfter = rank, rand.Float64()+0.01, config.Duration(rand.N(time.Millisecond))
					})}
				if p, err := q.Enter(ctx, c, l); err == nil {
					p.Leave(rand.N(int64(2000)))
				}
				cancel()
			}
		})
	}
	wg.Wait()
	q.empty(t)
}
