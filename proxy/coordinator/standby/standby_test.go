package standby

import (
	"context"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/election"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// place places a turn by a worker. by reports whether the coordinator placed it.
func place(t *testing.T, c *fleet.Client, id string) (p *coordinator.Placement, by bool) {
	t.Helper()
	p, err := c.Place(t.Context(), turn(id))
	if err != nil {
		t.Fatal(err)
	}
	alone := coordinator.Fallback{What: "place", Reason: coordinator.ReasonCoordinator}
	return p, !slices.Contains(p.Fallbacks, alone)
}

// worker starts a worker that reaches its coordinators by dial. The worker has the instance numbers
// of the leading host.
func worker(t *testing.T, numbers *own, dial func(context.Context) (net.Conn, error)) *fleet.Client {
	t.Helper()
	c := fleet.NewClient(fleet.ClientOptions{
		Dial: dial, Fallback: numbers.here.Local, Mirror: numbers, Log: quiet, Observer: deaf{}, Patience: time.Hour,
	})
	start(t, c.Run)
	return c
}

func names(p *coordinator.Placement) string { return p.Prefill.Name() + " " + p.Decode.Name() }

// TestTakeOver is a planned fail-over without etcd. A second process has the same
// socket. It leads when it has the state of the first process and the first process
// ends. Then it has the leases and homes.
func TestTakeOver(t *testing.T) {
	dir := privatedirtest.Open(t)
	alone := func(l net.Listener) *election.Alone {
		return election.NewAlone(election.Options{Address: "unix:" + l.Addr().String(), Node: "a", Log: quiet}, dir)
	}
	l := listen(t)
	firstElection := alone(l)
	first := newCandidate(t, newHost(t, "p0", "p1", "d0", "d1"), l, firstElection, firstElection.Succeed)
	eventually(t, "the first leads", first.Leads)

	numbers := newOwn(newHost(t, "d1", "d0", "p0", "p1"), first.host)
	w := worker(t, numbers, func(ctx context.Context) (net.Conn, error) { return dial(ctx, first.address) })
	eventually(t, "the worker is connected", w.Connected)
	held, by := place(t, w, "held")
	home := map[string]string{"held": names(held)}
	for n := range 9 {
		id := fmt.Sprint("c", n)
		p, by := place(t, w, id)
		if home[id] = names(p); !by {
			t.Fatal("the worker has placed by itself")
		}
		p.Lease.Release()
	}
	if !by {
		t.Fatal("the worker has placed by itself")
	}

	shared := sameSocket(t, l)
	secondElection := alone(l)
	second := newCandidate(t, newHost(t, "d0", "d1", "p1", "p0"), shared, secondElection, secondElection.Succeed)
	eventually(t, "the second is in step", second.Ready)
	if second.Leads() || !first.Leads() || !w.Connected() {
		t.Fatal("the second leads before its time")
	}
	numbers.there.Store(second.host) // the worker gets these numbers by TopicMembership
	first.stop()
	eventually(t, "the second leads and has the lease", func() bool { return second.Leads() && w.Connected() && second.Open() == 1 })
	if n := first.Open(); n != 0 {
		t.Errorf("%d leases remain at the first coordinator", n)
	}
	for id, want := range home {
		p, by := place(t, w, id)
		if !by || names(p) != want || p.Turn.Number != 2 {
			t.Errorf("%s: turn %d on %s, placed by the coordinator: %v; home before: %s", id, p.Turn.Number, names(p), by, want)
		}
		p.Lease.Release()
	}
	held.Lease.Release()
	eventually(t, "nothing is left", func() bool { return second.Open() == 0 })
}

// TestNobodyToTakeOverFrom: there was a coordinator, but no process listens at its
// address.
func TestNobodyToTakeOverFrom(t *testing.T) {
	dir := privatedirtest.Open(t)
	for range 2 {
		l := listen(t)
		e := election.NewAlone(election.Options{Address: "unix:" + dir.SocketPath("gone"), Node: "a", Log: quiet}, dir)
		c := newCandidate(t, newHost(t, "p0", "d0"), l, e, e.Succeed)
		eventually(t, "it leads", c.Leads)
		c.stop()
	}
}

// TestFailOver has two coordinators at two addresses. When the leader ends, the standby
// leads. Then the former leader follows the new one. A standby tells workers that it does
// not lead.
func TestFailOver(t *testing.T) {
	votes := [2]*vote{newVote(), newVote()}
	var both [2]*candidate
	for i, order := range [][]string{{"p0", "p1", "d0", "d1"}, {"d1", "d0", "p1", "p0"}} {
		both[i] = newCandidate(t, newHost(t, order...), listen(t), votes[i], nil)
	}
	leader := func(i int, epoch uint64) {
		l := election.Leader{Address: both[i].address, Epoch: epoch, ID: uint64(i)}
		votes[1-i].set(election.Standing{Leader: l})
		votes[i].set(election.Standing{Leader: l, Leads: true})
	}
	leader(0, 10)
	eventually(t, "the first leads and the second is in step", func() bool { return both[0].Leads() && !both[1].Leads() && both[1].Ready() })

	numbers := newOwn(newHost(t, "p1", "d1", "p0", "d0"), both[0].host)
	at := make(chan int, 1)
	at <- 1
	w := worker(t, numbers, func(ctx context.Context) (net.Conn, error) {
		i := <-at
		at <- i
		return dial(ctx, both[i].address)
	})
	c, err := dial(t.Context(), both[1].address)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 1)); err == nil || n != 0 {
		t.Errorf("a standby sent %d bytes, %v", n, err)
	}
	c.Close()
	if w.Connected() {
		t.Error("a standby serves a worker")
	}
	<-at
	at <- 0
	eventually(t, "the worker is connected", w.Connected)
	held, _ := place(t, w, "x")
	eventually(t, "the home is at the standby's", func() bool { changed, _ := both[1].table.Changes(nil, 0, 10); return len(changed) == 1 })
	for round := range 4 {
		now, before := (round+1)%2, round%2
		<-at
		at <- now
		numbers.there.Store(both[now].host)
		leader(now, 11+uint64(round))
		eventually(t, "the other coordinator has the lease", func() bool { return both[now].Open() == 1 && both[before].Open() == 0 && w.Connected() })
		p, by := place(t, w, "x")
		if !by || names(p) != names(held) || p.Turn.Number != int32(round)+2 {
			t.Errorf("round %d: turn %d on %s, placed by the coordinator: %v; home before: %s", round, p.Turn.Number, names(p), by, names(held))
		}
		p.Lease.Release()
		eventually(t, "the former one is in step", both[before].Ready)
		eventually(t, "it has the home", func() bool {
			changed, _ := both[before].table.Changes(nil, 0, 10)
			return len(changed) == 1 && changed[0].Turn == int32(round)+2
		})
	}
	held.Lease.Release()
	eventually(t, "nothing is left", func() bool { return both[0].Open() == 0 && both[1].Open() == 0 })
	both[0].stop()
	<-votes[0].resigned
}

// TestLeading: operations of a leader end before the process becomes a standby. No such
// operation begins afterwards.
func TestLeading(t *testing.T) {
	v := newVote()
	h := newHost(t, "p0", "d0")
	c := newCandidate(t, h, listen(t), v, nil)
	if c.Leading(func() { t.Error("Leading called its function before the process leads") }) {
		t.Error("Leading = true before the process leads")
	}
	v.set(election.Standing{Leader: election.Leader{Address: c.address, Epoch: 10}, Leads: true})
	eventually(t, "it leads", c.Leads)
	if !c.Leading(func() {
		v.set(election.Standing{Leader: election.Leader{Address: "unix:nobody", Epoch: 11}})
		eventually(t, "it waits to step down", func() bool {
			if c.using.TryRLock() {
				c.using.RUnlock()
				return false
			}
			return true
		})
		p, err := h.Place(t.Context(), turn("x"))
		if err != nil {
			t.Error(err)
			return
		}
		p.Lease.Release()
		if !c.Leads() {
			t.Error("the process stepped down during the operation")
		}
	}) {
		t.Error("Leading = false for the leader")
	}
	eventually(t, "it follows", func() bool { return !c.Leads() })
	if c.Leading(func() { t.Error("Leading called its function after the process stepped down") }) {
		t.Error("Leading = true after the process stepped down")
	}
	v.set(election.Standing{Leader: election.Leader{Address: c.address, Epoch: 12}, Leads: true})
	eventually(t, "it leads again", c.Leads)
	p, err := h.Place(t.Context(), turn("x"))
	if err != nil {
		t.Fatal(err)
	}
	if p.Turn.Number != 2 || h.Name(p.Turn.Decode.Instance) != "d0" {
		t.Errorf("%+v", p.Turn)
	}
	p.Lease.Release()
}
