package replay

import (
	"slices"
	"time"
)

// rank is one prefill rank: a queue in order of arrival, computed in chunks.
type rank struct {
	run   *run
	row   int
	cache *cache
	queue []*job // the first may be in progress
	busy  bool

	routed   int // requests
	uncached int // computed blocks
}

func (r *rank) add(j *job) {
	r.routed++
	r.queue = append(r.queue, j)
	r.step()
}

// waiting returns the number of requests whose computation has not begun.
func (r *rank) waiting() int {
	n := len(r.queue)
	if n > 0 && r.queue[0].begun {
		n--
	}
	return n
}

// step begins the next step, unless one is running, the queue is empty, or
// there is no room. A later release calls it again.
func (r *rank) step() {
	if r.busy {
		return
	}
	m := &r.run.cfg.Model
	var (
		took time.Duration
		done []*job
	)
	budget := m.ChunkTokens
	for budget > 0 && len(r.queue) > 0 {
		j := r.queue[0]
		if !j.begun {
			if !r.begin(j) {
				break
			}
			if j.kept != nil {
				r.pull(j)
				continue
			}
			took += micros(m.PrefillRequestMicros)
		}
		n := min(budget, j.InputLength-j.position)
		took += m.prefill(j.position, j.position+n)
		j.position += n
		budget -= n
		if j.position == j.InputLength {
			// From here on other requests find the blocks, even in the same
			// step: engines enter them when they are scheduled.
			whole := j.whole(r.run.cfg.BlockTokens)
			r.cache.fill(j.HashIDs, j.held, whole)
			r.run.view.stored(r.row, j.lease.chain[min(j.held, whole):])
			done = append(done, j)
			r.queue = r.queue[1:]
		}
	}
	if budget == m.ChunkTokens {
		return
	}
	r.busy = true
	r.run.clock.after(took, func() {
		r.busy = false
		for _, j := range done {
			r.run.prefilled(j)
		}
		r.step()
	})
}

// begin reserves room for a request and finds its cached blocks.
func (r *rank) begin(j *job) bool {
	held, ok := r.cache.take(j.HashIDs, 0)
	if !ok {
		return false
	}
	r.run.view.evicted(r.row, r.cache.taken())
	j.begun, j.held = true, held
	j.position = j.InputLength - j.uncached(held, r.run.cfg.BlockTokens)
	r.uncached += len(j.HashIDs) - held
	r.run.hits += held
	r.run.found += int64(j.position)
	return true
}

// pull fetches the KV of the previous turn from the decode instance that retains it. The rank
// computes other requests in the meantime. Then the request comes next.
func (r *rank) pull(j *job) {
	r.queue = r.queue[1:]
	k, m := j.kept, &r.run.cfg.Model
	missing := max(0, k.tokens-j.position)
	r.run.retention.pulled++
	r.run.retention.pulledTokens += missing
	r.run.clock.after(m.transfer(missing)+micros(m.PrefillRequestMicros), func() {
		r.run.retention.free(k)
		j.position = max(j.position, k.tokens)
		r.run.found += int64(missing)
		at := 0
		if len(r.queue) > 0 && r.queue[0].begun {
			at = 1
		}
		r.queue = slices.Insert(r.queue, at, j)
		r.step()
	})
}

// release releases a request's blocks after their transfer.
func (r *rank) release(j *job) {
	r.cache.release(j.HashIDs, 0)
	r.step()
}
