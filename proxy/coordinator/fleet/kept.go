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
	// MostTurns and MostTurnIDs bound what is known of KV that decode engines keep
	// for the turns to come: 32 MB of token ids, which is more than such engines hold.
	MostTurns   = 16 << 10
	MostTurnIDs = 8 << 20
)

// KeptTurn is KV that a decode engine keeps of a turn, for prefill to pull at the
// next one. It is used once: what is pulled, or forgotten, decode frees.
type KeptTurn struct {
	Holder engine.Target // the decode engine
	Since  time.Time     // of the holder's state: it has not restarted as long as that stands
	Host   string        // where prefill would look for it
	Params []byte        // by which prefill pulls it
	// Forget has the holder free it: a text that means something to whoever gets the
	// turn from ServerOptions.OnForget, or takes it.
	Forget []byte
}

// Found is what became of the question for a turn.
type Found uint8

// What may be found.
const (
	NothingKept   Found = iota // or not any more
	TurnTaken                  // it is the asker's
	TurnForgotten              // what was kept by that name is another beginning, and is freed
	TurnLost                   // whoever keeps it is not known here; it is freed if it can be
	TurnAway                   // the coordinator did not answer
)

// A turn changes hands by two calls: the first one shows it, the second one takes
// it. Between them nobody else gets it, and whatever is lost on the way, one of the
// two knows that it is to be freed; it may be that both do, which does no harm. What
// must not be is that one frees it, or pulls it, while another may pull it.

// KeepTurn has the coordinator keep a turn for whichever worker the next one comes
// to. False: it does not, and the turn is the caller's to free.
func (c *Client) KeepTurn(o conversation.OnShelf[*KeptTurn], now time.Time) bool {
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
	// Whatever comes of this, the coordinator has it, or frees it when the connection
	// has ended.
	_, _ = s.hand(context.Background(), kindKept, m)
	return true
}

// NamesTurn reports whether anything is kept of a conversation of that name.
func (c *Client) NamesTurn(ctx context.Context, scope, name string) bool {
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

// TakeTurn takes what is kept of the tokens that ids begin with. Where that is
// nothing, what is kept by name, unless that is "", is freed. With TurnAway k may
// be a turn that is not to be pulled, but is the caller's to free.
func (c *Client) TakeTurn(ctx context.Context, scope, name string, ids []uint32) (k *KeptTurn, found Found) {
	s := c.session.Load()
	if s == nil || s.suspect() {
		return nil, TurnAway
	}
	m := c.scratch.Get().(*scratch)
	defer c.release(m)
	number := s.last.Add(1)
	m.out = appendIDs(wire.AppendText(wire.AppendText(wire.AppendUint(m.out[:0], number), scope), name), ids)
	if err := s.call(ctx, kindTake, m); err != nil {
		s.unhand(number, m)
		return nil, TurnAway
	}
	k, found, err := readTaken(m.in, c.o.Mirror)
	switch {
	case err != nil:
		s.link.Close(err)
		return nil, TurnAway
	case found == TurnTaken && c.session.Load() != s: // its numbers may be another's by now
		return nil, TurnAway
	case found == TurnLost:
		s.unhand(number, m)
		return nil, TurnLost
	case found != TurnTaken:
		return nil, found
	}
	m.out = wire.AppendUint(m.out[:0], number)
	switch mine, err := s.hand(ctx, kindTook, m); {
	case err != nil: // nobody can tell whose it is: it is not used
		return k, TurnAway
	case !mine:
		return nil, TurnAway
	}
	return k, TurnTaken
}

// keptScratch is how large the memory of a call may be that is kept for the next.
const keptScratch = 64 << 10

// release gives the memory of a call back, which may have been a long prompt's.
func (c *Client) release(m *scratch) {
	if cap(m.out) > keptScratch {
		m.out = nil
	}
	if cap(m.in) > keptScratch {
		m.in = nil
	}
	c.scratch.Put(m)
}

// call asks the coordinator what m.out says; its answer is m.in.
func (s *session) call(ctx context.Context, kind uint8, m *scratch) (err error) {
	m.in, err = s.link.Call(ctx, kind, m.out, m.in[:0], s.client.o.Patience)
	if errors.Is(err, link.ErrLate) {
		s.doubt()
	}
	return err
}

// hand is a call whose answer is yes or no.
func (s *session) hand(ctx context.Context, kind uint8, m *scratch) (yes bool, err error) {
	if err := s.call(ctx, kind, m); err != nil {
		return false, err
	}
	if len(m.in) != 1 || m.in[0] > 1 {
		err := link.Garbage("what became of a turn")
		s.link.Close(err)
		return false, err
	}
	return m.in[0] == 1, nil
}

// unhand tells the coordinator that a turn that was shown is not taken. It need not
// hear of it: what is between the two when the connection ends it frees.
func (s *session) unhand(number uint64, m *scratch) {
	m.out = wire.AppendUint(m.out[:0], number)
	s.link.Send(kindUntake, m.out, false)
}

// passingTurns are those between a worker and the coordinator. Either may be nil.
type passingTurns struct {
	kept  map[uint64]conversation.OnShelf[[]byte] // by the worker's number; it has not let go of them
	taken map[uint64][]byte                       // it has not said that it has them
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

// keep holds a turn until its worker lets go of it; false: the coordinator does not
// want it.
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

// kept puts a turn where the next one finds it. What it takes the place of is freed.
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

// take answers what there is for a worker to take.
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
				return []byte{byte(NothingKept)}
			}
			return append([]byte{byte(TurnTaken)}, value...)
		}
	}
	if name == "" {
		return []byte{byte(NothingKept)}
	}
	value, ok := w.s.turns.TakeNamed(scope, name, now)
	if !ok {
		return []byte{byte(NothingKept)}
	}
	w.s.forgetTurn(value)
	return []byte{byte(TurnForgotten)}
}

// show notes that a turn is on its way to the worker; false: that has gone.
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

// passed takes back a turn that was on its way to the worker.
func (w *worker) passed(number uint64) (value []byte, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	value, ok = w.passing.taken[number]
	delete(w.passing.taken, number)
	return value, ok
}

// untake ends the passing of a turn. One on its way to the worker is freed; one on
// its way from it is the worker's.
func (w *worker) untake(r *reader) {
	number := r.Uint()
	if value, ok := w.passed(number); ok {
		w.s.forgetTurn(value)
	}
	w.mu.Lock()
	delete(w.passing.kept, number)
	w.mu.Unlock()
}

// forget frees what was passed when the connection ended.
func (p passingTurns) forget(s *Server) {
	for _, o := range p.kept {
		s.forgetTurn(o.Value)
	}
	for _, value := range p.taken {
		s.forgetTurn(value)
	}
}

// forgetTurn has a turn freed that nobody will take. Where its holder has gone there
// is nothing to free.
func (s *Server) forgetTurn(value []byte) {
	if k, err := readKept(bytes.Clone(value), s.own()); err == nil && !k.Holder.IsZero() && s.o.OnForget != nil {
		s.o.OnForget(k)
	}
}

// forgetTurns has all freed that is kept.
func (s *Server) forgetTurns() {
	for _, value := range s.turns.TakeAll(time.Now()) {
		s.forgetTurn(value)
	}
}
