package replay

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/turns"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/gaps"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// leaseOfKV is the time for which a decode engine retains the KV of a turn. In the last part of it,
// margin, the proxy does not use the KV.
const (
	leaseOfKV = 480 * time.Second
	margin    = 30 * time.Second
)

// keptTurn is the KV of a turn on its decode instance.
type keptTurn struct {
	batch  *batch
	job    *job
	tokens int
	since  time.Duration
}

// retention is the KV of turns that decode instances retain in a run.
type retention struct {
	run      *run
	keeper   *turns.Keeper[*keptTurn]
	counters []load.Counter // reports of the decode instances

	kept, pulled int // turns
	pulledTokens int // that prefill fetched from decode
	results      map[string]int
	held         float64 // seconds for which a block was retained, summed up over the blocks
}

func newRetention(r *run, decide turns.Decide) *retention {
	k := &retention{run: r, counters: make([]load.Counter, len(r.decode)), results: make(map[string]int)}
	k.keeper = turns.New(turns.Options[*keptTurn]{
		Decide: decide, Free: k.free, Observer: k, Clock: k,
		Counter: func(t *keptTurn) *load.Counter { return &k.counters[t.batch.row-len(r.ranks)] },
	})
	return k
}

// Now implements turns.Clock.
func (k *retention) Now() time.Time { return epoch.Add(k.run.clock.now) }

// AfterFunc implements turns.Clock.
func (k *retention) AfterFunc(d time.Duration, f func()) (stop func()) {
	stopped := false
	k.run.clock.after(d, func() {
		if !stopped {
			f()
		}
	})
	return func() { stopped = true }
}

// TurnKept implements turns.Observer.
func (k *retention) TurnKept(result string, _ time.Duration) { k.results[result]++ }

// Fallback implements turns.Observer.
func (k *retention) Fallback(string, string) {}

// keep passes the KV of a finished request to the keeper.
func (k *retention) keep(b *batch, j *job) {
	k.kept++
	t := &keptTurn{batch: b, job: j, tokens: j.InputLength + j.OutputLength - 1, since: k.run.clock.now}
	var e gaps.Ending
	if j.turn.tool != "" {
		e.Call([]byte(j.turn.tool))
	}
	k.keeper.Put(conversation.OnShelf[*keptTurn]{
		Scope: "m", Name: j.Conversation, IDs: j.ids(t.tokens / k.run.cfg.BlockTokens), Expires: k.Now().Add(leaseOfKV - margin),
		Turn: gaps.Turn{Ending: e}, Value: t,
	}, k.Now())
}

// ids returns an id for each of the first whole blocks of a prompt and its answer, as tokens of the keeper: at
// least one, which no other session has.
func (j *job) ids(blocks int) []uint32 {
	ids := make([]uint32, max(1, blocks))
	for i := range ids {
		ids[i] = uint32(i)
	}
	ids[0] = j.text
	return ids
}

// take returns the KV of the previous turn; nil: none is retained.
func (k *retention) take(j *job) *keptTurn {
	if retained, _ := k.keeper.Named("m", j.Conversation, k.Now()); !retained {
		return nil
	}
	t, _, taken, _ := k.keeper.Take("m", j.Conversation, j.ids(j.InputLength/k.run.cfg.BlockTokens), k.Now())
	if !taken {
		return nil
	}
	k.run.clock.at(t.since+leaseOfKV, func() {
		if j.kept != nil && !j.begun { // the request still waits for room on prefill
			j.kept = nil
			k.free(t)
		}
	})
	return t
}

// free frees the KV of a turn on its decode instance.
func (k *retention) free(t *keptTurn) {
	b, j := t.batch, t.job
	blocks := k.run.cfg.blocks(&j.Request)
	k.held += float64(blocks) * (k.run.clock.now - t.since).Seconds()
	b.cache.release(j.HashIDs, blocks-len(j.HashIDs))
	if k.run.clock.now > t.since { // otherwise the caller admits the next requests
		b.admit()
		b.next()
	}
}

// report passes the use of memory of a decode instance to the keeper.
func (k *retention) report(b *batch) {
	k.counters[b.row-len(k.run.ranks)].Report(load.Report{
		At: k.Now(), Every: pollEvery, Usage: float32(b.cache.pinned()) / float32(b.cache.capacity), Capacity: int64(b.cache.capacity),
	}, load.Mark{})
}
