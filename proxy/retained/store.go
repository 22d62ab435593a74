package retained

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

// Entry is KV with the conversation and the token ids by which a later turn finds it.
type Entry = conversation.OnShelf[*KV]

// Store holds the KV that decode engines retain between turns. It frees every entry that
// it neither returns nor rejects. It is safe for concurrent use.
type Store interface {
	// Empty reports whether there is nothing to take.
	Empty() bool
	// Named reports whether there is KV of a conversation of that name.
	Named(ctx context.Context, scope, name string) bool
	// Take takes the KV of the longest sequence with which ids begins. If there is none, it
	// frees the KV of that name; "" names none.
	Take(ctx context.Context, scope, name string, ids []uint32, now time.Time) (*KV, fleet.Found)
	// Put stores an entry. False means that the store rejects it; the caller frees it then.
	Put(e Entry, now time.Time) bool
	// Clear frees all entries that only this process holds.
	Clear(now time.Time)
	// Free makes the holder of k free it after delay. It is for entries that Take
	// returned or that Put rejected.
	Free(k *KV, delay time.Duration)
}

// NewLocal returns the store of a process that serves alone.
func NewLocal(f Freer) Store {
	return &local{f, conversation.NewShelf[*KV](fleet.MaxTurns, fleet.MaxTurnIDs)}
}

// NewFleet returns the store of a process of a fleet: the fleet's coordinator holds the
// entries.
func NewFleet(f Freer, client *fleet.Client) Store { return &fleetStore{f, client} }

type local struct {
	Freer
	shelf *conversation.Shelf[*KV]
}

// Empty implements Store.
func (s *local) Empty() bool { return s.shelf.Empty() }

// Named implements Store.
func (s *local) Named(_ context.Context, scope, name string) bool { return s.shelf.Named(scope, name) }

// Take implements Store.
func (s *local) Take(_ context.Context, scope, name string, ids []uint32, now time.Time) (*KV, fleet.Found) {
	if k, ok := s.shelf.Take(scope, ids, now); ok {
		return k, fleet.KVTaken
	}
	if name == "" {
		return nil, fleet.NothingRetained
	}
	old, ok := s.shelf.TakeNamed(scope, name, now)
	if !ok {
		return nil, fleet.NothingRetained
	}
	s.Free(old, 0)
	return nil, fleet.KVFreed
}

// Put implements Store.
func (s *local) Put(e Entry, now time.Time) bool {
	for _, old := range s.shelf.Put(e, now) {
		s.Free(old, 0)
	}
	return true
}

// Clear implements Store.
func (s *local) Clear(now time.Time) {
	for _, k := range s.shelf.TakeAll(now) {
		s.Free(k, 0)
	}
}

type fleetStore struct {
	Freer
	client *fleet.Client
}

// Empty implements Store.
func (s *fleetStore) Empty() bool { return !s.client.Connected() }

// Named implements Store.
func (s *fleetStore) Named(ctx context.Context, scope, name string) bool {
	return s.client.NamesKV(ctx, scope, name)
}

// Take implements Store.
func (s *fleetStore) Take(ctx context.Context, scope, name string, ids []uint32, _ time.Time) (*KV, fleet.Found) {
	encoded, found := s.client.TakeKV(ctx, scope, name, ids)
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
	return s.client.PutKV(conversation.OnShelf[*fleet.RetainedKV]{
		Scope: e.Scope, Name: e.Name, IDs: e.IDs, Expires: e.Expires, Value: e.Value.encode(),
	}, now)
}

// Clear implements Store.
func (*fleetStore) Clear(time.Time) {}
