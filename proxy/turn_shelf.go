package proxy

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

// turnShelf is where the turns are that decode engines keep. What does not come back
// from it, and it does not refuse, it frees.
type turnShelf interface {
	// empty reports that there is nothing to take.
	empty() bool
	// named reports whether there is a turn of that name.
	named(ctx context.Context, scope, name string) bool
	// take takes the turn of most of the leading ids. Where there is none it frees that
	// of the name, unless that is "".
	take(ctx context.Context, scope, name string, ids []uint32, now time.Time) (*keptTurn, fleet.Found)
	// put keeps a turn; false: it is the caller's to free.
	put(o conversation.OnShelf[*keptTurn], now time.Time) bool
	// clear frees all that only this process knows of.
	clear(now time.Time)
}

// ownTurns is the turns of a process that serves alone.
type ownTurns struct {
	s     *Server
	shelf *conversation.Shelf[*keptTurn]
}

func (t *ownTurns) empty() bool { return t.shelf.Empty() }

func (t *ownTurns) named(_ context.Context, scope, name string) bool {
	return t.shelf.Named(scope, name)
}

func (t *ownTurns) take(_ context.Context, scope, name string, ids []uint32, now time.Time) (*keptTurn, fleet.Found) {
	if k, ok := t.shelf.Take(scope, ids, now); ok {
		return k, fleet.TurnTaken
	}
	if name == "" {
		return nil, fleet.NothingKept
	}
	old, ok := t.shelf.TakeNamed(scope, name, now)
	if !ok {
		return nil, fleet.NothingKept
	}
	t.s.forgetTurn(old, 0)
	return nil, fleet.TurnForgotten
}

func (t *ownTurns) put(o conversation.OnShelf[*keptTurn], now time.Time) bool {
	for _, old := range t.shelf.Put(o, now) {
		t.s.forgetTurn(old, 0)
	}
	return true
}

func (t *ownTurns) clear(now time.Time) {
	for _, k := range t.shelf.TakeAll(now) {
		t.s.forgetTurn(k, 0)
	}
}

// fleetTurns is the turns of a fleet, which its coordinator has.
type fleetTurns struct {
	s      *Server
	client *fleet.Client
}

func (t *fleetTurns) empty() bool { return !t.client.Connected() }

func (t *fleetTurns) named(ctx context.Context, scope, name string) bool {
	return t.client.NamesTurn(ctx, scope, name)
}

func (t *fleetTurns) take(ctx context.Context, scope, name string, ids []uint32, _ time.Time) (*keptTurn, fleet.Found) {
	told, found := t.client.TakeTurn(ctx, scope, name, ids)
	if told == nil {
		return nil, found
	}
	k, err := t.s.readTurn(told)
	if err != nil { // so that it cannot be freed either
		return nil, fleet.TurnLost
	}
	if found != fleet.TurnTaken {
		t.s.forgetTurn(k, 0)
		return nil, found
	}
	return k, found
}

func (t *fleetTurns) put(o conversation.OnShelf[*keptTurn], now time.Time) bool {
	return t.client.KeepTurn(conversation.OnShelf[*fleet.KeptTurn]{
		Scope: o.Scope, Name: o.Name, IDs: o.IDs, Expires: o.Expires, Value: o.Value.tell(),
	}, now)
}

func (*fleetTurns) clear(time.Time) {}

// tell is the turn for another process of the fleet.
func (k *keptTurn) tell() *fleet.KeptTurn {
	return &fleet.KeptTurn{Holder: k.holder, Since: k.since, Host: k.host, Params: k.params, Forget: k.forget.append(nil)}
}

// readTurn is a turn that another process of the fleet knew.
func (s *Server) readTurn(told *fleet.KeptTurn) (*keptTurn, error) {
	job, _, err := readJob(told.Forget, s.deps.Registry.Snapshot())
	if err == nil && len(job.calls) != 1 {
		err = errOwed
	}
	if err != nil {
		return nil, err
	}
	k := &keptTurn{params: told.Params, host: told.Host, holder: told.Holder, since: told.Since, forget: job}
	call := &job.calls[0]
	call.holder, job.slow = told.Holder, true // of two engines of one name this is it
	if call.target.IsZero() {                 // the prefill of that turn has gone
		if call.target.Instance = s.messenger(k); call.target.IsZero() {
			call.Leg.Path, call.How = "", "engine_timeout"
		}
	}
	return k, nil
}

// ForgetTurn has the holder of a turn free it, in the background: no exchange of the
// fleet will use it.
func (s *Server) ForgetTurn(told *fleet.KeptTurn) error {
	k, err := s.readTurn(told)
	if err == nil {
		s.forgetTurn(k, 0)
	}
	return err
}
