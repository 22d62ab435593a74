package fleet

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/coordinator/replica"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// leaders is several coordinators for the engines of one world, and a worker that dials
// one of them.
type leaders struct {
	*world
	ctx     context.Context
	running sync.WaitGroup
	dialled atomic.Pointer[leader] // the coordinator that the worker dials
	dials   atomic.Int64           // number of dials that began
}

// leader is one of the coordinators.
type leader struct {
	*coordinator.Local
	*Server
	path  string
	table *conversation.Table
}

func newLeaders(t *testing.T) *leaders {
	t.Helper()
	w := &leaders{world: newWorld(t, "p prefill", "d decode")}
	ctx, cancel := context.WithCancel(context.Background())
	w.ctx = ctx
	t.Cleanup(func() {
		cancel()
		w.running.Wait()
	})
	return w
}

func (w *leaders) name(n uint32) string {
	for _, i := range w.Reg.Snapshot().Instances {
		if i.ID == n {
			return i.Spec.Name
		}
	}
	return ""
}

func (w *leaders) coordinator(t *testing.T) *leader {
	t.Helper()
	c := &leader{path: filepath.Join(t.TempDir(), "s"), table: conversation.New(100)}
	mint, err := disaggid.New(1, 2)
	if err != nil {
		t.Fatal(err)
	}
	c.Local = coordinator.NewLocal(w.Reg, placetest.Stub{Wants: abi.NeedConversation}, placetest.Builtin(t, "auto", "least_load"), coordinator.State{Conversations: c.table}, mint, w.Counts)
	c.Server = NewServer(ServerOptions{Local: c.Local, Log: placetest.Quiet(), Standby: true, Homes: replica.NewSource(c.table, w.name).Answer})
	l, err := net.Listen("unix", c.path)
	if err != nil {
		t.Fatal(err)
	}
	w.running.Go(func() {
		if err := c.Serve(w.ctx, l); err != nil {
			t.Error(err)
		}
	})
	return c
}

// worker starts the worker.
func (w *leaders) worker(t *testing.T) *Client {
	t.Helper()
	w.use(w.newClient(t, "unix", ""))
	w.client.o.Dial = func(ctx context.Context) (net.Conn, error) {
		w.dials.Add(1)
		var d net.Dialer
		return d.DialContext(ctx, "unix", w.dialled.Load().path)
	}
	w.running.Go(func() { w.client.Run(w.ctx) })
	return w.client
}

// turn returns a request of a conversation.
func turn(id string) *coordinator.PlacementRequest {
	a := placetest.NewPlacementRequest()
	a.Key.Conversation = conversation.Query{ID: id}
	return a
}

// TestTerms: a worker places without a leader, then with one leader, then with another.
// Leases and homes pass from one leader to the next.
func TestTerms(t *testing.T) {
	w := newLeaders(t)
	first, second := w.coordinator(t), w.coordinator(t)
	w.dialled.Store(first)
	client := w.worker(t)

	early := w.Must(t, turn("early"))
	if len(early.Fallbacks) != 1 || early.Fallbacks[0] != (coordinator.Fallback{What: "place", Reason: coordinator.ReasonCoordinator}) {
		t.Fatalf("fallbacks of a placement without a leader = %v", early.Fallbacks)
	}
	first.Lead(5)
	w.connected(t)
	for first.Open() != 1 {
		placetest.Pause(t)
	}
	held := w.Must(t, turn("c"))
	if len(held.Fallbacks) != 0 || first.Open() != 2 {
		t.Fatalf("%v, %d leases", held.Fallbacks, first.Open())
	}
	first.Lead(5) // the same term continues
	if !client.Connected() || first.Open() != 2 {
		t.Error("the same term has begun anew")
	}

	shadow := replica.NewCopy(second.table)
	shadow.Follow(w.name)
	ended := make(chan error, 1)
	go func() {
		ended <- Follow(w.ctx, FollowOptions{Dial: client.o.Dial, Node: "b", Epoch: 5}, func(ctx context.Context, ask func(context.Context, []byte) ([]byte, error)) {
			shadow.Run(ctx, ask, func(err error) { t.Error(err) })
		})
	}()
	for !shadow.InStep() {
		placetest.Pause(t)
	}
	w.Must(t, turn("last")).Lease.Release()
	if rows := first.Workers(); len(rows) != 1 {
		t.Errorf("a standby is a worker: %+v", rows)
	}
	first.StandBy()
	if err := <-ended; !errors.Is(err, link.ErrLeft) {
		t.Errorf("error of the standby's connection = %v, want ErrLeft", err)
	}
	if n := first.Open(); n != 0 {
		t.Errorf("%d leases of one that does not lead", n)
	}
	shadow.Lead(func(name string) uint32 { return w.Reg.Snapshot().Instance(name).ID })
	for _, id := range []string{"c", "last"} {
		if got := second.table.Look(conversation.Query{Scope: kvindex.Seed("m", "", ""), ID: id}); got.Number != 2 || got.Decode.Instance != w.Target(t, "d", 0).ID {
			t.Errorf("the home of %s: %+v", id, got)
		}
	}

	w.dialled.Store(second)
	second.Lead(6)
	w.connected(t)
	for second.Open() != 2 {
		placetest.Pause(t)
	}
	p := w.Must(t, turn("c"))
	if p.Turn.Number != 2 || len(p.Fallbacks) != 0 {
		t.Errorf("turn %d of the conversation, %v", p.Turn.Number, p.Fallbacks)
	}
	for _, p := range []*coordinator.Placement{p, held, early} {
		p.Lease.Release()
	}
	w.Arrived()
	if second.Open() != 0 || first.Open() != 0 || client.o.Fallback.(placetest.Uncounted).Open() != 0 {
		t.Errorf("%d, %d and %d leases remain", first.Open(), second.Open(), client.o.Fallback.(placetest.Uncounted).Open())
	}
}

// TestSplit: two coordinators lead at once. A worker or a standby that has known the
// later leader does not return to the earlier one. The earlier leader holds nothing for
// that worker.
func TestSplit(t *testing.T) {
	w := newLeaders(t)
	old, late := w.coordinator(t), w.coordinator(t)
	old.Lead(5)
	late.Lead(6)
	w.dialled.Store(old)
	client := w.worker(t)
	w.connected(t)
	held := w.Must(t, placetest.NewPlacementRequest())
	w.dialled.Store(late)
	client.Redial()
	for late.Open() != 1 || old.Open() != 0 || len(old.Workers()) != 0 {
		placetest.Pause(t)
	}
	w.dialled.Store(old)
	client.Redial()
	for client.Connected() {
		placetest.Pause(t)
	}
	if _, err := w.Place(t.Context(), placetest.NewPlacementRequest()); err != nil { // the worker's fallback places the request
		t.Error(err)
	}
	err := Follow(t.Context(), FollowOptions{Dial: client.o.Dial, Epoch: 6}, func(context.Context, func(context.Context, []byte) ([]byte, error)) {
		t.Error("Follow accepted a leader of an earlier term")
	})
	if !errors.Is(err, errFenced) {
		t.Errorf("Follow of a leader with an earlier epoch: got %v, want %v", err, errFenced)
	}
	for seen := w.dials.Load(); w.dials.Load() < seen+3; { // at least two dials went to old and have ended
		if old.Open() != 0 || len(old.Workers()) != 0 {
			t.Fatal("the worker returned to the old coordinator")
		}
		placetest.Pause(t)
	}
	w.dialled.Store(late)
	w.connected(t)
	for late.Open() != 2 {
		placetest.Pause(t)
	}
	held.Lease.Release()
	w.Arrived()
	if late.Open() != 1 {
		t.Errorf("got %d leases", late.Open())
	}
}
