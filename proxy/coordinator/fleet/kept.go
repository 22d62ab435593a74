package fleet

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/coordinator/turns"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

// RetainedKV is KV that a decode engine retains after a turn, so that prefill can pull it for the
// next turn. It is used once: decode frees the KV after a pull, or when a call makes decode free
// it.
type RetainedKV struct {
	Holder engine.Target // the decode engine
	Since  time.Time     // start of the holder's state; the holder has not restarted while this is unchanged
	Host   string        // the host where prefill looks for it
	Params []byte        // parameters for the pull by prefill
	// Forget is the encoded call that makes decode free the KV. ServerOptions.OnForget or
	// the process that takes the turn sends it.
	Forget []byte
}

// Found is the result of TakeKV.
type Found uint8

// The results.
const (
	NothingRetained        Found = iota // nothing is retained
	KVTaken                             // the caller has it
	KVFreed                             // the conversation of that name begins in another way; its KV is freed
	HolderUnknown                       // the engine that holds it is unknown here; the coordinator frees the KV if it can
	CoordinatorUnreachable              // the coordinator did not answer
)

// A worker gets a stored turn by two calls: the first call shows the turn, the second
// call takes it. Between the two calls no other worker gets the turn. If a message is
// lost, at least one side knows that the KV must be freed. Both sides may free the KV,
// which does no harm. No side frees or pulls the KV while another side may pull it.

// PutKV stores a turn at the coordinator, for the worker that gets the next turn. d is the
// decision of the coordinator; its policy is "" if the coordinator did not tell it.
// False: the turn was not stored, and the caller must free it.
func (c *Client) PutKV(o conversation.OnShelf[*RetainedKV], now time.Time) (d turns.Decision, ok bool) {
	s := c.session.Load()
	if s == nil || s.suspect() {
		return d, false
	}
	m := c.scratch.Get().(*scratch)
	defer c.release(m)
	number := s.last.Add(1)
	store, ok := storeTurn(number, &o, now, c.o.Mirror)
	if !ok {
		return d, false
	}
	m.out = fleetpb.Append(m.out[:0], store)
	if shown, err := s.hand(context.Background(), fleetpb.Kind_KIND_TURN_STORE, m); err != nil || !shown {
		s.unhand(number, m)
		return d, false
	}
	m.out = turnNumber(m.out[:0], number)
	// Without an answer, the coordinator has the turn, or frees it when the connection has ended.
	if s.call(context.Background(), fleetpb.Kind_KIND_TURN_STORED, m) == nil {
		d = readTurnStored(m.in)
	}
	return d, true
}

// NamesKV reports whether KV is retained for a conversation of that name. late: it has been freed.
func (c *Client) NamesKV(ctx context.Context, scope, name string) (retained, late bool) {
	s := c.session.Load()
	if s == nil || s.suspect() {
		return false, false
	}
	m := c.scratch.Get().(*scratch)
	defer c.release(m)
	m.out = fleetpb.Append(m.out[:0], &fleetpb.TurnName{Scope: scope, Name: name})
	if s.call(ctx, fleetpb.Kind_KIND_TURN_NAMED, m) != nil {
		return false, false
	}
	var named fleetpb.TurnNamed
	if err := decode(m.in, &named, "result of a turn"); err != nil {
		s.link.Close(err)
		return false, false
	}
	return named.Ok, named.Late
}

// TakeKV takes the retained KV of the longest beginning of ids, and returns the time since the end of
// its turn. If there is none, KV that is retained for name is freed, unless name is "". With
// CoordinatorUnreachable, k may be a turn that the caller must not pull, but must free.
func (c *Client) TakeKV(ctx context.Context, scope, name string, ids []uint32) (k *RetainedKV, gap time.Duration, found Found) {
	return c.claimKV(ctx, &fleetpb.TurnClaim{Scope: scope, Name: name, Ids: ids})
}

// RecallKV takes the retained KV of a turn whose end the client did not get. The caller must free k, with
// each result.
func (c *Client) RecallKV(ctx context.Context, scope string, ids []uint32) (k *RetainedKV, found Found) {
	k, _, found = c.claimKV(ctx, &fleetpb.TurnClaim{Scope: scope, Ids: ids, Recalled: true})
	return k, found
}

// claimKV gives the claim a number, and carries it out.
func (c *Client) claimKV(ctx context.Context, claim *fleetpb.TurnClaim) (k *RetainedKV, gap time.Duration, found Found) {
	s := c.session.Load()
	if s == nil || s.suspect() {
		return nil, 0, CoordinatorUnreachable
	}
	m := c.scratch.Get().(*scratch)
	defer c.release(m)
	number := s.last.Add(1)
	claim.Number = number
	m.out = fleetpb.Append(m.out[:0], claim)
	if err := s.call(ctx, fleetpb.Kind_KIND_TURN_CLAIM, m); err != nil {
		s.unhand(number, m)
		return nil, 0, CoordinatorUnreachable
	}
	k, gap, found, err := readTaken(m.in, c.o.Mirror)
	switch {
	case err != nil:
		s.link.Close(err)
		return nil, 0, CoordinatorUnreachable
	case found == KVTaken && c.session.Load() != s: // another coordinator may use its numbers for other instances
		return nil, 0, CoordinatorUnreachable
	case found == HolderUnknown:
		s.unhand(number, m)
		return nil, 0, HolderUnknown
	case found != KVTaken:
		return nil, 0, found
	}
	m.out = turnNumber(m.out[:0], number)
	switch mine, err := s.hand(ctx, fleetpb.Kind_KIND_TURN_CLAIMED, m); {
	case err != nil: // The coordinator may have freed the KV, so the caller must not use it.
		return k, 0, CoordinatorUnreachable
	case !mine:
		return nil, 0, CoordinatorUnreachable
	}
	return k, gap, KVTaken
}

// keptScratch is the largest buffer that is kept for the next call.
const keptScratch = 64 << 10

// release returns the memory of a call to the pool. A long prompt may have made it large.
func (c *Client) release(m *scratch) {
	if cap(m.out) > keptScratch {
		m.out = nil
	}
	if cap(m.in) > keptScratch {
		m.in = nil
	}
	c.scratch.Put(m)
}

// call sends m.out to the coordinator and reads the answer into m.in.
func (s *session) call(ctx context.Context, kind fleetpb.Kind, m *scratch) (err error) {
	m.in, err = s.link.Call(ctx, kindOf(kind), m.out, m.in[:0], s.client.o.Patience)
	if errors.Is(err, link.ErrLate) {
		s.doubt()
	}
	return err
}

// hand is a call that is answered by yes or no.
func (s *session) hand(ctx context.Context, kind fleetpb.Kind, m *scratch) (yes bool, err error) {
	if err := s.call(ctx, kind, m); err != nil {
		return false, err
	}
	var result fleetpb.Result
	if err := decode(m.in, &result, "result of a turn"); err != nil {
		s.link.Close(err)
		return false, err
	}
	return result.Ok, nil
}

func turnNumber(dst []byte, number uint64) []byte {
	return fleetpb.Append(dst, &fleetpb.TurnNumber{Number: number})
}

// unhand informs the coordinator that this worker does not take a turn that the coordinator showed.
// If the message is lost, the end of the connection has the same effect.
func (s *session) unhand(number uint64, m *scratch) {
	m.out = turnNumber(m.out[:0], number)
	s.link.Send(kindOf(fleetpb.Kind_KIND_TURN_CANCEL), m.out, false)
}

// passingTurns are the turns that are shown and not yet taken. Both maps may be nil.
type passingTurns struct {
	kept  map[uint64]conversation.OnShelf[*fleetpb.RetainedKV] // turns from the worker, by its number
	taken map[uint64]*fleetpb.RetainedKV                       // turns to the worker, by its number
}

// maxTurnRecords bounds the records of a call about a turn.
const maxTurnRecords = 16

// turnCall answers a worker's call about turns.
func (w *worker) turnCall(number uint32, kind fleetpb.Kind, payload []byte) error {
	var (
		name  fleetpb.TurnName
		one   fleetpb.TurnNumber
		store fleetpb.TurnStore
		claim fleetpb.TurnClaim
	)
	in := map[fleetpb.Kind]proto.Message{
		fleetpb.Kind_KIND_TURN_NAMED: &name, fleetpb.Kind_KIND_TURN_STORE: &store, fleetpb.Kind_KIND_TURN_CLAIM: &claim,
		fleetpb.Kind_KIND_TURN_STORED: &one, fleetpb.Kind_KIND_TURN_CLAIMED: &one,
	}[kind]
	if fleetpb.Unmarshal(payload, in, maxTurnRecords) != nil {
		return link.Garbage("a call about a turn")
	}
	ok := false
	switch kind {
	case fleetpb.Kind_KIND_TURN_NAMED:
		retained, late := w.s.turns.Named(name.Scope, name.Name, time.Now())
		return w.conn.Answer(number, fleetpb.Append(nil, &fleetpb.TurnNamed{Ok: retained, Late: late}))
	case fleetpb.Kind_KIND_TURN_STORE:
		ok = w.keep(&store)
	case fleetpb.Kind_KIND_TURN_STORED:
		return w.conn.Answer(number, fleetpb.Append(nil, w.kept(one.Number)))
	case fleetpb.Kind_KIND_TURN_CLAIMED:
		_, ok = w.passed(one.Number)
	case fleetpb.Kind_KIND_TURN_CLAIM:
		return w.conn.Answer(number, fleetpb.Append(nil, w.take(&claim)))
	}
	return w.conn.Answer(number, fleetpb.Append(nil, &fleetpb.Result{Ok: ok}))
}

// keep holds a turn until its worker confirms. False: the coordinator refuses it.
func (w *worker) keep(m *fleetpb.TurnStore) bool {
	if m.Kv == nil || getKV(m.Kv, w.s.own()).Holder.IsZero() {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.s.o.OnForget == nil || w.leases == nil {
		return false
	}
	if w.passing.kept == nil {
		w.passing.kept = make(map[uint64]conversation.OnShelf[*fleetpb.RetainedKV])
	}
	w.passing.kept[m.Number] = readTurnStore(m, time.Now())
	return true
}

// kept stores a turn where the next turn finds it.
func (w *worker) kept(number uint64) *fleetpb.TurnStored {
	w.mu.Lock()
	o, ok := w.passing.kept[number]
	delete(w.passing.kept, number)
	w.mu.Unlock()
	if !ok {
		return &fleetpb.TurnStored{}
	}
	return turnStored(w.s.turns.Put(o, time.Now()))
}

// take answers a worker that requests a turn.
func (w *worker) take(m *fleetpb.TurnClaim) *fleetpb.TurnFound {
	if m.Recalled {
		kv, taken := w.s.turns.Recall(m.Scope, m.Ids, time.Now())
		return w.shown(m.Number, kv, taken, 0)
	}
	kv, gap, taken, freed := w.s.turns.Take(m.Scope, m.Name, m.Ids, time.Now())
	if freed {
		return &fleetpb.TurnFound{Found: uint32(KVFreed)}
	}
	return w.shown(m.Number, kv, taken, gap)
}

// shown returns the answer to a worker that claims a turn, which the coordinator has taken for it.
func (w *worker) shown(number uint64, kv *fleetpb.RetainedKV, taken bool, gap time.Duration) *fleetpb.TurnFound {
	switch {
	case taken && w.show(number, kv):
		return &fleetpb.TurnFound{Found: uint32(KVTaken), Kv: kv, GapUs: microsOf(gap)}
	case taken:
		w.s.forgetTurn(kv)
	}
	return &fleetpb.TurnFound{Found: uint32(NothingRetained)}
}

// show notes that a turn was shown to the worker; false: the worker has disconnected.
func (w *worker) show(number uint64, kv *fleetpb.RetainedKV) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.leases == nil {
		return false
	}
	if w.passing.taken == nil {
		w.passing.taken = make(map[uint64]*fleetpb.RetainedKV)
	}
	w.passing.taken[number] = kv
	return true
}

// passed removes a turn from those that were shown to the worker.
func (w *worker) passed(number uint64) (kv *fleetpb.RetainedKV, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	kv, ok = w.passing.taken[number]
	delete(w.passing.taken, number)
	return kv, ok
}

// cancelTurn ends the passing of a turn. The coordinator frees a turn that it showed. A turn
// that the worker showed stays with the worker.
func (w *worker) cancelTurn(payload []byte) error {
	var m fleetpb.TurnNumber
	if err := decode(payload, &m, "a message about a turn"); err != nil {
		return err
	}
	if kv, ok := w.passed(m.Number); ok {
		w.s.forgetTurn(kv)
	}
	w.mu.Lock()
	delete(w.passing.kept, m.Number)
	w.mu.Unlock()
	return nil
}

// forget frees the turns that the worker was shown and had not taken when the connection
// ended.
func (p passingTurns) forget(s *Server) {
	for _, o := range p.kept {
		s.forgetTurn(o.Value)
	}
	for _, kv := range p.taken {
		s.forgetTurn(kv)
	}
}

// forgetTurn frees a turn that no worker will take. If the turn's decode engine has left,
// there is nothing to free.
func (s *Server) forgetTurn(kv *fleetpb.RetainedKV) {
	if k := getKV(kv, s.own()); !k.Holder.IsZero() && s.o.OnForget != nil {
		s.o.OnForget(k)
	}
}
