// Package idstore stores the marks below which disagg ids are reserved, in a file, in a Lease or in
// etcd. A Keeper reserves ids ahead of their use, and grants them to its own Source and to
// workers.
//
// The decisions behind this package are in docs/design/fleet.md.
package idstore

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// Store reserves id-time. No two blocks share an id, whatever fails: the mark is raised
// durably before a block is returned, and a block is not returned if it is unknown whether
// its mark was raised.
type Store interface {
	// Reserve returns a block of the given width. It begins at the mark, or at now if that
	// is later.
	Reserve(ctx context.Context, now time.Time, width time.Duration) (disaggid.Block, error)
	// Close releases the Store's resources. The Store may be used again after it.
	Close(ctx context.Context) error
}

// tendEvery is the time between two calls of Tend, and before a failed Store is tried
// again.
const tendEvery = time.Second

// patience bounds the time of one reservation.
const patience = 3 * time.Second

// Keeper grants ranges of ids to the Source of its own process and to workers.
//
// A coordinator has a Keeper from its start, also as a standby. Reserved ids belong to
// their coordinator permanently, so a coordinator that no longer leads, or cannot reach
// etcd, may still grant them. For each worker's report that is an encoded disaggid.Ask,
// the coordinator calls Grant. It publishes Table under fleet.TopicIDs. Workers pass the
// table to Source.ExtendBy. A worker has a Source by disaggid.NewSource. It reports
// Source.Ask when it connects and then every second, as long as Ask returns true.
type Keeper struct {
	store  Store
	ranges *disaggid.Ranges
	own    *disaggid.Source
	log    *slog.Logger
	low    chan struct{} // holds 1; something has been granted

	mu   sync.Mutex // allows one reservation at a time
	away bool       // the last reservation failed; guarded by mu
}

// NewKeeper returns a keeper of ranges of the given width, which is disaggid.Width except
// in tests. It grants nothing before the first Tend.
func NewKeeper(store Store, width time.Duration, log *slog.Logger) *Keeper {
	return &Keeper{
		store: store, ranges: disaggid.NewRanges(width), own: disaggid.NewSource(),
		log: log, low: make(chan struct{}, 1),
	}
}

// Source returns the source of this process. Each call returns the same source.
func (k *Keeper) Source() *disaggid.Source { return k.own }

// Grant returns a range for a worker's request. False: no range is left until the Store
// answers; the worker repeats its request.
func (k *Keeper) Grant(a disaggid.Ask) (disaggid.Range, bool) {
	r, ok := k.ranges.Grant(a)
	select {
	case k.low <- struct{}{}:
	default:
	}
	return r, ok
}

// Table returns the last grant of each worker.
func (k *Keeper) Table() []byte { return k.ranges.AppendTable(nil) }

// Tend reserves ids if few are left, and gives its own Source a range. After an error of
// the Store, all granted ranges stay valid.
func (k *Keeper) Tend(ctx context.Context, now time.Time) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	err := k.reserve(ctx, now)
	if ask, few := k.own.Ask(); few {
		if r, ok := k.ranges.Grant(ask); ok {
			k.own.Extend(r)
		}
	}
	switch {
	case err != nil && !k.away && ctx.Err() == nil: // the end of the process is no failure
		k.log.Warn("ids cannot be reserved; the ids that were reserved before stay in use", "error", err)
	case err == nil && k.away:
		k.log.Info("ids can be reserved again")
	}
	k.away = err != nil
	return err
}

// reserve reserves a block if one is needed. The caller holds k.mu.
func (k *Keeper) reserve(ctx context.Context, now time.Time) error {
	width := k.ranges.Lacks(now)
	if width == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	b, err := k.store.Reserve(ctx, now, width)
	if err != nil {
		return fmt.Errorf("reserve ids: %w", err)
	}
	k.ranges.Add(b)
	return nil
}

// Run calls Tend until ctx ends, and closes the Store.
func (k *Keeper) Run(ctx context.Context) {
	defer func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), tendEvery)
		defer cancel()
		if err := k.store.Close(last); err != nil {
			k.log.Warn("the node number of the ids could not be released; it stays taken until its lease ends", "error", err)
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

// block returns the block that begins at mark, or at now if that is later.
func block(now time.Time, mark int64, width time.Duration) (from, until int64, err error) {
	from = max(disaggid.Clock(now), mark)
	until = from + width.Milliseconds()
	if until > disaggid.End {
		return 0, 0, fmt.Errorf("the id-time is used up: the mark is at %s", time.UnixMilli(from).UTC().Format(time.RFC3339))
	}
	return from, until, nil
}
