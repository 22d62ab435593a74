package fleet

import (
	"context"
	"net"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/access"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// nobody is the number of a coordinator that a peer cannot reach.
const nobody = -1

// failover is two coordinators on two hosts, whose clocks differ by an hour, and two workers.
// The first coordinator leads in epoch 5.
type failover struct {
	*budgeted
	servers [2]*Server
	ledgers [2]*tenant.Ledger
	pipes   [2]*pipes
	aDials  atomic.Int32 // number of the coordinator that worker a dials
	bDials  atomic.Int32
	stopB   context.CancelFunc
}

// dial returns a function that dials the coordinator of a number.
func (w *failover) dial(number *atomic.Int32) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		n := number.Load()
		if n == nobody {
			return nil, errDown
		}
		return w.pipes[n].dial(ctx)
	}
}

// failoverBubble runs a test in simulated time. same: the coordinators are two processes of one
// host.
func failoverBubble(t *testing.T, name string, same bool, test func(t *testing.T, w *failover)) {
	t.Helper()
	w := &failover{}
	change := func(so *ServerOptions, co *ClientOptions) {
		w.ledgers[0] = tenant.NewLedger(nil, placetest.Quiet(), nil)
		w.ledgers[1] = tenant.NewLedger(nil, placetest.Quiet(), func() time.Time { return time.Now().Add(-time.Hour) })
		if same {
			w.ledgers[1] = w.ledgers[0]
		}
		so.Budgets, so.Homes = w.ledgers[0], noHomes
		co.Dial = func(ctx context.Context) (net.Conn, error) { return w.dial(&w.aDials)(ctx) }
	}
	t.Run(name, func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			first := newPipes(t)
			w.pipes[0], w.pipes[1] = first, newPipes(t)
			wired := newWiredAt(t, first, change, "p prefill", "d decode")
			w.budgeted = &budgeted{wired: wired, ledger: w.ledgers[0]}
			w.servers[0] = wired.server
			w.servers[1] = NewServer(ServerOptions{
				Gate:  access.NewGate(access.GateOptions{Credentials: w.pipes[1].certs, Log: placetest.Quiet()}),
				Local: w.Local, Log: placetest.Quiet(), Standby: true, Budgets: w.ledgers[1], Homes: noHomes,
			})
			w.runs(t, func(ctx context.Context) {
				if err := w.servers[1].Serve(ctx, w.pipes[1]); err != nil {
					t.Error(err)
				}
			})
			var client *Client
			client, w.stopB = w.stoppable(t, func(o *ClientOptions) { o.Dial = w.dial(&w.bDials) })
			w.a, w.b = NewBudgets(w.client, tenant.NewLedger(nil, placetest.Quiet(), nil)), NewBudgets(client, tenant.NewLedger(nil, placetest.Quiet(), nil))
			later(publishEvery)
			test(t, w)
		})
	})
}

// noHomes answers a standby in a fleet without conversations.
func noHomes(dst, _ []byte) ([]byte, bool, error) { return dst, false, nil }

// runs calls run in a goroutine, until the end of the test or of the returned function.
func (w *failover) runs(t *testing.T, run func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { run(ctx) })
	stop = func() {
		cancel()
		wg.Wait()
	}
	t.Cleanup(stop)
	synctest.Wait()
	return stop
}

// follows makes a coordinator the standby of the other one, until stop.
func (w *failover) follows(t *testing.T, standby int, epoch uint64) (stop func()) {
	t.Helper()
	var to atomic.Int32
	to.Store(int32(1 - standby))
	stop = w.runs(t, func(ctx context.Context) {
		_ = Follow(ctx, FollowOptions{Dial: w.dial(&to), Node: "there", Epoch: epoch, OnBudgets: w.servers[standby].CopyBudgets},
			func(ctx context.Context, _ func(context.Context, []byte) ([]byte, error)) { <-ctx.Done() })
	})
	later(2 * publishEvery)
	return stop
}

// kill cuts all connections of a coordinator without a farewell.
func (w *failover) kill(number int) {
	w.aDials.Store(nobody)
	w.bDials.Store(nobody)
	w.pipes[number].fall(true)
	for _, c := range w.pipes[number].made {
		c.cut()
	}
	synctest.Wait()
}

// leads makes a coordinator lead. The worker a finds it, and, if both is set, also b.
func (w *failover) leads(number int, epoch uint64, both bool) {
	w.pipes[number].fall(false)
	w.servers[number].Lead(epoch)
	w.aDials.Store(int32(number))
	w.a.client.Redial()
	w.bDials.Store(nobody)
	if both {
		w.bDials.Store(int32(number))
		w.b.client.Redial()
	}
	later(20 * time.Millisecond)
}

// spends takes n requests, in turn from both workers.
func (w *failover) spends(t *testing.T, of *tenant.Tenant, n int) {
	t.Helper()
	for i := range n {
		from := []*Budgets{w.a, w.b}[i%2]
		from.Settle(of, tenant.Spent{Number: w.takes(t, from, of, 0, tenant.Admitted).Number})
	}
}

// exactly asserts that n requests are left, and takes them.
func (w *failover) exactly(t *testing.T, of *tenant.Tenant, n int) {
	t.Helper()
	w.spends(t, of, n)
	w.takes(t, w.a, of, 0, tenant.Requests)
	w.takes(t, w.b, of, 0, tenant.Requests)
}

// After a failover, a tenant gets exactly what the former leader would have given. The budget
// is 10 requests a minute, so one comes back every 6 s.
func TestBudgetsAfterFailover(t *testing.T) {
	one := tenant.New(tenant.Tenant{Name: "t", Limits: tenant.Limits{Requests: 10}})
	for name, tt := range map[string]struct {
		standby bool
		wait    time.Duration // between the last request and the kill
	}{
		"killed after a grant":          {true, 0},
		"the standby has all":           {true, 2 * publishEvery},
		"no standby":                    {false, 0},
		"no standby, after publication": {false, 2 * publishEvery},
	} {
		failoverBubble(t, name, false, func(t *testing.T, w *failover) {
			if tt.standby {
				w.follows(t, 1, 5)
			}
			w.spends(t, one, 7)
			later(tt.wait)
			w.kill(0)
			w.leads(1, 6, true)
			if !tt.standby {
				later(settleLimit)
			}
			w.exactly(t, one, 3)
			later(6 * time.Second)
			w.exactly(t, one, 1)
		})
	}
	failoverBubble(t, "the workers have given their shares", false, func(t *testing.T, w *failover) {
		w.follows(t, 1, 5)
		w.spends(t, one, 4)
		later(publishEvery)
		w.kill(0)
		w.spends(t, one, 6) // three each
		w.takes(t, w.a, one, 0, tenant.Requests)
		w.takes(t, w.b, one, 0, tenant.Requests)
		w.leads(1, 6, true)
		w.exactly(t, one, 0)
	})
	failoverBubble(t, "a worker dies with the leader", false, func(t *testing.T, w *failover) {
		w.follows(t, 1, 5)
		w.spends(t, one, 7)
		later(publishEvery)
		w.kill(0)
		w.stopB()
		w.leads(1, 6, false)
		w.takes(t, w.a, one, 0, tenant.Admitted) // of its share, because the other worker has not reported
		if got := w.ledgers[1].Running(one); got != 0 {
			t.Errorf("the new leader has %d running requests before it knows all", got)
		}
		later(settleLimit)
		if got := w.ledgers[1].Running(one); got != 1 {
			t.Errorf("the new leader has %d running requests", got)
		}
		w.takes(t, w.a, one, 0, tenant.Admitted)
		w.takes(t, w.a, one, 0, tenant.Admitted)
		w.takes(t, w.a, one, 0, tenant.Requests)
	})
	failoverBubble(t, "a worker comes late", false, func(t *testing.T, w *failover) {
		w.follows(t, 1, 5)
		w.spends(t, one, 8) // the last one by the worker that comes late
		w.kill(0)
		w.leads(1, 6, false)
		later(settleLimit / 2)
		w.takes(t, w.a, one, 0, tenant.Admitted) // of its share
		w.takes(t, w.a, one, 0, tenant.Requests)
		w.bDials.Store(1)
		w.b.client.Redial()
		later(20 * time.Millisecond)
		w.exactly(t, one, 1)
	})
	failoverBubble(t, "the former leader returns", false, func(t *testing.T, w *failover) {
		w.follows(t, 1, 5)
		w.spends(t, one, 3)
		w.kill(0)
		w.leads(1, 6, true)
		w.spends(t, one, 3)
		w.servers[0].StandBy()
		w.follows(t, 0, 6)
		w.spends(t, one, 2)
		w.kill(1)
		w.servers[1].StandBy()
		w.leads(0, 7, true)
		w.exactly(t, one, 2)
	})
	failoverBubble(t, "lower and removed limits", false, func(t *testing.T, w *failover) {
		removed := tenant.New(tenant.Tenant{Name: "removed", Limits: tenant.Limits{Requests: 5}})
		w.follows(t, 1, 5)
		w.spends(t, one, 7)
		w.spends(t, removed, 5)
		w.kill(0)
		w.leads(1, 6, true)
		w.exactly(t, tenant.New(tenant.Tenant{Name: "t", Limits: tenant.Limits{Requests: 6}}), 0)
		w.exactly(t, tenant.New(tenant.Tenant{Name: "t", Limits: tenant.Limits{Requests: 9}}), 2)
		later(2 * time.Minute) // "removed" is not in use
		w.exactly(t, removed, 5)
	})
}

// A coordinator that steps down gives its standby all, and the standby waits for no worker. Nor
// does a coordinator that has the ledger of its predecessor.
func TestBudgetsWithoutWait(t *testing.T) {
	one := tenant.New(tenant.Tenant{Name: "t", Limits: tenant.Limits{Requests: 10}})
	for name, tt := range map[string]struct{ same, dies bool }{
		"stepped down":            {false, false},
		"taken over":              {true, false},
		"killed, with its ledger": {true, true},
	} {
		failoverBubble(t, name, tt.same, func(t *testing.T, w *failover) {
			w.follows(t, 1, 5)
			w.spends(t, one, 7)
			if tt.dies {
				w.kill(0)
			} else {
				w.servers[0].StandBy()
			}
			w.leads(1, 6, false)
			for range 3 {
				w.takes(t, w.a, one, 0, tenant.Admitted)
			}
			w.takes(t, w.a, one, 0, tenant.Requests)
			if n := w.ledgers[1].Running(one); n != 3 {
				t.Errorf("%d running requests, want 3", n)
			}
		})
	}
}

// Requests that run during a failover settle at the new leader: their tokens and their places.
func TestRunningDuringFailover(t *testing.T) {
	one := tenant.New(tenant.Tenant{Name: "t", Limits: tenant.Limits{Tokens: 1000, Exchanges: 4}})
	failoverBubble(t, "tokens and places", false, func(t *testing.T, w *failover) {
		w.follows(t, 1, 5)
		a, b := w.takes(t, w.a, one, 300, tenant.Admitted), w.takes(t, w.b, one, 400, tenant.Admitted)
		w.kill(0)
		meanwhile := w.takes(t, w.a, one, 100, tenant.Admitted)
		w.a.Settle(one, tenant.Spent{Number: a.Number, Reserved: 300, Used: 200}) // while no coordinator answers
		w.leads(1, 6, true)
		if got := w.takes(t, w.a, one, 501, tenant.Tokens); got.Tokens.Remaining != 301 && got.Tokens.Remaining != 300 {
			t.Errorf("%+v", got) // 1000 - 200 - 400 - 100, and the refill of some ms
		}
		w.b.Settle(one, tenant.Spent{Number: b.Number, Reserved: 400, Used: 100})
		w.a.Settle(one, tenant.Spent{Number: meanwhile.Number, Reserved: 100, Undone: true})
		later(10 * time.Millisecond)
		w.takes(t, w.b, one, 700, tenant.Admitted)
		if n := w.ledgers[1].Running(one); n != 1 {
			t.Errorf("%d running requests, want 1", n)
		}
	})
}

// The workers know the budgets of a tenant of which they have had no request.
func TestSharesOfIdleWorkers(t *testing.T) {
	one := tenant.New(tenant.Tenant{Name: "t", Limits: tenant.Limits{Requests: 10}})
	failoverBubble(t, "all used by the other worker", false, func(t *testing.T, w *failover) {
		for range 10 {
			w.takes(t, w.a, one, 0, tenant.Admitted)
		}
		later(2 * publishEvery)
		w.kill(0)
		w.takes(t, w.b, one, 0, tenant.Requests)
	})
}

// States of budgets are read as they were written; nothing else is accepted.
func TestPublishedWire(t *testing.T) {
	p := published{whole: true, epoch: 7, workers: []uint64{1, 1 << 63}, states: []tenant.State{
		{Key: tenant.Key{1, 15: 2}, Version: tenant.Version{Epoch: 7, Change: maxChange}, Requests: tenant.MaxUsed, Tokens: 5, Age: time.Second},
		{Key: tenant.Key{2}},
	}}
	good := p.append(nil)
	var got published
	if err := got.read(good); err != nil || !reflect.DeepEqual(got, p) {
		t.Errorf("%+v, %v", got, err)
	}
	if err := new(published).read(good[:len(good)-1]); err == nil {
		t.Error("an incomplete message is accepted")
	}
	if err := new(published).read((&published{states: make([]tenant.State, tenant.MaxTenants+1)}).append(nil)); err == nil {
		t.Error("more tenants than there may be are accepted")
	}
}

// FuzzPublished: any bytes that are accepted leave a usable copy.
func FuzzPublished(f *testing.F) {
	f.Add((&published{}).append(nil))
	f.Add((&published{whole: true, epoch: 7, workers: []uint64{9}, states: []tenant.State{{Key: tenant.Key{1}, Version: tenant.Version{Epoch: 7, Change: 3}, Requests: 5, Age: time.Second}}}).append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		ledger := tenant.NewLedger(nil, placetest.Quiet(), nil)
		s := succession{ledger: ledger, onSettled: func() {}}
		var p published
		if p.read(b) != nil {
			return
		}
		s.copy(&p)
		s.lead(10)
		s.report(1, p.states)
		s.end()
		if a := ledger.Take(context.Background(), tenant.New(tenant.Tenant{Name: "t", Limits: tenant.Limits{Requests: 1}}), 0); a.Refused != tenant.Admitted {
			t.Errorf("%+v", a)
		}
		if states, _ := ledger.Changes(0); len(states) > tenant.MaxTenants {
			t.Errorf("%d states", len(states))
		}
	})
}
