package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/access"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/coordinator/turns"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/lograte"
	"github.com/pdproxy/pdproxy/proxy/state/load"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// ServerOptions configures a Server. Local and Log are required. The functions must be
// safe for concurrent use and must not block; a nil function is not called.
type ServerOptions struct {
	Local *coordinator.Local
	Log   *slog.Logger
	// Gate admits connections. Nil: it admits those of Unix sockets.
	Gate *access.Gate
	// Token is the secret that workers must have; empty if only this user's processes can reach the
	// listener.
	Token []byte
	// Epoch is the epoch of the term. A worker that has seen a higher epoch refuses this
	// coordinator.
	Epoch uint64
	// Standby: the Server accepts no workers before Lead.
	Standby bool
	// Homes answers a standby that requests the homes of conversations. more: the standby
	// should request the next part. Nil: there are no standbys.
	Homes func(dst, question []byte) (answer []byte, more bool, err error)
	// OnWorker is called before a worker's first frame is read, and after its last one.
	OnWorker func(w WorkerRow, here bool)
	// OnReport receives the reports of a worker in order. report is valid until it
	// returns.
	OnReport func(worker int, report []byte)
	// OnOrphan receives the clean-ups that a worker had set by Lease.SetOrphanCleanup before it died,
	// for each placement whose answer had not begun.
	OnOrphan func(cleanup []byte)
	// Budgets are those of the tenants. Nil: workers count for themselves.
	Budgets *tenant.Ledger
	// OnForget receives turns that no worker will take, and must free their KV. Nil: no
	// turns are stored.
	OnForget func(*RetainedKV)
	// Retain is the policy that decides how long KV of turns is retained. Nil: until the lease of its
	// engine ends.
	Retain turns.Decide
	// Turns counts the turns. Nil: they are not counted.
	Turns turns.Observer
}

// Server is a coordinator for workers. It answers their Clients by a Local, holds their
// leases while their connections last, and publishes topics to them.
type Server struct {
	o       ServerOptions
	process uint64
	numbers atomic.Pointer[ownNumbers]
	asks    sync.Pool // of *heard
	others  *access.Queue
	turns   *turns.Keeper[*fleetpb.RetainedKV] // retained turns

	mu           sync.Mutex
	last         int // number of the last worker; guarded by mu
	workers      map[int]*worker
	disconnected map[*worker]bool // processes that may reconnect within reconnectGrace; guarded by mu
	term         *term            // nil while the server is a standby; guarded by mu
	topics       [topics][]byte   // the latest of each; guarded by mu
	large        [topics]bool     // the last value was too large; guarded by mu
	publication  publication
	links        lograte.Limiter[linkKey] // decides which connections are logged

	succession succession
}

// WorkerRow describes a worker to an operator.
type WorkerRow struct {
	Number int       `json:"number"` // of its connection; never reused
	Slot   int       `json:"slot"`
	Node   string    `json:"node"`
	PID    int       `json:"pid"`
	Since  time.Time `json:"since"`
	Leases int       `json:"leases"` // open ones
}

// NewServer returns a server. Serve starts it.
func NewServer(o ServerOptions) *Server {
	if o.Gate == nil {
		o.Gate = access.NewGate(access.GateOptions{Log: o.Log})
	}
	s := &Server{o: o, process: newProcess(), workers: make(map[int]*worker), disconnected: make(map[*worker]bool), others: access.NewQueue(), links: lograte.Limiter[linkKey]{Every: linkEvery}}
	s.turns = turns.New(turns.Options[*fleetpb.RetainedKV]{
		Decide: o.Retain, Free: s.forgetTurn, Observer: o.Turns,
		Counter: func(kv *fleetpb.RetainedKV) *load.Counter { return turns.CounterOf(getKV(kv, s.own()).Holder) },
	})
	s.asks.New = func() any { return new(heard) }
	s.publication.followers = make(map[*follower]bool)
	s.succession.ledger, s.succession.onSettled = o.Budgets, s.budgetsChanged
	if !o.Standby {
		s.Lead(o.Epoch)
	}
	return s
}

// Serve accepts workers from l until ctx ends, and closes l. It returns when all their
// leases are released and OnOrphan has been called for the dead ones. It may be called for
// several listeners.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	return access.Accept(ctx, l, s.o.Log, func(nc net.Conn) { s.serve(ctx, nc) })
}

// Others returns a listener of the HTTP connections that arrive at the listeners of Serve.
// Its Close does not close those.
func (s *Server) Others(address net.Addr) net.Listener { return s.others.Listener(address) }

// serve greets one peer and serves it until the connection ends.
func (s *Server) serve(ctx context.Context, nc net.Conn) {
	t := s.enter()
	if t == nil {
		nc.Close()
		return
	}
	done := sync.OnceFunc(t.workers.Done)
	defer done()
	working, end := within(ctx, t.working)
	defer end()
	v := s.o.Gate.Receive(working, nc)
	switch {
	case v == nil:
		return
	case v.HTTP:
		s.others.Offer(working, v)
		return
	}
	who, err := greetWorker(v.Conn, v.Begun, s.o.Token, t.epoch, s.process)
	if err != nil {
		v.Refuse(refusal(err), err)
		return
	}
	if !v.Admit() {
		return
	}
	nc = v.Conn
	if !who.standby {
		w, orphans := s.attend(working, nc, who)
		done() // a step-down does not wait for the clean-ups
		if len(orphans) > 0 {
			s.runOrphanCleanups(working, w, orphans, overNetwork(nc))
		}
		return
	}
	t.standbys.Add(1) // before done, because StandBy waits for workers first
	defer t.standbys.Done()
	done()
	shadowed, leave := within(ctx, t.shadowed)
	defer leave()
	s.inform(shadowed, t, nc, who)
}

// linkEvery is the time in which the log shows one connection of a process. A worker that breaks
// the protocol loses its connection at each frame, and connects again at once.
const linkEvery = 10 * time.Second

// linkKey identifies the process at the other end of a connection, for the log.
type linkKey struct {
	node    string
	slot    int
	standby bool
}

func (p peer) linkOf() linkKey { return linkKey{p.node, p.slot, p.standby} }

// attend serves a worker until its connection ends. It returns the clean-ups to run if the
// worker seems to have died.
func (s *Server) attend(ctx context.Context, nc net.Conn, who peer) (w *worker, orphans [][]byte) {
	w = &worker{s: s, peer: who, ctx: ctx, since: time.Now(), leases: make(map[uint64]lent)}
	w.conn = link.New(nc, w)
	s.join(w)
	if s.o.OnWorker != nil {
		s.o.OnWorker(w.row(), true)
	}
	logged := s.links.Allow(who.linkOf())
	if logged {
		s.o.Log.Info("worker connected", "worker", w.number, "slot", w.slot, "node", w.node, "pid", w.pid)
	}
	err := w.conn.Run(ctx)
	w.beside.Wait()
	orphans = w.end()
	died := errors.Is(err, link.ErrGone) && len(orphans) > 0
	s.mu.Lock()
	delete(s.workers, w.number)
	s.deafen(&w.hears)
	for _, o := range s.workers {
		died = died && o.process != w.process
	}
	if died {
		s.disconnected[w] = true
	}
	s.mu.Unlock()
	if s.o.OnWorker != nil {
		s.o.OnWorker(w.row(), false)
	}
	level := slog.LevelWarn
	if errors.Is(err, link.ErrLeft) || ctx.Err() != nil {
		level = slog.LevelInfo
	}
	if logged || time.Since(w.since) > linkEvery {
		s.o.Log.Log(ctx, level, "worker disconnected", "worker", w.number, "slot", w.slot, "node", w.node, "pid", w.pid, "reason", err)
	}
	if !died {
		return w, nil
	}
	return w, orphans
}

// join adds w to the workers. An older connection of the same process is one that it has
// given up, and is closed.
func (s *Server) join(w *worker) {
	s.mu.Lock()
	s.last++
	w.number = s.last
	var old []*worker
	for _, o := range s.workers {
		if o.process == w.process {
			old = append(old, o)
		}
	}
	s.workers[w.number] = w
	for o := range s.disconnected {
		if o.process == w.process {
			delete(s.disconnected, o)
		}
	}
	for topic, value := range s.topics {
		if value != nil {
			w.tell(Topic(topic), value)
		}
	}
	w.tellForms(s.o.Local.Demand())
	s.mu.Unlock()
	for _, o := range old {
		o.conn.Close(errReplaced)
		o.end()
	}
}

var errReplaced = errors.New("the worker has connected again")

// reconnectGrace is the time in which a worker whose connection broke may reconnect
// before it counts as dead. It is longer than the longest pause of a Client between two
// dials.
const reconnectGrace = 2 * time.Second

// overNetwork reports whether a connection can break while the processes at both ends run.
func overNetwork(nc net.Conn) bool { return nc.RemoteAddr().Network() == "tcp" }

// runOrphanCleanups calls OnOrphan for the clean-ups of a worker whose connection broke.
// It does not if the worker's process reconnects within reconnectGrace: such a process
// still runs, or has registered its clean-ups again before it died. ctx ends with the
// term. The end of ctx ends the wait without a call: the worker may be connected to
// another coordinator. A connection between processes of one host only breaks when a
// process dies, so the clean-ups run at once. A connection over a network may break while
// both processes live, so the engines' own time-outs free the blocks.
func (s *Server) runOrphanCleanups(ctx context.Context, w *worker, orphans [][]byte, network bool) {
	grace := time.NewTimer(reconnectGrace)
	defer grace.Stop()
	select {
	case <-grace.C:
	case <-ctx.Done():
	}
	s.mu.Lock()
	died := s.disconnected[w]
	delete(s.disconnected, w)
	s.mu.Unlock()
	if !died || network && ctx.Err() != nil {
		return
	}
	for _, cleanup := range orphans {
		if s.o.OnOrphan != nil {
			s.o.OnOrphan(cleanup)
		}
	}
}

// Publish sets the value of a topic and sends it to all workers, and to each worker that
// connects later. They keep the earlier value if this one is too large for a message.
func (s *Server) Publish(topic Topic, value []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	large := len(value) >= link.MaxFrame
	if large && !s.large[topic] {
		s.o.Log.Error("workers keep an old state of the fleet: the new one is too large for a message", "topic", topic, "bytes", len(value))
	}
	if s.large[topic] = large; large {
		return
	}
	s.topics[topic] = slices.Clone(value)
	for _, w := range s.workers {
		w.tell(topic, value)
	}
}

// Workers lists the connected workers by number.
func (s *Server) Workers() []WorkerRow {
	s.mu.Lock()
	rows := make([]WorkerRow, 0, len(s.workers))
	for _, w := range s.workers {
		rows = append(rows, w.row())
	}
	s.mu.Unlock()
	slices.SortFunc(rows, func(a, b WorkerRow) int { return a.Number - b.Number })
	return rows
}

// Ask sends a request to a worker's ClientOptions.Admin and returns the status, content
// type and content of the answer.
func (s *Server) Ask(ctx context.Context, worker int, method, path string, body []byte) (status int, contentType string, content []byte, err error) {
	s.mu.Lock()
	w := s.workers[worker]
	s.mu.Unlock()
	if w == nil {
		return 0, "", nil, fmt.Errorf("call worker %d: it is not connected", worker)
	}
	b, err := w.conn.Call(ctx, kindOf(fleetpb.Kind_KIND_ADMIN), fleetpb.Append(nil, &fleetpb.AdminRequest{Method: method, Path: path, Body: body}), nil, 0)
	if err != nil {
		return 0, "", nil, fmt.Errorf("call worker %d: %w", worker, err)
	}
	var m fleetpb.AdminAnswer
	if err := decode(b, &m, "an answer of the admin surface"); err != nil {
		w.conn.Close(err)
		return 0, "", nil, fmt.Errorf("call worker %d: %w", worker, err)
	}
	if m.Status < 200 || m.Status > 999 {
		return 0, "", nil, fmt.Errorf("call worker %d: it has another version and does not know the call", worker)
	}
	return int(m.Status), m.ContentType, m.Body, nil
}

// ownNumbers is the Numbers of the coordinator itself: the numbers are the instances' ids.
type ownNumbers struct {
	of   *engine.Snapshot
	byID map[uint32]*engine.Instance
}

// own returns the numbers of the present instances.
func (s *Server) own() *ownNumbers {
	now := s.o.Local.Snapshot()
	if n := s.numbers.Load(); n != nil && n.of == now {
		return n
	}
	n := &ownNumbers{of: now, byID: make(map[uint32]*engine.Instance, len(now.Instances))}
	for _, i := range now.Instances {
		n.byID[i.ID] = i
	}
	s.numbers.Store(n)
	return n
}

// Number implements Numbers.
func (*ownNumbers) Number(i *engine.Instance) (uint32, bool) { return i.ID, true }

// Instance implements Numbers.
func (n *ownNumbers) Instance(number uint32) *engine.Instance { return n.byID[number] }
