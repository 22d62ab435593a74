package fleet

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

// storeTurn returns the message of a turn to store, under its number. False: the coordinator does
// not have the holder. The expiry is sent as a duration, because the clocks of two hosts differ.
func storeTurn(number uint64, o *conversation.OnShelf[*RetainedKV], now time.Time, n Numbers) (m *fleetpb.TurnStore, ok bool) {
	k := o.Value
	holder, ok := putTarget(k.Holder, n)
	if !ok || holder == 0 {
		return nil, false
	}
	return &fleetpb.TurnStore{
		Number: number, Scope: o.Scope, Name: o.Name, ExpiresUs: microsOf(o.Expires.Sub(now)), Ids: o.IDs,
		Kv: &fleetpb.RetainedKV{Holder: holder, SinceMs: k.Since.UnixMilli(), Host: k.Host, Params: k.Params, Forget: k.Forget},
	}, true
}

// readTurnStore returns the turn of a message.
func readTurnStore(m *fleetpb.TurnStore, now time.Time) conversation.OnShelf[*fleetpb.RetainedKV] {
	return conversation.OnShelf[*fleetpb.RetainedKV]{
		Scope: m.Scope, Name: m.Name, Expires: now.Add(durationOf(m.ExpiresUs)), IDs: m.Ids, Value: m.Kv,
	}
}

// getKV returns the KV of a turn. Its holder is zero if the engine is unknown here.
func getKV(m *fleetpb.RetainedKV, n Numbers) *RetainedKV {
	k := &RetainedKV{Since: time.UnixMilli(m.SinceMs), Host: m.Host, Params: m.Params, Forget: m.Forget}
	k.Holder, _ = getTarget(m.Holder, n)
	return k
}

// readTaken reads the answer to KIND_TURN_CLAIM.
func readTaken(b []byte, n Numbers) (k *RetainedKV, found Found, err error) {
	var m fleetpb.TurnFound
	if err := decode(b, &m, "stored KV of a turn"); err != nil {
		return nil, CoordinatorUnreachable, err
	}
	switch {
	case m.Found > uint32(KVFreed):
		return nil, NothingRetained, nil
	case Found(m.Found) != KVTaken:
		return nil, Found(m.Found), nil
	case m.Kv == nil:
		return nil, CoordinatorUnreachable, link.Garbage("stored KV of a turn")
	}
	if k = getKV(m.Kv, n); k.Holder == (engine.Target{}) {
		return nil, HolderUnknown, nil
	}
	return k, KVTaken, nil
}
