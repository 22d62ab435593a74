package fleet

import (
	"context"
	"errors"
	"math"
	"net"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// budgeted is a coordinator with two workers, which share budgets.
type budgeted struct {
	*wired
	ledger *tenant.Ledger // of the coordinator
	a, b   *Budgets
}

// budgetBubble runs a test in simulated time with a coordinator and two workers.
func budgetBubble(t *testing.T, name string, test func(t *testing.T, w *budgeted)) {
	t.Helper()
	ledger := tenant.NewLedger(nil, placetest.Quiet(), nil)
	bubble(t, name, func(so *ServerOptions, _ *ClientOptions) { so.Budgets = ledger }, func(t *testing.T, w *wired) {
		b := NewBudgets(w.another(t, nil), tenant.NewLedger(nil, placetest.Quiet(), nil))
		test(t, &budgeted{w, ledger, NewBudgets(w.client, tenant.NewLedger(nil, placetest.Quiet(), nil)), b})
	})
}

// takes takes from a worker's budgets and fails the test unless the result is want.
func (w *budgeted) takes(t *testing.T, from tenant.Budgets, of *tenant.Tenant, tokens int64, want tenant.Reason) tenant.Answer {
	t.Helper()
	a := from.Take(context.Background(), of, tokens)
	if a.Refused != want {
		t.Fatalf("got %+v, want %d", a, want)
	}
	synctest.Wait()
	return a
}

func settled(from tenant.Budgets, of *tenant.Tenant, a tenant.Answer, used int64) {
	from.Settle(of, tenant.Spent{Number: a.Number, Reserved: a.Reserved, Used: used})
	later(5 * time.Millisecond)
}

func TestBudgetsOfAFleet(t *testing.T) {
	budgetBubble(t, "exact to one request", func(t *testing.T, w *budgeted) {
		one := tenant.New(tenant.Tenant{Name: "t", Limits: tenant.Limits{Requests: 100}})
		for n := range 100 {
			from := []*Budgets{w.a, w.b}[n%2]
			a := w.takes(t, from, one, 5, tenant.Admitted)
			if a.Requests.Limit != 100 || a.Requests.Remaining != int64(99-n) {
				t.Fatalf("request %d: %+v", n, a)
			}
			from.Settle(one, tenant.Spent{Number: a.Number, Used: 5})
		}
		a, b := w.takes(t, w.a, one, 5, tenant.Requests), w.takes(t, w.b, one, 5, tenant.Requests)
		if a.Retry != 600*time.Millisecond || a != (tenant.Answer{Refused: a.Refused, Number: a.Number, Retry: b.Retry, Requests: b.Requests, State: a.State}) {
			t.Errorf("%+v, %+v", a, b)
		}
		time.Sleep(600 * time.Millisecond)
		w.takes(t, w.b, one, 5, tenant.Admitted)
		w.takes(t, w.a, one, 5, tenant.Requests)
	})
	budgetBubble(t, "tokens and places", func(t *testing.T, w *budgeted) {
		one := tenant.New(tenant.Tenant{Name: "t", Limits: tenant.Limits{Tokens: 1000, Exchanges: 2}})
		a, b := w.takes(t, w.a, one, 300, tenant.Admitted), w.takes(t, w.b, one, 400, tenant.Admitted)
		w.takes(t, w.a, one, 1, tenant.Exchanges)
		settled(w.a, one, a, 100)
		c := w.takes(t, w.b, one, 501, tenant.Tokens)
		if c.Tokens.Remaining != 500 || c.Retry != 55*time.Millisecond {
			t.Errorf("%+v", c)
		}
		w.b.Settle(one, tenant.Spent{Number: b.Number, Reserved: b.Reserved, Undone: true})
		later(time.Second)
		w.takes(t, w.a, one, 900, tenant.Admitted)
	})
}

// A worker that cannot reach the coordinator gives its share, and the coordinator charges it.
func TestBudgetsWithoutCoordinator(t *testing.T) {
	one := tenant.New(tenant.Tenant{Name: "t", Limits: tenant.Limits{Requests: 10, Exchanges: 20}})
	budgetBubble(t, "share", func(t *testing.T, w *budgeted) {
		for range 4 {
			settled(w.a, one, w.takes(t, w.a, one, 0, tenant.Admitted), 0)
		}
		running := w.takes(t, w.a, one, 0, tenant.Admitted)
		w.takes(t, w.b, one, 0, tenant.Admitted)
		w.takes(t, w.a, one, 0, tenant.Admitted)
		w.pipes.fall(true)
		for _, c := range w.pipes.made {
			c.cut()
		}
		synctest.Wait()
		gave := []tenant.Answer{w.takes(t, w.a, one, 0, tenant.Admitted)} // half of the 3 that were left
		w.takes(t, w.a, one, 0, tenant.Requests)
		w.takes(t, w.b, one, 0, tenant.Admitted) // half of the 4 that this worker had seen
		w.takes(t, w.b, one, 0, tenant.Admitted)
		w.takes(t, w.b, one, 0, tenant.Requests)
		settled(w.a, one, gave[0], 0)
		settled(w.a, one, running, 0)
		w.pipes.fall(false)
		later(2 * time.Second) // less than one request of the budget
		a := w.takes(t, w.a, one, 0, tenant.Requests)
		if a.Requests.Remaining != 0 { // 7 before, 3 meanwhile
			t.Errorf("%+v", a)
		}
		if n := w.ledger.Running(one); n != 4 { // 1 of a; of b one before and two meanwhile
			t.Errorf("%d running requests, want 4", n)
		}
	})
	budgetBubble(t, "late answer", func(t *testing.T, w *budgeted) {
		first := w.takes(t, w.b, one, 0, tenant.Admitted)
		late, dials := w.pipes.made[0], w.pipes.dials() // of the worker a
		late.hold()
		w.takes(t, w.a, one, 0, tenant.Admitted) // by the read that waits already
		a := w.takes(t, w.a, one, 0, tenant.Admitted)
		late.let()
		later(100 * time.Millisecond)
		if got := w.takes(t, w.b, one, 0, tenant.Admitted); got.Requests.Remaining != 6 {
			t.Errorf("after an answer that was late: %+v", got)
		}
		if w.pipes.dials() != dials {
			t.Error("the connection has ended")
		}
		if n := w.ledger.Running(one); n != 4 {
			t.Errorf("%d running requests, want 4", n)
		}
		settled(w.a, one, a, 0)
		settled(w.b, one, first, 0)
		if n := w.ledger.Running(one); n != 2 {
			t.Errorf("%d running requests, want 2", n)
		}
	})
	budgetBubble(t, "a worker dies", func(t *testing.T, w *budgeted) {
		w.takes(t, w.a, one, 0, tenant.Admitted)
		w.takes(t, w.b, one, 0, tenant.Admitted)
		w.stop()
		w.gone.Wait()
		synctest.Wait()
		if n := w.ledger.Running(one); n != 1 {
			t.Errorf("%d running requests, want 1", n)
		}
		if got := w.takes(t, w.b, one, 0, tenant.Admitted); got.Requests.Remaining != 7 {
			t.Errorf("%+v", got)
		}
	})
}

// The answer about a budget is read as it was written; nothing else is accepted.
func TestBudgetWire(t *testing.T) {
	a := tenant.Answer{Refused: tenant.Tokens, Reserved: 7, Retry: 30 * time.Millisecond,
		Requests: tenant.Level{Limit: 5, Remaining: 4, Reset: 12 * time.Second}, Tokens: tenant.Level{Limit: tenant.MaxPerMinute, Remaining: 3, Reset: 2 * time.Minute}}
	good := fleetpb.Append(nil, putBudget(&a, 9))
	if got, workers, err := readBudget(good); err != nil || workers != 9 || !reflect.DeepEqual(got, a) {
		t.Errorf("%+v, %d, %v", got, workers, err)
	}
	for n := range good {
		if got, _, err := readBudget(good[:n]); err == nil && (got.Reserved > a.Reserved || got.Tokens.Limit > tenant.MaxPerMinute) {
			t.Errorf("%d of %d bytes read as %+v", n, len(good), got)
		}
	}
	unknown := a
	unknown.Refused = tenant.Tokens + 1
	for name, b := range map[string][]byte{"empty": nil, "unknown reason": fleetpb.Append(nil, putBudget(&unknown, 9))} {
		if _, _, err := readBudget(b); !errors.Is(err, errUnsettled) {
			t.Errorf("%s: %v, want %v", name, err, errUnsettled)
		}
	}
	for name, tt := range map[string]struct {
		in   *fleetpb.Tenant
		want *tenant.Limits // nil: refused
	}{
		"good":     {&fleetpb.Tenant{Name: "t", Requests: 1, Tokens: tenant.MaxPerMinute, Exchanges: 3}, &tenant.Limits{Requests: 1, Tokens: tenant.MaxPerMinute, Exchanges: 3}},
		"longest":  {&fleetpb.Tenant{Name: strings.Repeat("t", maxTenantName)}, &tenant.Limits{}},
		"too long": {&fleetpb.Tenant{Name: strings.Repeat("t", maxTenantName+1)}, nil},
		"none":     {nil, nil},
		"too much": {&fleetpb.Tenant{Requests: 1 << 63, Tokens: tenant.MaxPerMinute + 1, Exchanges: 1 << 31}, &tenant.Limits{Requests: tenant.MaxPerMinute, Tokens: tenant.MaxPerMinute, Exchanges: math.MaxInt32}},
	} {
		if got := getTenant(tt.in); (got != nil) != (tt.want != nil) || got != nil && (got.Name != tt.in.Name || got.Limits != *tt.want) {
			t.Errorf("%s: %+v, want %+v", name, got, tt.want)
		}
	}
}

// A peer that sends wrong messages about budgets loses its connection, and nothing else.
func TestWrongBudgetMessages(t *testing.T) {
	one := tenant.New(tenant.Tenant{Name: "t", Limits: tenant.Limits{Requests: 10}})
	call := func(b []byte) func(*session) {
		return func(s *session) {
			_, _ = s.link.Call(context.Background(), kindOf(fleetpb.Kind_KIND_BUDGET), b, nil, time.Second)
		}
	}
	message := func(kind fleetpb.Kind, m proto.Message) func(*session) {
		return func(s *session) { _ = s.link.Send(kindOf(kind), fleetpb.Append(nil, m), true) }
	}
	for name, tt := range map[string]struct {
		send  func(*session)
		stays bool
	}{
		"empty call":            {call(nil), false},
		"malformed call":        {call([]byte{0xff}), false},
		"empty settle":          {message(fleetpb.Kind_KIND_SETTLE, &fleetpb.Settle{}), true},
		"settle of none":        {message(fleetpb.Kind_KIND_SETTLE, &fleetpb.Settle{Request: 99, Used: 1}), true},
		"charge without tenant": {message(fleetpb.Kind_KIND_CHARGE, &fleetpb.Charge{Requests: 1}), false},
		"state without key":     {message(fleetpb.Kind_KIND_KNOWN, &fleetpb.BudgetStates{States: []*fleetpb.BudgetState{{}}}), false},
	} {
		budgetBubble(t, name, func(t *testing.T, w *budgeted) {
			before := w.pipes.dials()
			s := w.client.session.Load()
			tt.send(s)
			later(5 * time.Second)
			if got := w.pipes.dials() == before; got != tt.stays {
				t.Errorf("the connection stays: %t, want %t", got, tt.stays)
			}
			if got := w.takes(t, w.b, one, 0, tenant.Admitted); got.Requests.Remaining != 9 {
				t.Errorf("%+v", got)
			}
		})
	}
}

// halfOpen is a worker's connection that can break for the worker alone, as a connection
// over a network does: the coordinator gets no sign of the end.
type halfOpen struct {
	net.Conn
	lost chan struct{}
}

// lose breaks the connection.
func (h *halfOpen) lose() {
	close(h.lost)
	h.Conn.SetReadDeadline(time.Unix(1, 0))
}

func (h *halfOpen) isLost() bool {
	select {
	case <-h.lost:
		return true
	default:
		return false
	}
}

func (h *halfOpen) Read(b []byte) (int, error) {
	n, err := h.Conn.Read(b)
	if h.isLost() {
		return 0, syscall.ETIMEDOUT
	}
	return n, err
}

func (h *halfOpen) Write(b []byte) (int, error) {
	if h.isLost() {
		return len(b), nil
	}
	return h.Conn.Write(b)
}

func (h *halfOpen) SetReadDeadline(t time.Time) error {
	if h.isLost() {
		return nil
	}
	return h.Conn.SetReadDeadline(t)
}

func (h *halfOpen) Close() error {
	if h.isLost() {
		return nil
	}
	return h.Conn.Close()
}

// A worker connects again before the coordinator notices that the old connection is broken.
// Each running request of the worker still counts, once.
func TestBudgetsOfReplacedConnection(t *testing.T) {
	one := tenant.New(tenant.Tenant{Name: "t", Limits: tenant.Limits{Exchanges: 3}})
	ledger := tenant.NewLedger(nil, placetest.Quiet(), nil)
	var made []*halfOpen
	change := func(so *ServerOptions, co *ClientOptions) {
		so.Budgets = ledger
		dial := co.Dial
		co.Dial = func(ctx context.Context) (net.Conn, error) {
			c, err := dial(ctx)
			if err != nil {
				return nil, err
			}
			made = append(made, &halfOpen{Conn: c, lost: make(chan struct{})})
			return made[len(made)-1], nil
		}
	}
	bubble(t, "half-open", change, func(t *testing.T, wired *wired) {
		b := NewBudgets(wired.another(t, nil), tenant.NewLedger(nil, placetest.Quiet(), nil))
		w := &budgeted{wired, ledger, NewBudgets(wired.client, tenant.NewLedger(nil, placetest.Quiet(), nil)), b}
		first := w.takes(t, w.a, one, 0, tenant.Admitted)
		w.takes(t, w.b, one, 0, tenant.Admitted)
		made[0].lose()
		later(time.Second)
		if len(made) != 2 || !w.client.Connected() {
			t.Fatalf("%d connections, the worker is connected: %t", len(made), w.client.Connected())
		}
		if n := ledger.Running(one); n != 2 {
			t.Errorf("%d running requests, want 2", n)
		}
		w.takes(t, w.b, one, 0, tenant.Admitted)
		w.takes(t, w.b, one, 0, tenant.Exchanges)
		settled(w.a, one, first, 0)
		if n := ledger.Running(one); n != 2 {
			t.Errorf("%d running requests after one has ended, want 2", n)
		}
	})
}
