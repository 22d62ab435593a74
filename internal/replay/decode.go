package replay

import "time"

// batch is one decode instance. Requests wait for room in the order in which
// their prefills end, fetch their KV, and join the batch at its next step.
type batch struct {
	run     *run
	row     int
	cache   *cache
	waiting []*job
	active  int // requests with room, including those whose KV is in transfer

	arrived []*job         // they join at the next step
	ends    map[int][]*job // running requests by the step that makes their last token
	running int
	tokens  int // of the running requests, prompts and answers
	step    int
	busy    bool

	waits int // requests for which there was no room when their prefill ended
}

func (b *batch) add(j *job) {
	b.waiting = append(b.waiting, j)
	b.admit()
	if len(b.waiting) > 0 {
		b.waits++
	}
}

// blocks returns the total room that a request needs.
func (c *Config) blocks(q *Request) int {
	return max(len(q.HashIDs), (q.InputLength+q.OutputLength+c.BlockTokens-1)/c.BlockTokens)
}

// admit starts the transfers for which there is room.
func (b *batch) admit() {
	cfg := b.run.cfg
	for len(b.waiting) > 0 && b.active < cfg.Model.DecodeRequests {
		j := b.waiting[0]
		held, ok := b.cache.take(j.HashIDs, cfg.blocks(&j.Request)-len(j.HashIDs))
		if !ok {
			return
		}
		b.run.view.evicted(b.row, b.cache.taken())
		b.waiting = b.waiting[1:]
		b.active++
		missing := max(0, j.InputLength-held*cfg.BlockTokens)
		b.run.transferred += int64(missing)
		b.run.clock.after(cfg.Model.transfer(missing), func() { b.arrive(j, held) })
	}
}

func (b *batch) arrive(j *job, held int) {
	whole := j.whole(b.run.cfg.BlockTokens)
	b.cache.fill(j.HashIDs, held, whole)
	b.run.view.stored(b.row, j.lease.chain[min(held, whole):])
	b.run.ranks[j.lease.prefill].release(j)
	b.arrived = append(b.arrived, j)
	b.next()
}

// next begins a step, unless one is running or the batch is empty.
func (b *batch) next() {
	if b.busy || b.running+len(b.arrived) == 0 {
		return
	}
	first := b.arrived
	b.arrived = nil
	for _, j := range first {
		last := b.step + j.OutputLength - 1
		b.ends[last] = append(b.ends[last], j)
		b.tokens += j.InputLength
	}
	b.running += len(first)
	took := b.run.cfg.Model.step(b.running, b.tokens)
	b.busy = true
	b.run.clock.after(took, func() { b.stepped(took, first) })
}

func (b *batch) stepped(took time.Duration, first []*job) {
	b.busy = false
	b.tokens += b.running
	b.run.steps = append(b.run.steps, weighted{took, b.running - len(first)})
	for _, j := range first {
		b.run.firstToken(j)
	}
	ended := b.ends[b.step]
	delete(b.ends, b.step)
	b.step++
	for _, j := range ended {
		b.running--
		b.active--
		b.tokens -= j.InputLength + j.OutputLength
		if b.run.retention != nil {
			b.run.retention.keep(b, j)
		} else {
			b.cache.release(j.HashIDs, b.run.cfg.blocks(&j.Request)-len(j.HashIDs))
		}
		b.run.finished(j)
	}
	b.admit()
	b.next()
}
