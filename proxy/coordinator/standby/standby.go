// Package standby makes several coordinators act as one. The election decides which of
// them leads. The other coordinators are standbys with a copy of the leader's
// conversation homes. Workers find the leader by a Finder.
//
// The decisions behind this package are in docs/design/fleet.md.
package standby

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/election"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/coordinator/replica"
)

// again is the pause before the next dial to a leader whose connection has failed.
const again = 300 * time.Millisecond

// Election reports which coordinator leads: election.Election or election.Alone.
type Election interface {
	Standing() (s election.Standing, changed <-chan struct{})
	Resign()
	Run(ctx context.Context)
}

// Instances translates between the names of engines and this process's numbers for them.
type Instances interface {
	// Name returns the name of an instance; "": the instance has left.
	Name(number uint32) string
	// Number returns the number of the instance of that name; 0: there is none.
	Number(name string) uint32
}

// Dialer connects to an address of a fleet, host:port or unix:path; see
// access.Credentials.Dial.
type Dialer func(ctx context.Context, address string) (net.Conn, error)

// Options configures a Member. All fields except Token, ClaimSocket and Succeed are
// required.
type Options struct {
	Election  Election
	Server    *fleet.Server // created with ServerOptions.Standby
	Listeners []Listener    // listeners for workers and standbys; closed by Run
	Address   string        // of this coordinator in the election
	Copy      *replica.Copy // of the Server's table of conversations
	Instances Instances
	Token     []byte // see fleet.ServerOptions.Token
	Dial      Dialer // to the coordinator that leads
	Node      string
	Log       *slog.Logger
	// ClaimSocket is called when this coordinator begins to lead, so that workers connect
	// to it from then on. Nil: it is not needed.
	ClaimSocket func()
	// Succeed is called when there is no leader to follow. It is set if no election
	// appoints the leader: election.Alone.Succeed.
	Succeed func()
}

// Member is a coordinator's part in a group of coordinators: it leads or follows the
// leader.
type Member struct {
	o         Options
	listeners []*gatedListener
	leads     atomic.Bool
	using     sync.RWMutex // of the leader's table, by Leading
}

// New returns a member. Run starts it.
func New(o Options) *Member {
	m := &Member{o: o}
	for _, l := range o.Listeners {
		m.listeners = append(m.listeners, newGatedListener(l))
	}
	return m
}

// Ready reports whether this coordinator leads, or has all homes of the leader, so that a
// predecessor may end.
func (m *Member) Ready() bool { return m.leads.Load() || m.o.Copy.InStep() }

// Leads reports whether this coordinator leads.
func (m *Member) Leads() bool { return m.leads.Load() }

// Leading runs do while this coordinator leads; the coordinator follows no other before do
// has returned. False: it does not lead, and do was not called.
func (m *Member) Leading(do func()) bool {
	m.using.RLock()
	defer m.using.RUnlock()
	if !m.leads.Load() {
		return false
	}
	do()
	return true
}

// Run takes part in the election until ctx ends. It serves workers while this coordinator
// leads, and follows the leader otherwise. In the end it steps down in this order: it ends
// the workers' connections, lets the standbys fetch the last changes, and resigns from the
// election.
func (m *Member) Run(ctx context.Context) error {
	// The election and the server continue until this coordinator has stepped down.
	beyond, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	wg.Go(func() { m.o.Election.Run(beyond) })
	failed := make([]error, len(m.listeners))
	for i, d := range m.listeners {
		wg.Go(func() {
			if failed[i] = m.o.Server.Serve(beyond, d); failed[i] != nil {
				stop()
			}
		})
	}
	m.o.Copy.Follow(m.o.Instances.Name)
	if s, _ := m.o.Election.Standing(); m.o.Succeed != nil && s.Leader.Epoch == 0 {
		m.o.Succeed()
	}
	for ctx.Err() == nil {
		m.hold(ctx)
	}
	m.shut()
	m.stepDown()
	m.o.Election.Resign()
	end()
	wg.Wait()
	return errors.Join(failed...)
}

// hold leads or follows until the standing changes or ctx ends.
func (m *Member) hold(ctx context.Context) {
	s, changed := m.o.Election.Standing()
	ctx, cancel := context.WithCancel(ctx)
	var following sync.WaitGroup
	defer following.Wait()
	defer cancel()
	if s.Leads {
		m.lead(s.Leader.Epoch)
	} else {
		// A standby closes the connections of workers, which then look for the leader. But
		// if the leader has the same address, they would reach this socket again, so it
		// stays shut.
		if s.Leader.Epoch == 0 || s.Leader.Address == m.o.Address {
			m.shut()
		}
		m.stepDown()
		if s.Leader.Epoch != 0 {
			following.Go(func() { m.follow(ctx, s.Leader) })
		}
		if s.Leader.Epoch != 0 && s.Leader.Address != m.o.Address {
			m.open()
		}
	}
	select {
	case <-ctx.Done():
	case <-changed:
	}
}

func (m *Member) open() {
	for _, d := range m.listeners {
		d.open()
	}
}

func (m *Member) shut() {
	for _, d := range m.listeners {
		d.shut()
	}
}

// lead begins a term with an epoch, or continues the term with that epoch.
func (m *Member) lead(epoch uint64) {
	if !m.leads.Load() {
		m.o.Copy.Lead(m.o.Instances.Number)
		if m.o.ClaimSocket != nil {
			m.o.ClaimSocket()
		}
	}
	m.o.Server.Lead(epoch)
	m.leads.Store(true)
	m.open()
}

// stepDown ends the term, if there is one.
func (m *Member) stepDown() {
	if !m.leads.Load() {
		return
	}
	m.o.Server.StandBy()
	m.using.Lock() // waits for Leading
	m.leads.Store(false)
	m.using.Unlock()
	m.o.Copy.Follow(m.o.Instances.Name)
	m.o.Log.Info("this coordinator has stepped down")
}

// follow copies the leader's conversation homes until ctx ends.
func (m *Member) follow(ctx context.Context, leader election.Leader) {
	said := false
	for ctx.Err() == nil {
		err := fleet.Follow(ctx, fleet.FollowOptions{
			Dial:  func(ctx context.Context) (net.Conn, error) { return m.o.Dial(ctx, leader.Address) },
			Token: m.o.Token, Node: m.o.Node, Epoch: leader.Epoch, OnBudgets: m.o.Server.CopyBudgets,
		}, func(ctx context.Context, ask func(context.Context, []byte) ([]byte, error)) {
			said = false
			m.o.Copy.Run(ctx, ask, func(err error) { m.o.Log.Warn("this standby falls behind", "leader", leader.Address, "error", err) })
		})
		if ctx.Err() != nil {
			return
		}
		if !said {
			m.o.Log.Info("the standby lost its connection to the leader", "leader", leader.Address, "reason", err)
			said = true
		}
		if m.o.Succeed != nil {
			m.o.Succeed()
			return
		}
		pause(ctx, again)
	}
}

// Finder finds the leading coordinator, for a worker.
type Finder struct {
	election   *election.Election
	dial       Dialer
	near, same string
	dialled    atomic.Pointer[string]
}

// NewFinder returns a finder that follows e and connects by dial. near is the address of
// the coordinator on the same host, which the election calls same. The finder dials near
// while that coordinator leads or no leader is known. Both are "" if there is none.
func NewFinder(e *election.Election, dial Dialer, near, same string) *Finder {
	return &Finder{election: e, dial: dial, near: near, same: same}
}

var errNobody = errors.New("no leading coordinator is known")

// Dial connects to the leader, as far as it is known.
func (f *Finder) Dial(ctx context.Context) (net.Conn, error) {
	address := f.address()
	f.dialled.Store(&address)
	if address == "" {
		return nil, errNobody
	}
	return f.dial(ctx, address)
}

func (f *Finder) address() string {
	s, _ := f.election.Standing()
	if s.Leader.Address == "" || s.Leader.Address == f.same {
		return f.near
	}
	return s.Leader.Address
}

// Run follows the election until ctx ends. It calls redial when the leader's address
// differs from the last dialled address.
func (f *Finder) Run(ctx context.Context, redial func()) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { f.election.Run(ctx) })
	for {
		_, changed := f.election.Standing()
		if last := f.dialled.Load(); last != nil && *last != f.address() {
			redial()
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// pause waits, unless ctx ends before.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
