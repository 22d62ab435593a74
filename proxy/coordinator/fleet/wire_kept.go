package fleet

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/coordinator/turns"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/gaps"
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
		ToolCall: o.Turn.ToolCall, Tools: o.Turn.Tools,
		Kv: &fleetpb.RetainedKV{Holder: holder, SinceMs: k.Since.UnixMilli(), Host: k.Host, Params: k.Params, Forget: k.Forget},
	}, true
}

// readTurnStore returns the turn of a message.
func readTurnStore(m *fleetpb.TurnStore, now time.Time) conversation.OnShelf[*fleetpb.RetainedKV] {
	return conversation.OnShelf[*fleetpb.RetainedKV]{
		Scope: m.Scope, Name: m.Name, Expires: now.Add(durationOf(m.ExpiresUs)), IDs: m.Ids, Value: m.Kv,
		Turn: gaps.Turn{Ending: gaps.Ending{ToolCall: m.ToolCall, Tools: m.Tools[:min(len(m.Tools), gaps.MaxNames)]}},
	}
}

// getKV returns the KV of a turn. Its holder is zero if the engine is unknown here.
func getKV(m *fleetpb.RetainedKV, n Numbers) *RetainedKV {
	k := &RetainedKV{Since: time.UnixMilli(m.SinceMs), Host: m.Host, Params: m.Params, Forget: m.Forget}
	k.Holder, _ = getTarget(m.Holder, n)
	return k
}

// turnStored returns the message about a decision.
func turnStored(d turns.Decision) *fleetpb.TurnStored {
	return &fleetpb.TurnStored{Ok: true, KeepUs: microsOf(d.Keep), Policy: d.Policy, Likelihood: uint32(d.Likelihood * abi.FullLikelihood)}
}

// readTurnStored reads the answer to KIND_TURN_STORED. An older coordinator tells no decision.
func readTurnStored(b []byte) turns.Decision {
	var m fleetpb.TurnStored
	if decode(b, &m, "decision about a turn") != nil {
		return turns.Decision{}
	}
	return turns.Decision{Keep: durationOf(m.KeepUs), Policy: m.Policy, Likelihood: float64(min(m.Likelihood, abi.FullLikelihood)) / abi.FullLikelihood}
}

// readTaken reads the answer to KIND_TURN_CLAIM.
func readTaken(b []byte, n Numbers) (k *RetainedKV, gap time.Duration, found Found, err error) {
	var m fleetpb.TurnFound
	if err := decode(b, &m, "stored KV of a turn"); err != nil {
		return nil, 0, CoordinatorUnreachable, err
	}
	switch {
	case m.Found > uint32(KVFreed):
		return nil, 0, NothingRetained, nil
	case Found(m.Found) != KVTaken:
		return nil, 0, Found(m.Found), nil
	case m.Kv == nil:
		return nil, 0, CoordinatorUnreachable, link.Garbage("stored KV of a turn")
	}
	if k = getKV(m.Kv, n); k.Holder == (engine.Target{}) {
		return nil, 0, HolderUnknown, nil
	}
	return k, durationOf(m.GapUs), KVTaken, nil
}
