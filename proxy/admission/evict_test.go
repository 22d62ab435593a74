package admission

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// The classes of these tests.
var (
	urgent = testClass("urgent", func(c *config.PriorityClass) { c.Priority = 10 })
	plain  = testClass("default", nil)
	batch  = testClass("batch", func(c *config.PriorityClass) { c.Priority = -10 })
	idle   = testClass("idle", func(c *config.PriorityClass) { c.Priority = -20 })
)

// evictions are the running requests of a queue and those that have ended for another one.
type evictions struct {
	t     *testing.T
	q     *Queue
	limit config.Limits

	mu      sync.Mutex
	running []string                              // names; guarded by mu
	ended   []string                              // names of the evicted requests; guarded by mu
	asked   []abi.EvictFacts                      // guarded by mu
	row     func(f *abi.EvictFacts) (int32, bool) // nil: row 0
}

func newEvictions(t *testing.T, places int, room map[string]int) (*evictions, *engines) {
	q, e := gated(room)
	v := &evictions{t: t, q: q, limit: limits(places)}
	q.Evict = func(f *abi.EvictFacts) (int32, string, bool) {
		v.mu.Lock()
		defer v.mu.Unlock()
		f2 := *f
		f2.Running = slices.Clone(f.Running)
		v.asked = append(v.asked, f2)
		if v.row == nil {
			return 0, "test", true
		}
		row, ok := v.row(f)
		return row, "test", ok
	}
	return v, e
}

// request is one request of a test.
type request struct {
	end  context.CancelCauseFunc // as if the client left
	done chan struct{}           // closed when the request has ended
	err  error                   // of Enter
	lag  chan struct{}           // an evicted request gives its place back when this is closed; nil: at once
}

// start sends a request, which runs until it is ended, and waits until it runs or waits.
func (v *evictions) start(name string, class config.PriorityClass, edit func(*Claim, *request)) *request {
	v.t.Helper()
	ctx, end := context.WithCancelCause(v.t.Context())
	r := &request{end: end, done: make(chan struct{})}
	c := Claim{Client: name, Class: class, Evicts: true}
	if Sheddable(class.Priority) {
		c.Evictable = &Evictable{End: func(e *EvictedError) { end(e) }, Progress: func(r *abi.Evictable) { r.Sent = 7 }}
	}
	if edit != nil {
		edit(&c, r)
	}
	go func() {
		defer close(r.done)
		p, err := v.q.Enter(ctx, c, v.limit)
		if r.err = err; err != nil {
			return
		}
		v.note(&v.running, name, true)
		<-ctx.Done()
		if e := new(EvictedError); errors.As(context.Cause(ctx), &e) {
			v.note(&v.ended, name, true)
			if r.lag != nil {
				<-r.lag
			}
		}
		v.note(&v.running, name, false)
		p.Leave(0)
	}()
	synctest.Wait()
	time.Sleep(time.Millisecond) // ages differ
	return r
}

func (v *evictions) note(list *[]string, name string, add bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if add {
		*list = append(*list, name)
		return
	}
	*list = slices.DeleteFunc(*list, func(n string) bool { return n == name })
}

// has checks the running and the evicted requests.
func (v *evictions) has(running, ended []string) {
	v.t.Helper()
	synctest.Wait()
	v.mu.Lock()
	defer v.mu.Unlock()
	if got := slices.Sorted(slices.Values(v.running)); !slices.Equal(got, running) || !slices.Equal(v.ended, ended) {
		v.t.Errorf("%v run, %v were evicted; want %v and %v", got, v.ended, running, ended)
	}
}

// over ends all requests and checks that the queue is empty.
func (v *evictions) over(all ...*request) {
	v.t.Helper()
	for _, r := range all {
		r.end(context.Canceled)
	}
	for _, r := range all {
		<-r.done
	}
	v.q.ends(v.t)
	v.q.mu.Lock()
	defer v.q.mu.Unlock()
	if len(v.q.ending) != 0 || len(v.q.wanting) != 0 || v.q.asking {
		v.t.Errorf("%d end, %d want an eviction, asking %v", len(v.q.ending), len(v.q.wanting), v.q.asking)
	}
	for _, c := range v.q.order.classes {
		if c.youngest != nil || c.heirs != 0 {
			v.t.Errorf("class %s lists a request, or has %d heirs", c.Name, c.heirs)
		}
	}
}

// TestEvict: a waiting request gets the place of a running one of a lower class with a negative
// priority: of the lowest class, the one that got its place last.
func TestEvict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, _ := newEvictions(t, 4, nil)
		all := []*request{v.start("b1", batch, nil), v.start("i1", idle, nil), v.start("i2", idle, nil), v.start("d1", plain, nil)}
		all = append(all, v.start("u1", urgent, func(c *Claim, _ *request) { c.Tenant, c.Prompt = "t", 5 }))
		v.has([]string{"b1", "d1", "i1", "u1"}, []string{"i2"})
		f := v.asked[0]
		if len(f.Running) != 3 || f.Saturated || f.Priority != 10 || f.Class != abi.LabelID("urgent") || f.Tenant != abi.LabelID("t") || f.PromptTokens != 5 {
			t.Errorf("facts %+v", f)
		}
		if r := f.Running[0]; r.Priority != -20 || r.Class != abi.LabelID("idle") || r.Tenant != abi.LabelID("i2") || r.Sent != 7 || r.AgeMicros >= f.Running[1].AgeMicros || f.Running[2].Priority != -10 {
			t.Errorf("rows %+v", f.Running)
		}
		all = append(all, v.start("d2", plain, nil), v.start("u2", urgent, nil))
		v.has([]string{"d1", "d2", "u1", "u2"}, []string{"i2", "i1", "b1"})
		all = append(all, v.start("u3", urgent, nil)) // no request may be ended any more
		v.has([]string{"d1", "d2", "u1", "u2"}, []string{"i2", "i1", "b1"})
		if len(v.asked) != 3 {
			t.Errorf("the policy was asked %d times, want 3", len(v.asked))
		}
		v.over(all...)
	})
}

// TestEvictSparesItsEquals: no request ends for one of its own or of a lower class, or without a policy.
func TestEvictSparesItsEquals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, _ := newEvictions(t, 1, nil)
		all := []*request{v.start("b1", batch, nil)}
		all = append(all, v.start("b2", batch, nil), v.start("i1", idle, nil),
			v.start("u1", urgent, func(c *Claim, _ *request) { c.Evicts = false }))
		v.has([]string{"b1"}, nil)
		v.over(all...)
	})
}

// TestEvictKeepsShares: a request that got its place by the share or the promotion of its class while a
// higher class waited keeps it. So evictions take only what a low class got beyond its share.
func TestEvictKeepsShares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, _ := newEvictions(t, 1, nil)
		promoted := batch
		promoted.PromoteAfter = config.Duration(time.Second)
		u1 := v.start("u1", urgent, nil)
		b1 := v.start("b1", promoted, nil)
		time.Sleep(2 * time.Second)
		u2 := v.start("u2", urgent, nil)
		u1.end(context.Canceled)
		v.has([]string{"b1"}, nil)
		u3 := v.start("u3", urgent, nil)
		v.has([]string{"b1"}, nil)
		b1.end(context.Canceled)
		v.has([]string{"u2"}, nil)
		v.over(u1, b1, u2, u3)
	})
}

// TestEvictPlaceGoesUp: the freed place goes to a request of a higher class in the order of the shares,
// also if the one that asked has left, and not to a low class that is to be promoted.
func TestEvictPlaceGoesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, _ := newEvictions(t, 2, nil)
		promoted := batch
		promoted.PromoteAfter = 1 // at once
		lag := make(chan struct{})
		slow := func(_ *Claim, r *request) { r.lag = lag }
		b1, b2 := v.start("b1", promoted, slow), v.start("b2", promoted, slow)
		b3 := v.start("b3", promoted, nil)
		u1 := v.start("u1", urgent, nil)
		u1.end(context.Canceled) // b2 ends for nobody now
		synctest.Wait()
		u2 := v.start("u2", urgent, nil)
		if len(v.asked) != 1 {
			t.Errorf("the policy was asked %d times: b2 ends already", len(v.asked))
		}
		v.has([]string{"b1", "b2"}, []string{"b2"})
		close(lag)
		v.has([]string{"b1", "u2"}, []string{"b2"})
		v.over(b1, b2, b3, u1, u2)
	})
}

// TestEvictOnce: a request that gets another place in the meantime leaves its evicted one to the next
// waiting request. No request ends twice.
func TestEvictOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, _ := newEvictions(t, 2, nil)
		lag := make(chan struct{})
		d1 := v.start("d1", plain, nil)
		b1 := v.start("b1", batch, func(_ *Claim, r *request) { r.lag = lag })
		u1 := v.start("u1", urgent, nil) // ends b1
		u2 := v.start("u2", urgent, nil) // nothing is left to end
		d1.end(context.Canceled)         // u1 gets this place
		v.has([]string{"b1", "u1"}, []string{"b1"})
		close(lag)
		v.has([]string{"u1", "u2"}, []string{"b1"})
		if len(v.asked) != 1 {
			t.Errorf("the policy was asked %d times, want once", len(v.asked))
		}
		v.over(d1, b1, u1, u2)
	})
}

// TestEvictSaturated: while the engines of a model are saturated, only a request of that model ends, and
// the waiting request takes its place at the engines although they are still saturated.
func TestEvictSaturated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, e := newEvictions(t, 10, map[string]int{"m": 9, "n": 9})
		of := func(model string) func(*Claim, *request) { return func(c *Claim, _ *request) { c.Model = model } }
		all := []*request{v.start("m1", batch, of("m")), v.start("n1", batch, of("n")), v.start("n2", batch, of("n"))}
		e.set("m", 0)
		e.set("n", 0)
		all = append(all, v.start("u1", urgent, of("m")))
		v.has([]string{"n1", "n2", "u1"}, []string{"m1"})
		if f := v.asked[0]; !f.Saturated || len(f.Running) != 1 {
			t.Errorf("facts %+v", f)
		}
		all = append(all, v.start("u2", urgent, of("m"))) // ending a request of n would free nothing
		v.has([]string{"n1", "n2", "u1"}, []string{"m1"})
		if len(v.asked) != 1 {
			t.Errorf("the policy was asked %d times, want once", len(v.asked))
		}
		v.over(all...)
	})
}

// TestEvictInVain: no request ends for one that would get no place by it: the share of its class is
// full, or it leaves the queue at once.
func TestEvictInVain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, _ := newEvictions(t, 2, nil)
		half := urgent
		half.MaxShare = 0.5
		u1, b1 := v.start("u1", half, nil), v.start("b1", batch, nil)
		u2 := v.start("u2", half, nil)
		v.has([]string{"b1", "u1"}, nil)
		v.limit.QueueTimeout = config.Duration(evictTime - 1)
		d1 := v.start("d1", plain, nil)
		v.has([]string{"b1", "u1"}, nil)
		if <-d1.done; !errors.Is(d1.err, ErrQueueTimeout) || len(v.asked) != 0 {
			t.Errorf("error %v, %d questions", d1.err, len(v.asked))
		}
		v.over(u1, u2, b1, d1)
	})
}

// TestEvictAnswers: an answer that names no request ends none, and a request that has left meanwhile is
// not ended: the policy is asked again.
func TestEvictAnswers(t *testing.T) {
	for name, answer := range map[string]func(*abi.EvictFacts) (int32, bool){
		"none": func(*abi.EvictFacts) (int32, bool) { return abi.EvictNone, true }, "fails": func(*abi.EvictFacts) (int32, bool) { return 0, false },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				v, _ := newEvictions(t, 1, nil)
				v.row = answer
				b1, u1 := v.start("b1", batch, nil), v.start("u1", urgent, nil)
				v.has([]string{"b1"}, nil)
				v.over(b1, u1)
			})
		})
	}
	t.Run("left", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			v, _ := newEvictions(t, 2, nil)
			b1, b2, b3 := v.start("b1", batch, nil), v.start("b2", batch, nil), (*request)(nil)
			v.row = func(*abi.EvictFacts) (int32, bool) {
				v.row = nil
				v.mu.Unlock()
				b2.end(context.Canceled) // its place goes to u1
				<-b2.done
				v.mu.Lock()
				return 0, true
			}
			u1 := v.start("u1", urgent, nil)
			v.has([]string{"b1", "u1"}, nil)
			b3 = v.start("b3", batch, nil)
			v.over(b1, b2, b3, u1)
		})
	})
}

// TestEvictBounded: one question looks at a bounded number of running requests.
func TestEvictBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 1000
		v, _ := newEvictions(t, n, nil)
		var all []*request
		for i := range n {
			all = append(all, v.start(string(rune('A'+i)), batch, nil))
		}
		all = append(all, v.start("u", urgent, nil))
		if len(v.asked) != 1 || len(v.asked[0].Running) != abi.MaxEvictable || len(v.ended) != 1 {
			t.Errorf("%d questions, %d ended", len(v.asked), len(v.ended))
		}
		v.over(all...)
	})
}

// TestEvictHammer: under all races of clients that leave, evictions and ends, no place is lost, and no
// more requests end than waited.
func TestEvictHammer(t *testing.T) {
	q := Queue{Evict: func(f *abi.EvictFacts) (int32, string, bool) { return int32(len(f.Running)) - 1, "last", true }}
	var mu sync.Mutex
	evicted, high := 0, 0
	var wg sync.WaitGroup
	for i := range 16 {
		class := []config.PriorityClass{urgent, plain, batch, idle}[i%4]
		wg.Go(func() {
			for n := range 150 {
				ctx, end := context.WithCancelCause(t.Context())
				if n%5 == 0 {
					go end(context.Canceled)
				}
				c := Claim{Client: class.Name, Class: class, Evicts: true}
				if Sheddable(class.Priority) {
					c.Evictable = &Evictable{End: func(e *EvictedError) { end(e) }, Progress: func(*abi.Evictable) {}}
				} else {
					mu.Lock()
					high++
					mu.Unlock()
				}
				p, err := q.Enter(ctx, c, config.Limits{MaxExchanges: 3, Queue: 100, QueueTimeout: config.Duration(time.Second)})
				if err == nil {
					select {
					case <-ctx.Done():
					case <-time.After(50 * time.Microsecond):
					}
					if e := new(EvictedError); errors.As(context.Cause(ctx), &e) {
						mu.Lock()
						evicted++
						mu.Unlock()
					}
					p.Leave(1)
				}
				end(nil)
			}
		})
	}
	wg.Wait()
	for {
		q.mu.Lock()
		asking := q.asking
		q.mu.Unlock()
		if !asking {
			break
		}
		time.Sleep(time.Millisecond)
	}
	q.empty(t)
	if evicted > high {
		t.Errorf("%d requests ended for %d", evicted, high)
	}
	if len(q.ending) != 0 {
		t.Errorf("%d requests end", len(q.ending))
	}
}
