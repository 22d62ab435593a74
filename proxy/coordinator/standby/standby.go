// Package standby makes several coordinators one: each leads or stands by, as the
// election has it, with the conversation homes of the one that leads, and workers
// find that one.
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

// again is the time until a leader that could not be followed is dialled once more.
const again = 300 * time.Millisecond

// Election is who leads: election.Election or election.Alone.
type Election interface {
	Standing() (s election.Standing, changed <-chan struct{})
	Resign()
	Run(ctx context.Context)
}

// Instances are the engines as this process numbers them.
type Instances interface {
	// Name is the name of an instance, "" for one that is gone.
	Name(number uint32) string
	// Number is that of the instance that has a name, 0 if none has.
	Number(name string) uint32
}

// Dialer connects to an address of a fleet, host:port or unix:path:
// access.Credentials.Dial.
type Dialer func(ctx context.Context, address string) (net.Conn, error)

// Options is what an Office stands on. All but Token, Appear and Succeed are needed.
type Options struct {
	Election  Election
	Server    *fleet.Server // created with ServerOptions.Standby
	Listeners []Listener    // where workers and standbys come; closed by Run
	Address   string        // of this coordinator in the election
	Copy      *replica.Copy // of the Server's table of conversations
	Instances Instances
	Token     []byte // see fleet.ServerOptions.Token
	Dial      Dialer // to the coordinator that leads
	Node      string
	Log       *slog.Logger
	// Appear is called when this coordinator begins to lead: workers that come from
	// now on are its own. Nil: nothing is to be done for that.
	Appear func()
	// Succeed is called when there is no leader to follow, or none any more. It is for
	// coordinators that no election calls: election.Alone.Succeed.
	Succeed func()
}

// Office is a coordinator's part in who leads.
type Office struct {
	o     Options
	doors []*door
	leads atomic.Bool
	using sync.RWMutex // of the leader's table, by Leading
}

// New returns an office; it starts nothing.
func New(o Options) *Office {
	office := &Office{o: o}
	for _, l := range o.Listeners {
		office.doors = append(office.doors, newDoor(l))
	}
	return office
}

// Ready reports whether this coordinator leads, or would at once know all that the
// one that leads does: a predecessor may go.
func (o *Office) Ready() bool { return o.leads.Load() || o.o.Copy.InStep() }

// Leads reports whether this coordinator leads.
func (o *Office) Leads() bool { return o.leads.Load() }

// Leading runs do while this coordinator leads: it does not follow another one before
// do has returned. False: it does not lead, and do has not been run.
func (o *Office) Leading(do func()) bool {
	o.using.RLock()
	defer o.using.RUnlock()
	if !o.leads.Load() {
		return false
	}
	do()
	return true
}

// Run stands for election, serves workers while this coordinator leads and follows
// the one that leads while not, until ctx ends. Then it steps down in order: first
// the workers are left, then the standbys get what they do not know, then the
// election calls the next.
func (o *Office) Run(ctx context.Context) error {
	// These go on until it has stepped down.
	beyond, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	wg.Go(func() { o.o.Election.Run(beyond) })
	failed := make([]error, len(o.doors))
	for i, d := range o.doors {
		wg.Go(func() {
			if failed[i] = o.o.Server.Serve(beyond, d); failed[i] != nil {
				stop()
			}
		})
	}
	o.o.Copy.Follow(o.o.Instances.Name)
	if s, _ := o.o.Election.Standing(); o.o.Succeed != nil && s.Leader.Epoch == 0 {
		o.o.Succeed()
	}
	for ctx.Err() == nil {
		o.hold(ctx)
	}
	o.shut()
	o.stepDown()
	o.o.Election.Resign()
	end()
	wg.Wait()
	return errors.Join(failed...)
}

// hold does what the standing asks for, until it changes or ctx ends.
func (o *Office) hold(ctx context.Context) {
	s, changed := o.o.Election.Standing()
	ctx, cancel := context.WithCancel(ctx)
	var following sync.WaitGroup
	defer following.Wait()
	defer cancel()
	if s.Leads {
		o.takeUp(s.Leader.Epoch)
	} else {
		// Who comes to a standby is told so by the end of the connection; but where
		// the one that leads is at the same address they come to the same socket.
		if s.Leader.Epoch == 0 || s.Leader.Address == o.o.Address {
			o.shut()
		}
		o.stepDown()
		if s.Leader.Epoch != 0 {
			following.Go(func() { o.follow(ctx, s.Leader) })
		}
		if s.Leader.Epoch != 0 && s.Leader.Address != o.o.Address {
			o.open()
		}
	}
	select {
	case <-ctx.Done():
	case <-changed:
	}
}

func (o *Office) open() {
	for _, d := range o.doors {
		d.open()
	}
}

func (o *Office) shut() {
	for _, d := range o.doors {
		d.shut()
	}
}

// takeUp begins to lead, or goes on, by an epoch.
func (o *Office) takeUp(epoch uint64) {
	if !o.leads.Load() {
		o.o.Copy.Lead(o.o.Instances.Number)
		if o.o.Appear != nil {
			o.o.Appear()
		}
	}
	o.o.Server.Lead(epoch)
	o.leads.Store(true)
	o.open()
}

// stepDown ends leading.
func (o *Office) stepDown() {
	if !o.leads.Load() {
		return
	}
	o.o.Server.StandBy()
	o.using.Lock() // what has begun as the leader's ends before
	o.leads.Store(false)
	o.using.Unlock()
	o.o.Copy.Follow(o.o.Instances.Name)
	o.o.Log.Info("this coordinator has stepped down")
}

// follow has the leader's conversation homes until ctx ends.
func (o *Office) follow(ctx context.Context, leader election.Leader) {
	said := false
	for ctx.Err() == nil {
		err := fleet.Follow(ctx, fleet.FollowOptions{
			Dial:  func(ctx context.Context) (net.Conn, error) { return o.o.Dial(ctx, leader.Address) },
			Token: o.o.Token, Node: o.o.Node, Epoch: leader.Epoch,
		}, func(ctx context.Context, ask func(context.Context, []byte) ([]byte, error)) {
			said = false
			o.o.Copy.Run(ctx, ask, func(err error) { o.o.Log.Warn("this standby falls behind", "leader", leader.Address, "error", err) })
		})
		if ctx.Err() != nil {
			return
		}
		if !said {
			o.o.Log.Info("the leader is not followed any more", "leader", leader.Address, "reason", err)
			said = true
		}
		if o.o.Succeed != nil {
			o.o.Succeed()
			return
		}
		pause(ctx, again)
	}
}

// Finder finds the coordinator that leads, for a worker.
type Finder struct {
	election   *election.Election
	dial       Dialer
	near, same string
	dialled    atomic.Pointer[string]
}

// NewFinder returns a finder by an election that this process only follows; dial
// connects to the coordinator that it finds. near is
// where the coordinator of the same host is dialled, which the election calls same:
// while that leads and while nobody is known to. Both are "" where there is none.
func NewFinder(e *election.Election, dial Dialer, near, same string) *Finder {
	return &Finder{election: e, dial: dial, near: near, same: same}
}

var errNobody = errors.New("no coordinator is known to lead")

// Dial connects to the one that leads, as far as it is known.
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

// Run follows the election until ctx ends. redial is called when the one that
// leads is at another address than the one dialled last.
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
