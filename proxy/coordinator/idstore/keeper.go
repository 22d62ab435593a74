// Package idstore keeps the marks below which disagg ids have been reserved, in a
// file or in etcd, and the process that reserves supplied: a Keeper has always
// some more than it grants to its own Source and to the workers that ask.
package idstore

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// Store reserves id-time. Whatever happens to it or to those that use it, no two
// blocks share an id: a mark is raised for good before the block is returned, and
// a block whose mark may or may not have been raised is not returned.
type Store interface {
	// Reserve returns a block of the given width that begins at the mark, or now
	// if that is later.
	Reserve(ctx context.Context, now time.Time, width time.Duration) (disaggid.Block, error)
	// Close ends what the Store has begun; it may go on being used.
	Close(ctx context.Context) error
}

// tendEvery is the time between two looks at what is left, and after which a
// Store that failed is asked again.
const tendEvery = time.Second

// patience bounds one reservation.
const patience = 3 * time.Second

// Keeper grants ranges of ids: to the Source of its own process, and to workers.
//
// A coordinator has one from its start, standby or not: what it has reserved are
// its own ids for good, so that one that no longer leads, or cannot reach etcd,
// may go on granting them. For each report of a worker that is an encoded
// disaggid.Ask it calls Grant, and answers with Table under fleet.TopicIDs,
// to that worker or to all, which give it to Source.ExtendBy. A worker has a
// Source by disaggid.NewSource, and reports Source.Ask when it has connected and
// every second, as long as that is true.
type Keeper struct {
	store  Store
	grants *disaggid.Grants
	own    *disaggid.Source
	log    *slog.Logger
	low    chan struct{} // 1; something has been granted

	mu   sync.Mutex // one reservation at a time
	away bool       // guarded by mu; the last one failed
}

// NewKeeper returns a keeper of ranges of the given width, disaggid.Width unless
// in a test. It has nothing to grant before the first Tend.
func NewKeeper(store Store, width time.Duration, log *slog.Logger) *Keeper {
	return &Keeper{
		store: store, grants: disaggid.NewGrants(width), own: disaggid.NewSource(),
		log: log, low: make(chan struct{}, 1),
	}
}

// Source mints for this process. It is the same for the keeper's life.
func (k *Keeper) Source() *disaggid.Source { return k.own }

// Grant is what a worker that asks gets; false when nothing is left until the
// Store answers again: it will ask again.
func (k *Keeper) Grant(a disaggid.Ask) (disaggid.Range, bool) {
	r, ok := k.grants.Grant(a)
	select {
	case k.low <- struct{}{}:
	default:
	}
	return r, ok
}

// Table is what was granted last to each worker, for all of them.
func (k *Keeper) Table() []byte { return k.grants.AppendTable(nil) }

// Tend reserves ids if there are few left, and gives the own Source its range. An
// error says that the Store failed and takes nothing away.
func (k *Keeper) Tend(ctx context.Context, now time.Time) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	err := k.reserve(ctx, now)
	if ask, few := k.own.Ask(); few {
		if r, ok := k.grants.Grant(ask); ok {
			k.own.Extend(r)
		}
	}
	switch {
	case err != nil && !k.away:
		k.log.Warn("no ids can be reserved; those reserved before are used meanwhile", "error", err)
	case err == nil && k.away:
		k.log.Info("ids can be reserved again")
	}
	k.away = err != nil
	return err
}

// reserve asks the Store if more is needed; k.mu is held.
func (k *Keeper) reserve(ctx context.Context, now time.Time) error {
	width := k.grants.Lacks(now)
	if width == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	b, err := k.store.Reserve(ctx, now, width)
	if err != nil {
		return fmt.Errorf("reserve ids: %w", err)
	}
	k.grants.Add(b)
	return nil
}

// Run tends until ctx ends, and closes the Store.
func (k *Keeper) Run(ctx context.Context) {
	defer func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), tendEvery)
		defer cancel()
		if err := k.store.Close(last); err != nil {
			k.log.Warn("the node number of the ids stays taken for a while", "error", err)
		}
	}()
	tick := time.NewTicker(tendEvery)
	defer tick.Stop()
	for {
		_ = k.Tend(ctx, time.Now()) // it is logged, and tried again
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-k.low:
		}
	}
}

// block is what begins at mark, or now if that is later.
func block(now time.Time, mark int64, width time.Duration) (from, until int64, err error) {
	from = max(disaggid.Clock(now), mark)
	until = from + width.Milliseconds()
	if until > disaggid.End {
		return 0, 0, fmt.Errorf("the id-time is used up: the mark is at %s", time.UnixMilli(from).UTC().Format(time.RFC3339))
	}
	return from, until, nil
}
