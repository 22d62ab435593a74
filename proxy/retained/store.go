package retained

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/coordinator/turns"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// Entry is KV with the conversation and the token ids by which a later turn finds it.
type Entry = conversation.OnShelf[*KV]

// Store holds the KV that decode engines retain between turns. It frees every entry that
// it neither returns nor rejects. It is safe for concurrent use.
type Store interface {
	// Empty reports whether there is nothing to take.
	Empty() bool
	// Named reports whether there is KV of a conversation of that name. late: it has been freed.
	Named(ctx context.Context, scope, name string) (retained, late bool)
	// Take takes the KV of the longest sequence with which ids begins. If there is none, it
	// frees the KV of that name; "" names none.
	Take(ctx context.Context, scope, name string, ids []uint32, now time.Time) (*KV, fleet.Found)
	// Recall frees the KV of a turn whose end the client did not get. If another request has taken the
	// KV meanwhile, that request owns it.
	Recall(ctx context.Context, scope string, ids []uint32, now time.Time)
	// Put stores an entry, and decides how long it stays: KV.Decision. False means that the store
	// rejects it; the caller frees it then.
	Put(e Entry, now time.Time) bool
	// Clear frees all entries that only this process holds.
	Clear(now time.Time)
	// Free makes the holder of k free it after delay. It is for entries that Take
	// returned or that Put rejected.
	Free(k *KV, delay time.Duration)
}

// NewLocal returns the store of a process that serves alone. decide and observer may be nil; see
// turns.Options.
func NewLocal(f Freer, decide turns.Decide, observer turns.Observer) Store {
	return &local{f, turns.New(turns.Options[*KV]{
		Decide: decide, Free: func(k *KV) { f.Free(k, 0) }, Observer: observer,
		Counter: func(k *KV) *load.Counter { return turns.CounterOf(k.holder) },
	})}
}

// NewFleet returns the store of a process of a fleet: the fleet's coordinator holds the
// entries.
func NewFleet(f Freer, client *fleet.Client) Store { return &fleetStore{f, client} }

type local struct {
	Freer
	turns *turns.Keeper[*KV]
}

// Empty implements Store.
func (s *local) Empty() bool { return s.turns.Empty() }

// Named implements Store.
func (s *local) Named(_ context.Context, scope, name string) (retained, late bool) {
	return s.turns.Named(scope, name, time.Now())
}

// Take implements Store.
func (s *local) Take(_ context.Context, scope, name string, ids []uint32, now time.Time) (*KV, fleet.Found) {
	k, gap, taken, freed := s.turns.Take(scope, name, ids, now)
	switch {
	case taken:
		k.gap = gap
		return k, fleet.KVTaken
	case freed:
		return nil, fleet.KVFreed
	}
	return nil, fleet.NothingRetained
}

// Recall implements Store.
func (s *local) Recall(_ context.Context, scope string, ids []uint32, now time.Time) {
	if k, taken := s.turns.Recall(scope, ids, now); taken {
		s.Free(k, 0)
	}
}

// Put implements Store.
func (s *local) Put(e Entry, now time.Time) bool {
	e.Value.decision = s.turns.Put(e, now)
	return true
}

// Clear implements Store.
func (s *local) Clear(now time.Time) { s.turns.Clear(now) }

type fleetStore struct {
	Freer
	client *fleet.Client
}

// Empty implements Store.
func (s *fleetStore) Empty() bool { return !s.client.Connected() }

// Named implements Store.
func (s *fleetStore) Named(ctx context.Context, scope, name string) (retained, late bool) {
	return s.client.NamesKV(ctx, scope, name)
}

// Take implements Store.
func (s *fleetStore) Take(ctx context.Context, scope, name string, ids []uint32, _ time.Time) (*KV, fleet.Found) {
	encoded, gap, found := s.client.TakeKV(ctx, scope, name, ids)
	k, found := s.taken(encoded, found)
	if k != nil {
		k.gap = gap
	}
	return k, found
}

// Recall implements Store.
func (s *fleetStore) Recall(ctx context.Context, scope string, ids []uint32, _ time.Time) {
	if k, _ := s.taken(s.client.RecallKV(ctx, scope, ids)); k != nil {
		s.Free(k, 0)
	}
}

// taken returns the KV that the coordinator has handed over. It frees KV that nobody may pull.
func (s *fleetStore) taken(encoded *fleet.RetainedKV, found fleet.Found) (*KV, fleet.Found) {
	if encoded == nil {
		return nil, found
	}
	k, err := s.read(encoded)
	if err != nil { // then it cannot be freed either
		return nil, fleet.HolderUnknown
	}
	if found != fleet.KVTaken {
		s.Free(k, 0)
		return nil, found
	}
	return k, found
}

// Put implements Store.
func (s *fleetStore) Put(e Entry, now time.Time) bool {
	d, ok := s.client.PutKV(conversation.OnShelf[*fleet.RetainedKV]{
		Scope: e.Scope, Name: e.Name, IDs: e.IDs, Expires: e.Expires, Turn: e.Turn, Value: e.Value.encode(),
	}, now)
	e.Value.decision = d
	return ok
}

// Clear implements Store.
func (*fleetStore) Clear(time.Time) {}
