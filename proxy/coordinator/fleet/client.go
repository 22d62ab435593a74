// Package fleet is the protocol between worker processes and the coordinator, which
// places the requests of all workers. It has the coordinator's Server, a worker's Client,
// and Follow for a standby coordinator.
//
// The decisions behind this package are in docs/design/fleet.md.
package fleet

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// DefaultPatience is the time that a worker waits for a placement.
const DefaultPatience = 50 * time.Millisecond

// ClientOptions configures a Client. All fields except Token, OnTopic and Admin are
// required.
type ClientOptions struct {
	// Dial connects to the coordinator: by a Unix socket, or over TLS
	// (access.Credentials.Dial). Only Run calls it, until ctx ends.
	Dial func(ctx context.Context) (net.Conn, error)
	// Fallback places requests while no coordinator answers, with the engines of Mirror.
	// It also holds the load of this worker's requests on them.
	Fallback Substitute
	Mirror   Numbers
	// OnTopic receives the values that the coordinator publishes. OnTopic must be quick:
	// the client handles an answer that names a new instance only after OnTopic has
	// returned. value is valid until then. An error ends the connection, because later
	// messages refer to the published value.
	OnTopic func(topic Topic, value []byte) error
	// Admin answers the coordinator's requests to this worker's admin routes.
	Admin http.Handler
	Slot  int
	Node  string
	Token []byte // see ServerOptions.Token
	Log   *slog.Logger
	// Observer receives the fallbacks of placements that failed.
	Observer coordinator.Observer
	Patience time.Duration // 0: DefaultPatience
}

// Substitute is the part of a coordinator.Local that a Client uses.
type Substitute interface {
	coordinator.Coordinator
	CutFor(c *coordinator.Cut, model string, d coordinator.Demand)
	Adopt(lease *coordinator.Lease, a coordinator.Adoption)
	Lend(p *coordinator.Placement)
}

// Client is the Coordinator of a worker. It sends each PlacementRequest to a Server in another
// process, and uses Fallback while the Server does not answer. Safe for concurrent use.
type Client struct {
	o       ClientOptions
	self    peer                               // used by Run; least is the highest epoch that this worker has seen
	session atomic.Pointer[session]            // nil: not connected
	forms   atomic.Pointer[coordinator.Demand] // nil: no coordinator has sent it yet
	scratch sync.Pool                          // of *scratch

	redial chan struct{} // holds 1; another coordinator must be dialled

	budgets atomic.Pointer[Budgets] // nil: no tenant has budgets

	early atomic.Int64 // bytes of the clean-ups that were sent before PrefillDone

	mu    sync.Mutex
	open  *remoteLease // first of the list of leases that are not released; guarded by mu
	leave func()       // ends the dial or the connection; guarded by mu
}

var _ coordinator.Coordinator = (*Client)(nil)

// scratch is the memory of a call.
type scratch struct {
	out, in []byte
	place   fleetpb.Place
	placed  fleetpb.Placed
	update  fleetpb.LeaseUpdate
	cached  fleetpb.Computed
	names   names
}

// NewClient returns a client. Run connects it.
func NewClient(o ClientOptions) *Client {
	if o.Patience <= 0 {
		o.Patience = DefaultPatience
	}
	c := &Client{o: o, self: newPeer(o.Slot, o.Node), redial: make(chan struct{}, 1)}
	c.scratch.New = func() any { return &scratch{names: make(names)} }
	return c
}

// Run keeps the connection to the coordinator until ctx ends.
func (c *Client) Run(ctx context.Context) {
	const first, most = 10 * time.Millisecond, time.Second
	pause := first
	for said := false; ctx.Err() == nil; {
		began := time.Now()
		err := c.connect(ctx)
		if ctx.Err() != nil {
			return
		}
		var refused *dialError
		if !errors.As(err, &refused) || !said {
			c.o.Log.Warn("no coordinator answers: this worker places requests itself", "error", err)
		}
		said = errors.As(err, &refused)
		if time.Since(began) > most { // a short connection does not reset the pause
			pause = first
		}
		select {
		case <-ctx.Done():
		case <-c.redial:
			pause = first
			continue
		case <-time.After(pause):
		}
		pause = min(2*pause, most)
	}
}

// connect connects once and serves the connection until it ends.
func (c *Client) connect(ctx context.Context) error {
	select {
	case <-c.redial: // this dial fulfils the request of Redial
	default:
	}
	dialled, cancel := context.WithCancel(ctx)
	defer cancel()
	c.leaveBy(cancel)
	nc, epoch, process, err := dialCoordinator(dialled, c.o.Dial, c.o.Token, &c.self)
	if err != nil {
		return err
	}
	c.self.least = epoch
	return c.serve(ctx, nc, epoch, process)
}

// leaveBy sets the function that Redial calls to end the connection.
func (c *Client) leaveBy(leave func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leave = leave
}

func (c *Client) serve(ctx context.Context, nc net.Conn, epoch, process uint64) error {
	asks, end := context.WithCancel(ctx) // admin requests end with the connection that they came by
	defer end()
	s := &session{client: c, process: process, ctx: asks}
	s.link = link.New(nc, s)
	c.o.Log.Info("coordinator connected", "epoch", epoch)
	c.leaveBy(func() { s.link.Close(errRedial) })
	select {
	case <-c.redial: // Redial was called during the dial
		s.link.Close(errRedial)
	default:
	}
	err := s.link.Run(ctx)
	c.session.CompareAndSwap(s, nil)
	c.budgets.Load().leave(s)
	end()
	s.asked.Wait()
	return err
}

// enter sends every open lease to s's coordinator and then makes s the current session.
func (c *Client) enter(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for w := c.open; w != nil; w = w.next {
		w.move(s)
	}
	c.budgets.Load().enter(s)
	c.session.Store(s)
}

// Redial ends the connection or the present dial, so that Dial can find another
// coordinator at once. Fallback places requests in the meantime.
func (c *Client) Redial() {
	select {
	case c.redial <- struct{}{}:
	default:
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leave != nil {
		c.leave()
	}
}

var errRedial = errors.New("the worker connects to another coordinator")

// Connected reports whether a coordinator answers.
func (c *Client) Connected() bool {
	s := c.session.Load()
	return s != nil && !s.suspect()
}

// Report sends the coordinator a report; reports arrive in order. False: there is no
// coordinator.
func (c *Client) Report(b []byte) bool {
	s := c.session.Load()
	return s != nil && s.link.Send(kindOf(fleetpb.Kind_KIND_REPORT), b, false) == nil
}

// Ready implements Coordinator.
func (c *Client) Ready() bool { return c.o.Fallback.Ready() }

// Needs implements Coordinator.
func (c *Client) Needs() abi.Needs {
	if f := c.forms.Load(); f != nil {
		return f.Needs
	}
	return c.o.Fallback.Needs()
}

// Headers implements Coordinator.
func (c *Client) Headers() []string {
	if f := c.forms.Load(); f != nil {
		return f.Headers
	}
	return c.o.Fallback.Headers()
}

// Cut implements Coordinator.
func (c *Client) Cut(to *coordinator.Cut, model string) {
	if f := c.forms.Load(); f != nil {
		c.o.Fallback.CutFor(to, model, *f)
		return
	}
	c.o.Fallback.Cut(to, model)
}

// Computed implements Coordinator.
func (c *Client) Computed(p *coordinator.Placement, key *coordinator.Key, prompt, cached int64) {
	if p.Matched >= 0 && p.Lease != nil {
		p.Lease.Computed(p.CacheReport(key, prompt, cached))
	}
}

// granted is a placement and its lease in one allocation.
type granted struct {
	coordinator.Placement
	lease  coordinator.Lease
	remote remoteLease
}

// Place implements Coordinator. If the coordinator does not answer within the patience,
// Fallback places the request.
func (c *Client) Place(ctx context.Context, a *coordinator.PlacementRequest) (*coordinator.Placement, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	s := c.session.Load()
	if s == nil || s.suspect() {
		return c.placeHere(ctx, a, s)
	}
	m := c.scratch.Get().(*scratch)
	g, err := c.ask(ctx, s, a, m)
	c.scratch.Put(m)
	if errors.Is(err, errAway) {
		return c.placeHere(ctx, a, s)
	}
	if err != nil {
		return nil, err
	}
	return &g.Placement, nil
}

// ask requests a placement from the coordinator. errAway: the Fallback must place the
// request.
func (c *Client) ask(ctx context.Context, s *session, a *coordinator.PlacementRequest, m *scratch) (*granted, error) {
	if a.Lookup.Done && a.Lookup.Process != s.process {
		a.Lookup.Turn, a.Lookup.Process = unlooked(a.Lookup.Turn), s.process
	}
	lease := s.last.Add(1)
	var ok bool
	if m.out, ok = appendPlace(m.out[:0], &m.place, lease, a, c.o.Mirror); !ok {
		return nil, errAway
	}
	var err error
	m.in, err = s.link.Call(ctx, kindOf(fleetpb.Kind_KIND_PLACE), m.out, m.in[:0], c.o.Patience)
	if err != nil {
		switch {
		case ctx.Err() != nil:
			err = context.Cause(ctx)
		case errors.Is(err, link.ErrLate):
			s.doubt()
			err = errAway
		default:
			err = errAway
		}
		s.drop(lease, m)
		return nil, err
	}
	g := &granted{}
	c.o.Fallback.Lend(&g.Placement)
	looked := a.Lookup.Done
	var charge coordinator.Charge
	if err := readPlaced(m.in, &m.placed, a, g, &charge, c.o.Mirror, m.names); err != nil {
		g.Recycle()
		if errors.Is(err, link.ErrGarbage) {
			s.link.Close(err)
			return nil, errAway
		}
		if errors.Is(err, errAway) {
			s.drop(lease, m)
		}
		return nil, err
	}
	if a.Lookup.Done && !looked {
		a.Lookup.Process = s.process
	}
	if c.session.Load() != s { // another coordinator may use its numbers for other instances
		g.Recycle()
		return nil, errAway
	}
	g.Facts.Flow, g.Facts.Request = g.Flow, a.Request
	g.Lease = &g.lease
	g.lease.Attach(&g.remote)
	c.o.Fallback.Adopt(&g.lease, coordinator.Adoption{Prefill: g.Prefill, Decode: g.Decode, ID: g.ID, Charge: charge})
	c.keep(&g.remote, remoteLease{client: c, lease: &g.lease, prefill: g.Prefill, decode: g.Decode, id: g.ID, session: s, number: lease})
	return g, nil
}

// placeHere places a request by the Fallback and reports the lease to the coordinator.
func (c *Client) placeHere(ctx context.Context, a *coordinator.PlacementRequest, s *session) (*coordinator.Placement, error) {
	p, err := c.o.Fallback.Place(ctx, a)
	if err != nil {
		c.o.Observer.Fallback("place", coordinator.ReasonCoordinator)
		return nil, err
	}
	p.Fallbacks = append(p.Fallbacks, coordinator.Fallback{What: "place", Reason: coordinator.ReasonCoordinator})
	w := &remoteLease{}
	p.Lease.Attach(w)
	c.keep(w, remoteLease{client: c, lease: p.Lease, prefill: p.Prefill, decode: p.Decode, id: p.ID})
	return p, nil
}
