package loadgen

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// closed calls send with the numbers below count, and keeps a constant number of calls
// open until all are made.
func (r *run) closed(ctx context.Context, count int, send func(n int)) {
	var sent atomic.Int64
	var wg sync.WaitGroup
	for range min(max(r.c.Concurrency, 1), count) {
		wg.Go(func() {
			for ctx.Err() == nil {
				n := int(sent.Add(1)) - 1
				if n >= count {
					return
				}
				send(n)
			}
		})
	}
	wg.Wait()
}

// open begins conversation n at the n-th of the times since the run began, whatever the
// number of open ones. The times do not depend on the answers: where a server that stands
// still, or the bound of open conversations, delays a request, the delay counts.
func (r *run) open(ctx context.Context, times []time.Duration) {
	var wg sync.WaitGroup
	defer wg.Wait()
	var places chan struct{}
	if r.c.MaxOpen > 0 {
		places = make(chan struct{}, r.c.MaxOpen)
	}
	for n, at := range times {
		scheduled := r.began.Add(at)
		if !sleep(ctx, time.Until(scheduled)) {
			return
		}
		if places != nil {
			select {
			case places <- struct{}{}:
			case <-ctx.Done():
				return
			}
		}
		wg.Go(func() {
			r.conversation(ctx, n, scheduled)
			if places != nil {
				<-places
			}
		})
	}
}

// sleep waits. It returns false if ctx ended before.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// poisson returns the arrival times of count independent clients with the given mean rate
// per second. The first is 0.
func poisson(count int, rate float64, seed uint64) []time.Duration {
	random := rand.New(rand.NewPCG(seed, 1))
	times := make([]time.Duration, count)
	for n := 1; n < count; n++ {
		times[n] = times[n-1] + time.Duration(random.ExpFloat64()/rate*float64(time.Second))
	}
	return times
}

// conversation sends the turns of conversation n one after the other. The first is due at
// the time scheduled, each other one a time of thinking after the answer before.
func (r *run) conversation(ctx context.Context, n int, scheduled time.Time) {
	turns := r.work.turns(n)
	think := rand.New(rand.NewPCG(r.c.Seed, 5<<40+uint64(n)))
	var history []message
	for turn := range turns {
		t := r.work.task(n, turn)
		t.keep = turn+1 < turns
		answer, ok := r.one(ctx, &t, history, scheduled)
		if !ok {
			r.mu.Lock()
			r.skipped += turns - turn - 1
			r.mu.Unlock()
			return
		}
		if !t.keep {
			return
		}
		history = append(history, message{"user", t.prompt.text}, message{"assistant", answer})
		scheduled = time.Now().Add(time.Duration(think.ExpFloat64() * float64(r.c.Think)))
		if !sleep(ctx, time.Until(scheduled)) {
			return
		}
	}
}

// one sends a request and records its measurements, unless the run was ended. It returns
// the text of the answer if the task keeps it, and whether the answer was good.
func (r *run) one(ctx context.Context, t *task, history []message, scheduled time.Time) (answer string, ok bool) {
	limit, cancel := context.WithTimeout(ctx, r.c.Timeout)
	defer cancel()
	s, answer := r.ask(limit, t, history, scheduled)
	if s.Failure != "" && ctx.Err() != nil {
		return "", false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.samples = append(r.samples, s)
	if r.c.Ended != nil {
		r.c.Ended(s.Failure != "")
	}
	return answer, s.Failure == ""
}

// warm sends a request that is not measured. warm ignores a failure: if the server fails, the
// measured requests fail too.
func (r *run) warm(ctx context.Context, n int) {
	limit, cancel := context.WithTimeout(ctx, r.c.Timeout)
	defer cancel()
	t := r.work.warmUp(n)
	r.ask(limit, &t, nil, time.Now())
}
