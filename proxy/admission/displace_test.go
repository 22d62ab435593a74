package admission

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// full is a queue with one place, which a request without a class has, and its waiting requests.
type full struct {
	t       *testing.T
	q       *Queue
	limits  config.Limits
	running Place

	mu      sync.Mutex
	refused []string // names of requests; guarded by mu
	served  []string // guarded by mu
}

// fill sends requests, one after the other, which wait. A name is "CLASS:CLIENT" or "CLASS:CLIENT:MODEL".
func (f *full) fill(classes map[string]config.PriorityClass, names ...string) {
	f.t.Helper()
	for _, name := range names {
		parts := strings.Split(name+":", ":")
		c := Claim{Client: parts[1], Class: classes[parts[0]], Model: parts[2], Tokens: 100}
		if c.Class.Name == "" {
			f.t.Fatalf("no class %s", parts[0])
		}
		go func() {
			p, err := f.q.Enter(f.t.Context(), c, f.limits)
			f.mu.Lock()
			defer f.mu.Unlock()
			if err == nil {
				f.served = append(f.served, name)
				f.running = p
				return
			}
			if d := new(DisplacedError); errors.As(err, &d) {
				name += " for " + d.For
			}
			f.refused = append(f.refused, fmt.Sprint(name, ": ", Reason(err)))
		}()
		synctest.Wait()
	}
}

// step ends the running request.
func (f *full) step() {
	p := f.running
	f.running = Place{}
	p.Leave(100)
	synctest.Wait()
}

// TestDisplacement: a full queue refuses the waiting request of the lowest class that comes last, if the
// new request is of a higher class.
func TestDisplacement(t *testing.T) {
	share := func(l *config.Limits) {
		*l = config.Default().Limits // the part of a client is 64 of 80 places of the queue
		l.MaxExchanges, l.Queue, l.QueueTimeout = 1, 80, config.Duration(time.Hour)
	}
	many := func(n int, name string) []string { return slices.Repeat([]string{name}, n) }
	for _, tt := range []struct {
		name    string
		queue   int // 0: of edit
		edit    func(*config.Limits)
		waiting []string
		then    []string // new requests
		refused []string
	}{
		{"a higher class", 2, nil, []string{"low:a", "low:a"}, []string{"high:b"}, []string{"low:a for high: queue_full"}},
		{"all of the lower class", 2, nil, []string{"low:a", "low:b"}, []string{"high:c", "high:c", "high:c"}, []string{"low:b for high: queue_full", "low:a for high: queue_full", "high:c: queue_full"}},
		{"the part of the lower class", 10, nil, many(10, "low:a"), many(10, "high:c"), append(many(8, "low:a for high: queue_full"), many(2, "high:c: queue_full")...)},
		{"the only one", 1, nil, []string{"low:a"}, []string{"high:b"}, []string{"low:a for high: queue_full"}},
		{"the same class", 2, nil, []string{"low:a", "low:a"}, []string{"low:b"}, []string{"low:b: queue_full"}},
		{"a class of the same priority", 2, nil, []string{"low:a", "low:a"}, []string{"other:b"}, []string{"other:b: queue_full"}},
		{"a lower class", 2, nil, []string{"high:a", "high:a"}, []string{"low:b"}, []string{"low:b: queue_full"}},
		{"the lowest of two classes", 3, nil, []string{"middle:a", "low:a", "middle:a"}, []string{"high:b", "high:b"}, []string{"low:a for high: queue_full", "middle:a for high: queue_full"}},
		{"the tenant with the most requests", 4, nil, []string{"low:flood", "low:flood", "low:flood", "low:b"}, []string{"high:c", "high:c"}, []string{"low:flood for high: queue_full", "low:flood for high: queue_full"}},
		{"the youngest of equal tenants", 3, nil, []string{"low:a", "low:c", "low:b"}, []string{"high:d"}, []string{"low:b for high: queue_full"}},
		{"behind a closed gate", 2, nil, []string{"low:a:m", "low:b:m"}, []string{"high:c:m"}, []string{"low:b:m for high: queue_full"}},
		{"the only one behind the gate of the new one", 1, nil, []string{"low:a:m"}, []string{"high:c:m"}, []string{"low:a:m for high: queue_full"}},
		{"the part of a client", 0, share, append(many(64, "low:a"), "low:b"), []string{"high:a", "low:a"}, []string{"low:a for high: client_limit", "low:a: client_limit"}},
		{"the queue and the part of a client", 0, share, append(many(16, "low:b"), many(64, "low:a")...), []string{"high:a"}, []string{"low:a for high: queue_full"}},
		{"no lower request of the client", 0, share, append(many(16, "low:b"), many(64, "middle:a")...), []string{"middle:a"}, []string{"middle:a: queue_full"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q, e := gated(map[string]int{"m": 0})
				f := &full{t: t, q: q, limits: config.Limits{MaxExchanges: 1, Queue: tt.queue, QueueTimeout: config.Duration(time.Hour)}}
				if tt.edit != nil {
					tt.edit(&f.limits)
				}
				classes := map[string]config.PriorityClass{}
				for name, priority := range map[string]int{"low": -1, "other": -1, "middle": 0, "high": 1} {
					classes[name] = testClass(name, func(c *config.PriorityClass) { c.Priority = priority })
				}
				high := classes["high"]
				high.Weight = 4
				classes["high"] = high
				f.fill(classes, "middle:first")
				f.fill(classes, tt.waiting...)
				if len(f.refused) > 0 || q.Waiting() != len(tt.waiting) {
					t.Fatalf("%d wait, %v are refused", q.Waiting(), f.refused)
				}
				f.fill(classes, tt.then...)
				if !slices.Equal(f.refused, tt.refused) {
					t.Errorf("refused %q, want %q", f.refused, tt.refused)
				}
				want := 1 + len(tt.waiting) + len(tt.then) - len(tt.refused)
				e.set("m", 1000)
				for range want {
					f.step()
				}
				if len(f.served) != want {
					t.Errorf("%d requests ran, want %d", len(f.served), want)
				}
				q.empty(t)
			})
		})
	}
}

// TestDisplacementShares: two classes get their shares while the queue is full all the time. A flood takes
// no place of the queue from another tenant of its class.
func TestDisplacementShares(t *testing.T) {
	class := func(name string, priority int, weight float64) config.PriorityClass {
		return testClass(name, func(c *config.PriorityClass) { c.Priority, c.Weight = priority, weight })
	}
	synctest.Test(t, func(t *testing.T) {
		var q Queue
		var wg sync.WaitGroup
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
		defer cancel()
		l := config.Limits{MaxExchanges: 4, Queue: 40, QueueTimeout: config.Duration(time.Hour)}
		ended := map[string]int{}
		var mu sync.Mutex
		send := func(class config.PriorityClass, client string, requests int) {
			for range requests {
				wg.Go(func() {
					for ctx.Err() == nil {
						time.Sleep(rand.N(time.Second))
						p, err := q.Enter(ctx, Claim{Client: client, Class: class, Tokens: 100}, l)
						if err != nil {
							continue
						}
						time.Sleep(rand.N(2 * time.Second))
						p.Leave(100)
						mu.Lock()
						ended[class.Name]++
						ended[client]++
						mu.Unlock()
					}
				})
			}
		}
		send(class("low", -1, 1), "flood", 100)
		send(class("low", -1, 1), "small", 10)
		send(class("high", 1, 3), "h", 60)
		wg.Wait()
		q.empty(t)
		low, high := float64(ended["low"]), float64(ended["high"])
		if share := low / (low + high); math.Abs(share-0.25) > 0.01 {
			t.Errorf("the class of weight 1 beside one of weight 3 got %.3f of the places", share)
		}
		if share := float64(ended["small"]) / low; share < 0.2 {
			t.Errorf("the tenant that sends 10 of 110 requests got %.3f of the places of the class", share)
		}
	})
}
