package discovery

import (
	"context"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/coordinator/election"
	"github.com/pdproxy/pdproxy/proxy/etcd"
)

// voter is one process's member in an election, with a separate wire.
type voter struct {
	*election.Election
	wire *testbed.Wire
	stop func() // as SIGTERM does; waits
}

// vote starts a coordinator that reaches etcd through a wire, or a worker,
// which has no address.
func (s *store) vote(t *testing.T, address string) *voter {
	t.Helper()
	w := testbed.NewWire(t, s.Addr)
	return newVoter(t, w, election.Options{Etcd: etcd.Client([]string{"http://" + w.Addr()}), Name: "f", Address: address})
}

// newVoter starts a member of an election whose store is behind the wire w.
func newVoter(t *testing.T, w *testbed.Wire, o election.Options) *voter {
	t.Helper()
	o.Node, o.TTL, o.Log = o.Address, 2*time.Second, slog.New(slog.DiscardHandler)
	v := &voter{wire: w, Election: election.New(o)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		v.Run(ctx)
	}()
	v.stop = func() {
		cancel()
		<-done
	}
	t.Cleanup(v.stop)
	return v
}

func (v *voter) standing() election.Standing {
	s, _ := v.Standing()
	return s
}

// leads waits until v leads by an epoch above one.
func (v *voter) leads(t *testing.T, above uint64) election.Leader {
	t.Helper()
	testbed.Eventually(t, "it leads", func() bool { s := v.standing(); return s.Leads && s.Leader.Epoch > above })
	return v.standing().Leader
}

// follows waits until all of them follow a leader that is another process.
func follows(t *testing.T, leader election.Leader, all ...*voter) {
	t.Helper()
	for _, v := range all {
		testbed.Eventually(t, "it follows", func() bool { return v.standing() == (election.Standing{Leader: leader}) })
	}
}

func TestElection(t *testing.T) {
	t.Run("the next coordinator leads when the leader leaves", func(t *testing.T) {
		t.Parallel()
		s := startStore(t)
		a, worker := s.vote(t, "a:1"), s.vote(t, "")
		first := a.leads(t, 0)
		b, c := s.vote(t, "b:1"), s.vote(t, "c:1")
		if first.Address != "a:1" {
			t.Errorf("the record is %+v", first)
		}
		follows(t, first, b, c, worker)
		a.Resign()
		testbed.Eventually(t, "another leads", func() bool { return b.standing().Leads || c.standing().Leads })
		if c.standing().Leads {
			b, c = c, b
		}
		second := b.leads(t, first.Epoch)
		follows(t, second, a, c, worker)
		b.stop()
		third := c.leads(t, second.Epoch)
		follows(t, third, a, worker)
	})
	t.Run("a coordinator that is cut off leads until it reads another's record", func(t *testing.T) {
		t.Parallel()
		s := startStore(t)
		a := s.vote(t, "a:1")
		first := a.leads(t, 0)
		b, worker, near := s.vote(t, "b:1"), s.vote(t, ""), s.vote(t, "")
		follows(t, first, b, worker, near)
		near.wire.Cut(true)
		a.wire.Cut(true)
		second := b.leads(t, first.Epoch)
		follows(t, second, worker)
		if s := a.standing(); !s.Leads || s.Leader != first {
			t.Errorf("the leader without a connection to etcd: got %+v, want it to lead", s)
		}
		follows(t, first, near)
		a.wire.Cut(false)
		near.wire.Cut(false)
		follows(t, second, a, near, worker)
		b.stop()
		third := a.leads(t, second.Epoch)
		follows(t, third, near, worker)
	})
	t.Run("etcd away", func(t *testing.T) {
		t.Parallel()
		s := startStore(t)
		a := s.vote(t, "a:1")
		first := a.leads(t, 0)
		b, worker := s.vote(t, "b:1"), s.vote(t, "")
		follows(t, first, b, worker)
		var changes []<-chan struct{}
		for _, v := range []*voter{a, b, worker} {
			_, changed := v.Standing()
			changes = append(changes, changed)
		}
		s.Kill()
		time.Sleep(away(5 * time.Second)) // more than twice the lease
		s.Start()
		time.Sleep(5 * time.Second) // a leader that lost its place no longer leads
		for n, changed := range changes {
			select {
			case <-changed:
				t.Errorf("%d's leader is another", n)
			default:
			}
		}
		a.stop()
		follows(t, b.leads(t, first.Epoch), worker)
	})
	t.Run("etcd loses its data", func(t *testing.T) {
		t.Parallel()
		s := startStore(t)
		a := s.vote(t, "a:1")
		first := a.leads(t, 0)
		b, worker := s.vote(t, "b:1"), s.vote(t, "")
		follows(t, first, b, worker)
		s.Kill()
		s.Empty()
		s.Start()
		testbed.Eventually(t, "one of them leads, and all know", func() bool {
			l := worker.standing().Leader
			record, err := s.Client().Get(t.Context(), "/pdproxy/fleets/f/leader")
			return err == nil && len(record.Kvs) == 1 && l.Epoch >= first.Epoch &&
				a.standing().Leader == l && b.standing().Leader == l && a.standing().Leads != b.standing().Leads
		})
	})
}

// away returns how long etcd is unavailable: briefly, or PDPROXY_ETCD_AWAY.
func away(briefly time.Duration) time.Duration {
	if d, err := time.ParseDuration(os.Getenv("PDPROXY_ETCD_AWAY")); err == nil {
		return d
	}
	return briefly
}
