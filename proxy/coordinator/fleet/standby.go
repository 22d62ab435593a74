package fleet

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// FollowOptions configures Follow. All fields except Token are required.
type FollowOptions struct {
	// Dial connects to the leader; see ClientOptions.Dial.
	Dial  func(ctx context.Context) (net.Conn, error)
	Token []byte // see ServerOptions.Token
	Node  string
	// Epoch is the epoch of the leader. A coordinator of a lower one is not followed.
	Epoch uint64
	// OnBudgets receives the budgets of the leader: Server.CopyBudgets. It must be quick. An
	// error ends the connection.
	OnBudgets func(payload []byte) error
}

// homesLimit is the time in which the leader must answer a standby.
const homesLimit = 5 * time.Second

// Follow connects a standby to the leader and calls run. run may request homes of
// conversations until its ctx ends. The end of the connection also ends this ctx. The
// error is the reason why the connection ended or was not made.
func Follow(ctx context.Context, o FollowOptions, run func(ctx context.Context, ask func(ctx context.Context, question []byte) ([]byte, error))) error {
	self := newPeer(0, o.Node)
	self.standby, self.least = true, o.Epoch
	nc, _, _, err := dialCoordinator(ctx, o.Dial, o.Token, &self)
	if err != nil {
		return err
	}
	f := &following{onBudgets: o.OnBudgets}
	c := link.New(nc, f)
	f.conn = c
	ctx, cancel := context.WithCancel(ctx)
	var runs sync.WaitGroup
	runs.Go(func() {
		defer cancel()
		run(ctx, func(ctx context.Context, question []byte) ([]byte, error) {
			return c.Call(ctx, kindOf(fleetpb.Kind_KIND_HOMES), question, nil, homesLimit)
		})
	})
	err = c.Run(ctx)
	cancel()
	runs.Wait()
	return err
}

// following is the Handler of a standby.
type following struct {
	conn      *link.Conn
	onBudgets func(payload []byte) error
}

// Message implements link.Handler. It ignores the kinds of later versions.
func (f *following) Message(kind uint8, payload []byte) error {
	if fleetpb.Kind(kind) != fleetpb.Kind_KIND_BUDGETS {
		return nil
	}
	return f.onBudgets(payload)
}

// Call implements link.Handler. A call of a later version gets an empty answer.
func (f *following) Call(number uint32, _ uint8, _ []byte) error { return f.conn.Answer(number, nil) }

// follower is the leader's side of a standby's connection.
type follower struct {
	s     *Server
	term  *term
	conn  *link.Conn
	hears bool // the states of budgets; guarded by Server.mu
}

// inform serves a standby until its connection ends.
func (s *Server) inform(ctx context.Context, t *term, nc net.Conn, who peer) {
	f := &follower{s: s, term: t}
	f.conn = link.New(nc, f)
	begin, logged := time.Now(), s.links.Allow(who.linkOf())
	if logged {
		s.o.Log.Info("standby connected", "node", who.node, "pid", who.pid)
	}
	if s.o.Budgets != nil {
		s.attach(f)
		defer s.detach(f)
	}
	err := f.conn.Run(ctx)
	if logged || time.Since(begin) > linkEvery {
		s.o.Log.Info("standby disconnected", "node", who.node, "pid", who.pid, "reason", err)
	}
}

// Message implements link.Handler: this version has no messages of standbys.
func (f *follower) Message(uint8, []byte) error { return nil }

// Call implements link.Handler. A call of a later version gets an empty answer.
func (f *follower) Call(number uint32, kind uint8, payload []byte) error {
	if fleetpb.Kind(kind) != fleetpb.Kind_KIND_HOMES || f.s.o.Homes == nil {
		return f.conn.Answer(number, nil)
	}
	last := f.term.frozen.Load()
	answer, more, err := f.s.o.Homes(nil, payload)
	if err != nil {
		return link.Garbage("a standby's question")
	}
	if err := f.conn.Answer(number, answer); err != nil {
		return err
	}
	if last && !more { // the standby has all data
		f.conn.Close(errStoodDown)
	}
	return nil
}
