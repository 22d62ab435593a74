package fleet

import (
	"bytes"
	"context"
	"errors"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/wire"
)

const (
	// MostTurns and MostTurnIDs bound the retained turns that are known. 32 MB of token
	// ids are more than the engines hold.
	MostTurns   = 16 << 10
	MostTurnIDs = 8 << 20
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

// PutKV stores a turn at the coordinator, for the worker that gets the next turn.
// False: it was not stored, and the caller must free the turn.
func (c *Client) PutKV(o conversation.OnShelf[*RetainedKV], now time.Time) bool {
	s := c.session.Load()
	if s == nil || s.suspect() {
		return false
	}
	m := c.scratch.Get().(*scratch)
	defer c.release(m)
	number := s.last.Add(1)
	var ok bool
	if m.out, ok = appendKeep(m.out[:0], number, &o, now, c.o.Mirror); !ok {
		return false
	}
	if shown, err := s.hand(context.Background(), kindKeep, m); err != nil || !shown {
		s.unhand(number, m)
		return false
	}
	m.out = wire.AppendUint(m.out[:0], number)
	// The answer does not matter: the coordinator has the turn, or frees it when the
	// connection has ended.
	_, _ = s.hand(context.Background(), kindKept, m)
	return true
}

// NamesKV reports whether KV is retained for a conversation of that name.
func (c *Client) NamesKV(ctx context.Context, scope, name string) bool {
	s := c.session.Load()
	if s == nil || s.suspect() {
		return false
	}
	m := c.scratch.Get().(*scratch)
	defer c.release(m)
	m.out = wire.AppendText(wire.AppendText(m.out[:0], scope), name)
	named, err := s.hand(ctx, kindNamed, m)
	return err == nil && named
}

// TakeKV takes the retained KV of the longest beginning of ids. If there is none, KV
// that is retained for name is freed, unless name is "". With CoordinatorUnreachable, k may be a turn
// that the caller must not pull, but must free.
func (c *Client) TakeKV(ctx context.Context, scope, name string, ids []uint32) (k *RetainedKV, found Found) {
	s := c.session.Load()
	if s == nil || s.suspect() {
		return nil, CoordinatorUnreachable
	}
	m := c.scratch.Get().(*scratch)
	defer c.release(m)
	number := s.last.Add(1)
	m.out = appendIDs(wire.AppendText(wire.AppendText(wire.AppendUint(m.out[:0], number), scope), name), ids)
	if err := s.call(ctx, kindTake, m); err != nil {
		s.unhand(number, m)
		return nil, CoordinatorUnreachable
	}
	k, found, err := readTaken(m.in, c.o.Mirror)
	switch {
	case err != nil:
		s.link.Close(err)
		return nil, CoordinatorUnreachable
	case found == KVTaken && c.session.Load() != s: // another coordinator may use its numbers for other instances
		return nil, CoordinatorUnreachable
	case found == HolderUnknown:
		s.unhand(number, m)
		return nil, HolderUnknown
	case found != KVTaken:
		return nil, found
	}
	m.out = wire.AppendUint(m.out[:0], number)
	switch mine, err := s.hand(ctx, kindTook, m); {
	case err != nil: // The coordinator may have freed the KV, so the caller must not use it.
		return k, CoordinatorUnreachable
	case !mine:
		return nil, CoordinatorUnreachable
	}
	return k, KVTaken
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
func (s *session) call(ctx context.Context, kind uint8, m *scratch) (err error) {
	m.in, err = s.link.Call(ctx, kind, m.out, m.in[:0], s.client.o.Patience)
	if errors.Is(err, link.ErrLate) {
		s.doubt()
	}
	return err
}

// hand is a call that is answered by yes or no.
func (s *session) hand(ctx context.Context, kind uint8, m *scratch) (yes bool, err error) {
	if err := s.call(ctx, kind, m); err != nil {
		return false, err
	}
	if len(m.in) != 1 || m.in[0] > 1 {
		err := link.Garbage("result of a turn")
		s.link.Close(err)
		return false, err
	}
	return m.in[0] == 1, nil
}

// unhand informs the coordinator that this worker does not take a turn that the coordinator showed.
// If the message is lost, the end of the connection has the same effect.
func (s *session) unhand(number uint64, m *scratch) {
	m.out = wire.AppendUint(m.out[:0], number)
	s.link.Send(kindUntake, m.out, false)
}

// passingTurns are the turns that are shown and not yet taken. Both maps may be nil.
type passingTurns struct {
	kept  map[uint64]conversation.OnShelf[[]byte] // turns from the worker, by its number
	taken map[uint64][]byte                       // turns to the worker, by its number
}

// turnCall answers a worker's call about turns.
func (w *worker) turnCall(number uint32, kind uint8, payload []byte) error {
	r := newReader(payload)
	yes := false
	switch kind {
	case kindNamed:
		scope, name := string(r.Text()), string(r.Text())
		yes = !r.Failed() && w.s.turns.Named(scope, name)
	case kindKeep:
		yes = w.keep(&r)
	case kindKept:
		yes = w.kept(r.Uint())
	case kindTook:
		_, yes = w.passed(r.Uint())
	case kindTake:
		out := w.take(&r)
		if !r.Done() {
			return link.Garbage("a call about a turn")
		}
		return w.conn.Answer(number, out)
	}
	if !r.Done() {
		return link.Garbage("a call about a turn")
	}
	if yes {
		return w.conn.Answer(number, []byte{1})
	}
	return w.conn.Answer(number, []byte{0})
}

// keep holds a turn until its worker confirms. False: the coordinator refuses it.
func (w *worker) keep(r *reader) bool {
	number, o := readKeep(r, time.Now())
	if r.Failed() {
		return false
	}
	k, err := readKept(o.Value, w.s.own())
	if err != nil {
		r.Fail()
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.s.o.OnForget == nil || k.Holder.IsZero() || w.leases == nil {
		return false
	}
	if w.passing.kept == nil {
		w.passing.kept = make(map[uint64]conversation.OnShelf[[]byte])
	}
	w.passing.kept[number] = o
	return true
}

// kept stores a turn where the next turn finds it, and frees the turns that it replaces.
func (w *worker) kept(number uint64) bool {
	w.mu.Lock()
	o, ok := w.passing.kept[number]
	delete(w.passing.kept, number)
	w.mu.Unlock()
	if ok {
		for _, old := range w.s.turns.Put(o, time.Now()) {
			w.s.forgetTurn(old)
		}
	}
	return ok
}

// take answers a worker that requests a turn.
func (w *worker) take(r *reader) (answer []byte) {
	number, scope, name := r.Uint(), string(r.Text()), string(r.Text())
	w.ids = r.ids(w.ids[:0])
	ids := w.ids
	if cap(w.ids) > keptScratch/4 {
		w.ids = nil
	}
	if !r.Done() {
		return nil
	}
	now := time.Now()
	if len(ids) > 0 {
		if value, ok := w.s.turns.Take(scope, ids, now); ok {
			if !w.show(number, value) {
				w.s.forgetTurn(value)
				return []byte{byte(NothingRetained)}
			}
			return append([]byte{byte(KVTaken)}, value...)
		}
	}
	if name == "" {
		return []byte{byte(NothingRetained)}
	}
	value, ok := w.s.turns.TakeNamed(scope, name, now)
	if !ok {
		return []byte{byte(NothingRetained)}
	}
	w.s.forgetTurn(value)
	return []byte{byte(KVFreed)}
}

// show notes that a turn was shown to the worker; false: the worker has disconnected.
func (w *worker) show(number uint64, value []byte) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.leases == nil {
		return false
	}
	if w.passing.taken == nil {
		w.passing.taken = make(map[uint64][]byte)
	}
	w.passing.taken[number] = value
	return true
}

// passed removes a turn from those that were shown to the worker.
func (w *worker) passed(number uint64) (value []byte, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	value, ok = w.passing.taken[number]
	delete(w.passing.taken, number)
	return value, ok
}

// untake ends the passing of a turn. The coordinator frees a turn that it showed. A turn
// that the worker showed stays with the worker.
func (w *worker) untake(r *reader) {
	number := r.Uint()
	if value, ok := w.passed(number); ok {
		w.s.forgetTurn(value)
	}
	w.mu.Lock()
	delete(w.passing.kept, number)
	w.mu.Unlock()
}

// forget frees the turns that the worker was shown and had not taken when the connection
// ended.
func (p passingTurns) forget(s *Server) {
	for _, o := range p.kept {
		s.forgetTurn(o.Value)
	}
	for _, value := range p.taken {
		s.forgetTurn(value)
	}
}

// forgetTurn frees a turn that no worker will take. If the turn's decode engine has left,
// there is nothing to free.
func (s *Server) forgetTurn(value []byte) {
	if k, err := readKept(bytes.Clone(value), s.own()); err == nil && !k.Holder.IsZero() && s.o.OnForget != nil {
		s.o.OnForget(k)
	}
}

// forgetTurns frees all stored turns.
func (s *Server) forgetTurns() {
	for _, value := range s.turns.TakeAll(time.Now()) {
		s.forgetTurn(value)
	}
}
