package fleet

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/coordinator/turns"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// freed counts the freed turns by their Forget text.
type freed struct {
	mu    sync.Mutex
	count map[string]int // guarded by mu
}

func (f *freed) forget(k *RetainedKV) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.count == nil {
		f.count = make(map[string]int)
	}
	f.count[string(k.Forget)]++
}

func (f *freed) of(forget string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count[forget]
}

// want fails the test unless exactly these turns were freed, once each.
func (f *freed) want(t *testing.T, forgets ...string) {
	t.Helper()
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, forget := range forgets {
		n += f.count[forget]
	}
	if n != len(forgets) || len(f.count) != n {
		t.Errorf("freed %v, want %q", f.count, forgets)
	}
}

// turnsBubble runs a test in simulated time, with a wired world that keeps turns.
func turnsBubble(t *testing.T, name string, test func(t *testing.T, w *wired, f *freed)) {
	t.Helper()
	f := new(freed)
	bubble(t, name, func(so *ServerOptions, _ *ClientOptions) { so.OnForget = f.forget }, func(t *testing.T, w *wired) { test(t, w, f) })
}

// another returns another worker's client.
func (w *wired) another(t *testing.T, change func(*ClientOptions)) *Client {
	t.Helper()
	c, _ := w.stoppable(t, change)
	return c
}

// stoppable is another, with a function that stops the worker.
func (w *wired) stoppable(t *testing.T, change func(*ClientOptions)) (*Client, context.CancelFunc) {
	t.Helper()
	mint, err := disaggid.New(1, 4)
	if err != nil {
		t.Fatal(err)
	}
	o := ClientOptions{
		Dial:     w.pipes.dial,
		Fallback: placetest.Uncounted{Local: coordinator.NewLocal(w.Reg, placetest.Stub{}, placetest.Builtin(t, "auto", "least_load"), coordinator.State{}, mint, w.Counts)},
		Mirror:   placetest.Same{Reg: w.Reg}, Log: placetest.Quiet(), Observer: w.Counts, Slot: 4, Node: "here",
	}
	if change != nil {
		change(&o)
	}
	c := NewClient(o)
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx) })
	t.Cleanup(func() {
		stop()
		running.Wait()
	})
	synctest.Wait()
	return c, stop
}

// turnOf returns a turn with these tokens. The engine d keeps the turn for a minute.
func (w *wired) turnOf(t testing.TB, name, forget string, ids ...uint32) conversation.OnShelf[*RetainedKV] {
	return conversation.OnShelf[*RetainedKV]{
		Scope: "m", Name: name, IDs: ids, Expires: time.Now().Add(time.Minute),
		Value: &RetainedKV{Holder: w.Target(t, "d", 0), Since: time.UnixMilli(77), Host: "h", Params: []byte(`{"p":1}`), Forget: []byte(forget)},
	}
}

// puts reports whether the coordinator stores a turn.
func puts(c *Client, o conversation.OnShelf[*RetainedKV]) bool {
	_, ok := c.PutKV(o, time.Now())
	return ok
}

func (w *wired) keeps(t *testing.T, c *Client, name, forget string, ids ...uint32) {
	t.Helper()
	if !puts(c, w.turnOf(t, name, forget, ids...)) {
		t.Fatalf("PutKV of turn %s = false", forget)
	}
}

// finds fails the test unless a question for a turn has the result want. forget is the
// text of the turn that the worker gets.
func (w *wired) finds(t *testing.T, c *Client, name string, ids []uint32, want Found, forget string) {
	t.Helper()
	k, _, found := c.TakeKV(t.Context(), "m", name, ids)
	if found != want || (k != nil) != (forget != "") || k != nil && string(k.Forget) != forget {
		t.Fatalf("found %d, want %d: %+v", found, want, k)
	}
}

// TestTurnsOfAFleet: a worker takes a turn that another worker has kept, once and
// complete.
func TestTurnsOfAFleet(t *testing.T) {
	turnsBubble(t, "taken", func(t *testing.T, w *wired, f *freed) {
		other := w.another(t, nil)
		w.keeps(t, w.client, "c", "1", 1, 2, 3)
		for key, want := range map[[2]string]bool{{"m", "c"}: true, {"n", "c"}: false, {"m", ""}: false} {
			if retained, late := other.NamesKV(t.Context(), key[0], key[1]); retained != want || late {
				t.Errorf("%q: retained %v, late %v", key, retained, late)
			}
		}
		w.finds(t, other, "", []uint32{1, 2, 4}, NothingRetained, "")
		k, _, found := other.TakeKV(t.Context(), "m", "c", []uint32{1, 2, 3, 4})
		if found != KVTaken || k.Holder != w.Target(t, "d", 0) || !k.Since.Equal(time.UnixMilli(77)) || k.Host != "h" || string(k.Params) != `{"p":1}` {
			t.Fatalf("found %d: %+v", found, k)
		}
		w.finds(t, w.client, "c", []uint32{1, 2, 3, 4}, NothingRetained, "")
		w.server.StandBy()
		f.want(t)
	})
	turnsBubble(t, "replaced", func(t *testing.T, w *wired, f *freed) {
		other := w.another(t, nil)
		w.keeps(t, w.client, "c", "1", 1, 2)
		w.keeps(t, other, "c", "2", 1, 2, 3)
		f.want(t, "1")
		w.finds(t, w.client, "c", []uint32{9}, KVFreed, "")
		f.want(t, "1", "2")
		w.finds(t, w.client, "c", []uint32{1, 2, 3}, NothingRetained, "")
		if puts(w.client, w.turnOf(t, "", "3", make([]uint32, link.MaxFrame/4)...)) {
			t.Error("a turn larger than a frame is kept")
		}
		f.want(t, "1", "2")
	})
	turnsBubble(t, "expired", func(t *testing.T, w *wired, f *freed) {
		w.keeps(t, w.client, "c", "1", 1, 2)
		later(time.Minute)
		w.finds(t, w.client, "c", []uint32{1, 2}, NothingRetained, "")
		f.want(t, "1")
	})
	turnsBubble(t, "by nobody", func(t *testing.T, w *wired, f *freed) {
		w.keeps(t, w.client, "c", "1", 1, 2)
		w.server.StandBy()
		f.want(t, "1")
		w.server.Lead(6)
		later(2 * time.Second)
		w.finds(t, w.client, "c", []uint32{1, 2}, NothingRetained, "")
	})
	bubble(t, "not at all", nil, func(t *testing.T, w *wired) {
		if puts(w.client, w.turnOf(t, "c", "1", 1)) {
			t.Error("a coordinator without OnForget keeps a turn")
		}
	})
}

// TestRecallOfAFleet: a worker takes back a turn whose end the client did not get. The turn is no gap.
func TestRecallOfAFleet(t *testing.T) {
	f := new(freed)
	var asked []abi.RetainFacts
	policy := func(f *abi.RetainFacts) (abi.RetainDecision, string, bool) {
		asked = append(asked, *f)
		return abi.RetainDecision{Millis: 5000, Likelihood: abi.FullLikelihood}, "test", true
	}
	bubble(t, "", func(so *ServerOptions, _ *ClientOptions) { so.OnForget, so.Retain = f.forget, policy }, func(t *testing.T, w *wired) {
		for range 2 {
			if !puts(w.client, w.turnOf(t, "c", "1", 1, 2, 3)) {
				t.Fatal("the turn is not kept")
			}
			if k, found := w.client.RecallKV(t.Context(), "m", []uint32{1, 2, 3}); found != KVTaken || string(k.Forget) != "1" {
				t.Errorf("recalled %+v, found %d", k, found)
			}
			if k, found := w.client.RecallKV(t.Context(), "m", []uint32{1, 2, 3}); found != NothingRetained || k != nil {
				t.Errorf("recalled %+v twice, found %d", k, found)
			}
		}
		if len(asked) != 2 || asked[1].All.Turns != 0 {
			t.Errorf("facts %+v", asked)
		}
		later(6 * time.Second)
		f.want(t)
	})
}

// TestRetainOfAFleet: the policy of the coordinator decides with the gaps of all workers. The worker
// that stores a turn gets the decision, and the worker that takes it gets the gap.
func TestRetainOfAFleet(t *testing.T) {
	f := new(freed)
	var asked []abi.RetainFacts
	policy := func(f *abi.RetainFacts) (abi.RetainDecision, string, bool) {
		asked = append(asked, *f)
		return abi.RetainDecision{Millis: 5000, Likelihood: abi.FullLikelihood / 5}, "test", true
	}
	bubble(t, "", func(so *ServerOptions, _ *ClientOptions) { so.OnForget, so.Retain = f.forget, policy }, func(t *testing.T, w *wired) {
		other := w.another(t, nil)
		turn := w.turnOf(t, "c", "1", 1, 2, 3)
		turn.Turn.Call([]byte("search"))
		want := turns.Decision{Keep: 5 * time.Second, Likelihood: 0.2, Policy: "test"}
		if d, ok := w.client.PutKV(turn, time.Now()); d != want || !ok {
			t.Errorf("decision %+v, %v", d, ok)
		}
		later(2 * time.Second)
		if _, gap, found := other.TakeKV(t.Context(), "m", "c", []uint32{1, 2, 3, 4}); found != KVTaken || gap != 2*time.Second {
			t.Errorf("found %d after %v", found, gap)
		}
		turn.Value.Forget = []byte("2")
		if _, ok := other.PutKV(turn, time.Now()); !ok || len(asked) != 2 {
			t.Fatal("the turn is not kept")
		}
		gaps := abi.Gaps{Turns: 1, Back: 1, P50: 2048, P75: 2048, P90: 2048, P95: 2048, P99: 2048}
		if got := asked[1]; !got.ToolCall || got.Tokens != 3 || got.Conversation != gaps || got.Tools != gaps || got.All != gaps {
			t.Errorf("facts %+v", got)
		}
		f.want(t)
		later(6 * time.Second)
		f.want(t, "2")
		if retained, late := w.client.NamesKV(t.Context(), "m", "c"); retained || !late {
			t.Errorf("retained %v, late %v", retained, late)
		}
	})
}

// TestTurnsOfTheGone: one of the two processes does not have the engine that holds the turn.
func TestTurnsOfTheGone(t *testing.T) {
	turnsBubble(t, "to the taker", func(t *testing.T, w *wired, f *freed) {
		blind := w.another(t, func(o *ClientOptions) { o.Mirror = numbersOf{} })
		w.keeps(t, w.client, "c", "1", 1, 2)
		w.finds(t, blind, "c", []uint32{1, 2}, HolderUnknown, "")
		later(link.Linger)
		f.want(t, "1")
		if puts(blind, w.turnOf(t, "c", "2", 1, 2)) {
			t.Error("a turn with an unknown decode target is kept")
		}
	})
	turnsBubble(t, "to the coordinator", func(t *testing.T, w *wired, f *freed) {
		d := w.Target(t, "d", 0)
		wrong := w.another(t, func(o *ClientOptions) { o.Mirror = numbersOf{d.Instance: 999} })
		if puts(wrong, w.turnOf(t, "c", "1", 1, 2)) {
			t.Error("a turn with a wrong decode target is kept")
		}
		w.server.StandBy()
		f.want(t)
	})
}

// TestTurnsWithoutCoordinator: without a coordinator no turn is kept, and no call waits.
func TestTurnsWithoutCoordinator(t *testing.T) {
	turnsBubble(t, "gone", func(t *testing.T, w *wired, f *freed) {
		w.keeps(t, w.client, "c", "1", 1, 2)
		w.pipes.fall(true)
		w.server.StandBy()
		later(time.Second)
		began := time.Now()
		if retained, late := w.client.NamesKV(t.Context(), "m", "c"); retained || late {
			t.Error("a turn is found without a known coordinator")
		}
		if puts(w.client, w.turnOf(t, "c", "2", 1, 2)) {
			t.Error("a turn is kept without a known coordinator")
		}
		w.finds(t, w.client, "c", []uint32{1, 2}, CoordinatorUnreachable, "")
		if time.Since(began) != 0 {
			t.Errorf("waited %v", time.Since(began))
		}
		f.want(t, "1")
	})
}

// TestLateTurns: after a late answer exactly one of the two processes has the turn and
// frees it. The next question does not wait again.
func TestLateTurns(t *testing.T) {
	held := func(t *testing.T, w *wired, test func()) {
		t.Helper()
		c := w.pipes.last()
		c.hold()
		began := time.Now()
		test()
		if took := time.Since(began); took > DefaultPatience+4*link.Linger {
			t.Errorf("waited %v", took)
		}
		c.let()
		later(2 * time.Second)
	}
	turnsBubble(t, "shown by the worker", func(t *testing.T, w *wired, f *freed) {
		held(t, w, func() {
			// The reader of the link may still deliver one answer.
			for n := uint32(0); puts(w.client, w.turnOf(t, "", fmt.Sprint(n), n)); n++ {
				if n > 2 {
					t.Fatal("the coordinator answered through a cut connection")
				}
			}
			if puts(w.client, w.turnOf(t, "", "after", 7, 7)) {
				t.Error("the suspect coordinator got another call")
			}
		})
		w.idleTurns(t)
		w.finds(t, w.client, "", []uint32{7, 7}, NothingRetained, "")
		if f.of("after") != 0 {
			t.Error("the coordinator freed a turn of the worker")
		}
	})
	turnsBubble(t, "shown to the worker", func(t *testing.T, w *wired, f *freed) {
		for n := range uint32(4) {
			w.keeps(t, w.client, "", fmt.Sprint(n), n+1)
		}
		took, late := 0, ""
		held(t, w, func() {
			for n := range uint32(4) {
				k, _, found := w.client.TakeKV(t.Context(), "m", "", []uint32{n + 1})
				switch {
				case found == KVTaken:
					took++
				case k != nil: // the caller must free the turn
					late = string(k.Forget)
				}
			}
		})
		if took > 1 {
			t.Errorf("%d turns were taken through a cut connection", took)
		}
		w.idleTurns(t)
		w.server.StandBy()
		synctest.Wait()
		for n := took; n < 4; n++ {
			if forget := fmt.Sprint(n); f.of(forget) != 1 && forget != late {
				t.Errorf("turn %s was freed %d times", forget, f.of(forget))
			}
		}
	})
	turnsBubble(t, "client leaves", func(t *testing.T, w *wired, f *freed) {
		w.keeps(t, w.client, "", "1", 1)
		ctx, leave := context.WithCancel(t.Context())
		leave()
		if k, _, found := w.client.TakeKV(ctx, "m", "", []uint32{1}); found != KVTaken && k == nil {
			later(time.Second)
			w.idleTurns(t)
			f.want(t, "1")
		}
	})
}

// idleTurns fails the test if a turn is in transit between a worker and the coordinator.
func (w *wired) idleTurns(t *testing.T) {
	t.Helper()
	w.server.mu.Lock()
	defer w.server.mu.Unlock()
	for _, o := range w.server.workers {
		o.mu.Lock()
		if n := len(o.passing.kept) + len(o.passing.taken); n != 0 {
			t.Errorf("%d turns are between worker and coordinator", n)
		}
		o.mu.Unlock()
	}
}

// TestTurnsOnTheWay: the connection is lost between the two calls that transfer a turn.
// The coordinator frees turns that it was receiving and turns that it was handing out.
func TestTurnsOnTheWay(t *testing.T) {
	for name, lose := range map[string]func(*wired){
		"cut":      func(w *wired) { w.pipes.last().cut() },
		"left":     func(w *wired) { w.client.Redial() },
		"replaced": func(w *wired) { w.server.workers[1].end() },
		"stopped":  func(w *wired) { w.server.StandBy() },
	} {
		turnsBubble(t, name, func(t *testing.T, w *wired, f *freed) {
			w.keeps(t, w.client, "", "taken", 1)
			w.keeps(t, w.client, "", "shown", 2)
			w.finds(t, w.client, "", []uint32{1}, KVTaken, "taken")
			s, m := w.client.session.Load(), &scratch{}
			o := w.turnOf(t, "", "kept", 3)
			store, _ := storeTurn(100, &o, time.Now(), w.client.o.Mirror)
			m.out = fleetpb.Append(nil, store)
			if yes, err := s.hand(t.Context(), fleetpb.Kind_KIND_TURN_STORE, m); !yes || err != nil {
				t.Fatal(yes, err)
			}
			m.out = fleetpb.Append(nil, &fleetpb.TurnClaim{Number: 101, Scope: "m", Ids: []uint32{2}})
			if err := s.call(t.Context(), fleetpb.Kind_KIND_TURN_CLAIM, m); err != nil {
				t.Fatal(err)
			}
			if _, _, found, err := readTaken(m.in, w.client.o.Mirror); found != KVTaken {
				t.Fatal(found, err)
			}
			f.want(t)
			lose(w)
			later(link.Linger)
			f.want(t, "shown", "kept")
			m.out = turnNumber(m.out[:0], 101)
			if mine, err := s.hand(t.Context(), fleetpb.Kind_KIND_TURN_CLAIMED, m); mine {
				t.Error("the worker got a turn that was freed", err)
			}
		})
	}
}

// TestTurnsHammer: workers keep and take turns over a real socket, and often lose their
// connections. Each turn is either taken once or freed once, never both.
func TestTurnsHammer(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode")
	f := new(freed)
	s := NewServer(ServerOptions{Local: w.Local, Log: placetest.Quiet(), OnForget: f.forget, Epoch: 1})
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var serving, running, all sync.WaitGroup
	serving.Go(func() {
		if err := s.Serve(ctx, l); err != nil {
			t.Error(err)
		}
	})
	var clients []*Client
	workers, leave := context.WithCancel(t.Context())
	for slot := range 4 {
		mint, err := disaggid.New(1, slot+4)
		if err != nil {
			t.Fatal(err)
		}
		c := NewClient(ClientOptions{
			Dial:     func(context.Context) (net.Conn, error) { return net.Dial("unix", path) },
			Fallback: placetest.Uncounted{Local: coordinator.NewLocal(w.Reg, placetest.Stub{}, placetest.Builtin(t, "auto", "least_load"), coordinator.State{}, mint, w.Counts)},
			Mirror:   placetest.Same{Reg: w.Reg}, Log: placetest.Quiet(), Observer: w.Counts, Slot: slot, Patience: time.Second,
		})
		clients = append(clients, c)
		running.Go(func() { c.Run(workers) })
	}
	const each, names = 400, 8
	var pulled, refused sync.Map // by forget
	var made, taken atomic.Int64
	wired := &wired{world: w}
	for g := range 8 {
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 2))
			for n := range each {
				c := clients[r.IntN(len(clients))]
				for r.IntN(8) > 0 && !c.Connected() {
					time.Sleep(100 * time.Microsecond) // a real socket needs real time
				}
				id := r.Uint32N(64)
				if r.IntN(2) == 0 {
					forget := fmt.Sprint(g, " ", n)
					made.Add(1)
					if !puts(c, wired.turnOf(t, fmt.Sprint(r.IntN(names)), forget, id)) {
						refused.Store(forget, true)
					}
				} else if k, _, found := c.TakeKV(t.Context(), "m", fmt.Sprint(r.IntN(names)), []uint32{id, 1}); found == KVTaken {
					taken.Add(1)
					if _, again := pulled.LoadOrStore(string(k.Forget), true); again {
						t.Errorf("turn %s was taken twice", k.Forget)
					}
				} else if k != nil {
					refused.Store(string(k.Forget), true)
				}
				if r.IntN(40) == 0 {
					c.Redial()
				}
			}
		})
	}
	all.Wait()
	leave()
	running.Wait()
	s.StandBy()
	cancel()
	serving.Wait()
	for g := range 8 {
		for n := range each {
			forget := fmt.Sprint(g, " ", n)
			_, wasPulled := pulled.Load(forget)
			_, own := refused.Load(forget)
			if free := own || f.of(forget) > 0; wasPulled && free {
				t.Errorf("turn %s is pulled, and freed", forget)
			}
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	gone := map[string]bool{}
	for forget := range f.count {
		gone[forget] = true
	}
	refused.Range(func(forget, _ any) bool { gone[forget.(string)] = true; return true })
	if left := made.Load() - taken.Load() - int64(len(gone)); left != 0 {
		t.Errorf("%d of %d turns were neither taken nor freed", left, made.Load())
	}
	if taken.Load() == 0 {
		t.Error("no turn was taken")
	}
}

// FuzzTurns: for any messages about turns, the coordinator frees each turn that it has
// in the end. An answer is read as it was written.
func FuzzTurns(f *testing.F) {
	w := newWorld(f, "p prefill", "d decode")
	numbers := placetest.Same{Reg: w.Reg}
	now := time.Now()
	o := (&wired{world: w}).turnOf(f, "c", "forget", 1, 2)
	store, _ := storeTurn(1, &o, now, numbers)
	keep := fleetpb.Append(nil, store)
	take := fleetpb.Append(nil, &fleetpb.TurnClaim{Number: 1, Scope: "m", Name: "c", Ids: []uint32{1, 2, 3}})
	one := turnNumber(nil, 1)
	named := fleetpb.Append(nil, &fleetpb.TurnName{Scope: "m", Name: "c"})
	const (
		kindStore, kindStored  = fleetpb.Kind_KIND_TURN_STORE, fleetpb.Kind_KIND_TURN_STORED
		kindClaim, kindClaimed = fleetpb.Kind_KIND_TURN_CLAIM, fleetpb.Kind_KIND_TURN_CLAIMED
		kindNamed, kindCancel  = fleetpb.Kind_KIND_TURN_NAMED, fleetpb.Kind_KIND_TURN_CANCEL
	)
	for _, seed := range []struct {
		first  fleetpb.Kind
		a      []byte
		second fleetpb.Kind
		b      []byte
	}{{kindStore, keep, kindStored, one}, {kindStore, keep, kindClaim, take}, {kindClaim, take, kindClaimed, one}, {kindStore, keep, kindCancel, one},
		{kindNamed, named, kindClaim, keep}, {kindStore, take, kindStore, keep[:len(keep)-1]}} {
		f.Add(uint8(seed.first), seed.a, uint8(seed.second), seed.b)
	}
	f.Fuzz(func(t *testing.T, first uint8, a []byte, second uint8, b []byte) {
		freed := new(freed)
		s := NewServer(ServerOptions{Local: w.Local, Log: placetest.Quiet(), OnForget: freed.forget})
		mine, theirs := net.Pipe()
		defer mine.Close()
		defer theirs.Close()
		one := &worker{s: s, ctx: t.Context(), leases: make(map[uint64]lent)}
		one.conn = link.New(theirs, one)
		for _, frame := range []struct {
			kind    uint8
			payload []byte
		}{{kindOf(kindStore), keep}, {first, a}, {second, b}} {
			var err error
			if frame.kind == kindOf(kindCancel) {
				err = one.Message(frame.kind, frame.payload)
			} else if frame.kind >= kindOf(kindNamed) && frame.kind <= kindOf(kindClaimed) {
				err = one.Call(1, frame.kind, frame.payload)
			}
			if err != nil && !errors.Is(err, link.ErrGarbage) {
				t.Fatal(err)
			}
		}
		one.end()
		s.turns.Clear(time.Now())
		if p := one.passing; len(p.kept)+len(p.taken) != 0 || !s.turns.Empty() {
			t.Fatalf("turns remain at the server: %+v", p)
		}
		for _, answer := range [][]byte{a, b} {
			k, _, found, err := readTaken(answer, numbers)
			if err != nil || found != KVTaken {
				continue
			}
			again := conversation.OnShelf[*RetainedKV]{Value: k, Expires: now}
			if m, ok := storeTurn(1, &again, now, numbers); !ok {
				t.Fatalf("%+v has no form", k)
			} else if back := getKV(readTurnStore(m, now).Value, numbers); back.Holder != k.Holder || !back.Since.Equal(k.Since) ||
				back.Host != k.Host || string(back.Params) != string(k.Params) || string(back.Forget) != string(k.Forget) {
				t.Fatalf("%+v reads as %+v: %v", k, back, err)
			}
		}
	})
}
