package tenant

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"reflect"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// clock is a clock that the test sets.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock { return &clock{now: time.Unix(1_700_000_000, 0)} }

func (c *clock) time() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

func newLedger(t *testing.T, dir *privatedir.Dir, c *clock) *Ledger {
	t.Helper()
	l := NewLedger(dir, slog.New(slog.NewTextHandler(failer{t}, nil)), c.time)
	t.Cleanup(l.Close)
	return l
}

// failer fails the test that logs.
type failer struct{ t *testing.T }

func (f failer) Write(p []byte) (int, error) {
	f.t.Errorf("logged: %s", p)
	return len(p), nil
}

// both runs a test with a ledger in memory and with one in a file.
func both(t *testing.T, test func(t *testing.T, dir *privatedir.Dir)) {
	t.Run("memory", func(t *testing.T) { test(t, nil) })
	t.Run("file", func(t *testing.T) { test(t, privatedirtest.Open(t)) })
}

// A tenant gets exactly its requests of a minute at once, and each further one exactly when
// its part of the minute has passed.
func TestRequests(t *testing.T) {
	both(t, func(t *testing.T, dir *privatedir.Dir) {
		for _, limit := range []int64{1, 3, 7, 60, 1000, 60_000_001} {
			c := newClock()
			l := newLedger(t, dir, c)
			one := New(Tenant{Name: fmt.Sprint("t", limit), Limits: Limits{Requests: limit}})
			burst := min(limit, 1000)
			if limit > burst {
				l.Charge(one, limit-burst, 0, 0)
			}
			for n := range burst {
				a := l.Take(context.Background(), one, 5)
				if a.Refused != Admitted || a.Requests.Remaining != burst-n-1 || a.Reserved != 0 || a.Tokens != (Level{}) {
					t.Fatalf("limit %d, request %d: %+v", limit, n, a)
				}
				l.Settle(one, Spent{Used: 9})
			}
			a := l.Take(context.Background(), one, 5)
			if a.Refused != Requests || a.Requests.Remaining != 0 || a.Requests.Reset != time.Minute {
				t.Fatalf("limit %d, above the burst: %+v", limit, a)
			}
			c.pass(a.Retry - time.Microsecond)
			if a := l.Take(context.Background(), one, 5); a.Refused != Requests || a.Retry != time.Microsecond {
				t.Fatalf("limit %d, 1 µs before: %+v", limit, a)
			}
			c.pass(time.Microsecond)
			if a := l.Take(context.Background(), one, 5); a.Refused != Admitted {
				t.Fatalf("limit %d, after the wait: %+v", limit, a)
			}
			if a := l.Take(context.Background(), one, 5); limit < 1000 && a.Refused != Requests {
				t.Fatalf("limit %d, a second one: %+v", limit, a)
			}
			c.pass(time.Hour)
			if a := l.Take(context.Background(), one, 5); a.Requests.Remaining != limit-1 {
				t.Fatalf("limit %d, after an hour: %+v", limit, a)
			}
		}
	})
}

// Over a day of requests at random times, a tenant gets exactly its rate.
func TestRateIsExact(t *testing.T) {
	c := newClock()
	l := newLedger(t, nil, c)
	one := New(Tenant{Name: "t", Limits: Limits{Requests: 7}})
	admitted := int64(0)
	for range 20_000 { // each 4.32 s: more often than the rate
		if l.Take(context.Background(), one, 0).Refused == Admitted {
			admitted++
			l.Settle(one, Spent{})
		}
		c.pass(4320 * time.Millisecond)
	}
	if want := int64(7 + 7*24*60 - 1); admitted < want || admitted > want+1 {
		t.Errorf("%d requests in a day, want %d", admitted, want)
	}
}

// Tokens are reserved at the start, and corrected at the end.
func TestTokens(t *testing.T) {
	both(t, func(t *testing.T, dir *privatedir.Dir) {
		c := newClock()
		l := newLedger(t, dir, c)
		one := New(Tenant{Name: "t", Limits: Limits{Requests: 100, Tokens: 1000}})
		take := func(tokens int64, want Answer) {
			t.Helper()
			if got := l.Take(context.Background(), one, tokens); got.Refused != want.Refused || got.Reserved != want.Reserved ||
				got.Retry != want.Retry || got.Tokens.Remaining != want.Tokens.Remaining || got.Requests.Remaining != want.Requests.Remaining {
				t.Fatalf("got %+v\nwant %+v", got, want)
			}
		}
		left := func(tokens, requests int64) Answer {
			return Answer{Tokens: Level{Remaining: tokens}, Requests: Level{Remaining: requests}}
		}
		refused := func(retry time.Duration, a Answer) Answer {
			a.Refused, a.Retry = Tokens, retry
			return a
		}
		reserved := func(n int64, a Answer) Answer { a.Reserved = n; return a }
		take(600, reserved(600, left(400, 99)))
		take(401, refused(60*time.Millisecond, left(400, 99)))
		take(400, reserved(400, left(0, 98)))
		l.Settle(one, Spent{Reserved: 600, Used: 100}) // 500 come back
		take(500, reserved(500, left(0, 97)))
		l.Settle(one, Spent{Reserved: 500, Undone: true}) // with the request
		l.Settle(one, Spent{Reserved: 400, Used: 1400})   // a debt of 500
		take(1, refused(30060*time.Millisecond, left(0, 98)))
		c.pass(time.Hour)
		take(1_000_000, reserved(1000, left(0, 99))) // more than a minute has: all of it
		l.Settle(one, Spent{Reserved: 1000, Used: 1 << 60})
		take(1, refused(time.Minute+60*time.Millisecond, left(0, 99))) // no debt is larger than the budget
		take(-5, refused(time.Minute, left(0, 99)))
	})
}

// As many requests run as may, and each that ends makes room.
func TestExchanges(t *testing.T) {
	both(t, func(t *testing.T, dir *privatedir.Dir) {
		l := newLedger(t, dir, newClock())
		one, other := New(Tenant{Name: "t", Limits: Limits{Exchanges: 2}}), New(Tenant{Name: "u", Limits: Limits{Exchanges: 1}})
		for n, want := range []Reason{Admitted, Admitted, Exchanges, Exchanges} {
			if a := l.Take(context.Background(), one, 0); a.Refused != want {
				t.Fatalf("request %d: %+v", n, a)
			}
		}
		if a := l.Take(context.Background(), other, 0); a.Refused != Admitted {
			t.Errorf("another tenant: %+v", a)
		}
		l.Settle(one, Spent{})
		if a := l.Take(context.Background(), one, 0); a.Refused != Admitted {
			t.Errorf("after the end of one: %+v", a)
		}
		for range 5 { // more often than there were requests
			l.Settle(one, Spent{})
		}
		if a := l.Take(context.Background(), one, 0); a.Refused != Admitted {
			t.Errorf("after the end of all: %+v", a)
		}
	})
}

// Ledgers with one file share the budgets. A ledger that opens the file later goes on with
// them, and places of a ledger that has ended are free.
func TestSharedFile(t *testing.T) {
	dir, c := privatedirtest.Open(t), newClock()
	one := New(Tenant{Name: "t", Limits: Limits{Requests: 5, Exchanges: 3}})
	a, b := newLedger(t, dir, c), newLedger(t, dir, c)
	for n, l := range []*Ledger{a, b, a} {
		if got := l.Take(context.Background(), one, 0); got.Refused != Admitted || got.Requests.Remaining != int64(4-n) {
			t.Fatalf("request %d: %+v", n, got)
		}
	}
	if got := b.Take(context.Background(), one, 0); got.Refused != Exchanges {
		t.Fatalf("above max_exchanges: %+v", got)
	}
	a.Close() // as if its process was killed
	later := newLedger(t, dir, c)
	for n, l := range []*Ledger{b, later} {
		if got := l.Take(context.Background(), one, 0); got.Refused != Admitted || got.Requests.Remaining != int64(1-n) {
			t.Fatalf("request %d after the end of the first ledger: %+v", n, got)
		}
	}
	b.Settle(one, Spent{})
	if got := later.Take(context.Background(), one, 0); got.Refused != Requests {
		t.Errorf("above the requests of a minute: %+v", got)
	}
}

// A process that is killed while it changes a record leaves the old state.
func TestKilledDuringAChange(t *testing.T) {
	dir, c := privatedirtest.Open(t), newClock()
	one := New(Tenant{Name: "t", Limits: Limits{Requests: 5, Tokens: 100}})
	a := newLedger(t, dir, c)
	if got := a.Take(context.Background(), one, 10); got.Refused != Admitted {
		t.Fatalf("%+v", got)
	}
	r := &a.table.records[a.index[one.key]]
	before := r.pairs[r.current]
	if got := a.Take(context.Background(), one, 10); got.Refused != Admitted {
		t.Fatalf("%+v", got)
	}
	if r.pairs[1-r.current] != before {
		t.Errorf("the state in force was changed: %+v, before %+v", r.pairs, before)
	}
	r.pairs[1-r.current].requests = bucket{used: 1 << 62, at: 1 << 62} // the copy that is not in force
	b := newLedger(t, dir, c)
	if got := b.Take(context.Background(), one, 10); got.Refused != Admitted || got.Requests.Remaining != 2 || got.Tokens.Remaining != 70 {
		t.Errorf("%+v", got)
	}
}

// A file that cannot be used is logged; the ledger then counts in memory.
func TestUnusableFile(t *testing.T) {
	for name, content := range map[string][]byte{
		"another file": []byte("no budgets at all\n\n"),
		"too long":     make([]byte, stateSize+1),
		"other layout": append(append([]byte(stateHead), make([]byte, layoutAt-len(stateHead))...), 1, 2, 3, 4, 5, 6, 7, 8),
	} {
		dir := privatedirtest.Open(t)
		if err := dir.CreateFile(stateName, content); err != nil {
			t.Fatal(err)
		}
		var logged lines
		l := NewLedger(dir, slog.New(slog.NewTextHandler(&logged, nil)), nil)
		defer l.Close()
		one := New(Tenant{Name: "t", Limits: Limits{Exchanges: 1}})
		if a, b := l.Take(context.Background(), one, 0), l.Take(context.Background(), one, 0); a.Refused != Admitted || b.Refused != Exchanges || logged != 1 {
			t.Errorf("%s: %+v, %+v, %d lines in the log", name, a, b, logged)
		}
	}
	// A file of which a killed process wrote only a part is completed.
	dir := privatedirtest.Open(t)
	if err := dir.CreateFile(stateName, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	l := newLedger(t, dir, newClock())
	l.Take(context.Background(), New(Tenant{Name: "t"}), 0)
	if info, err := os.Stat(dir.Path(stateName)); err != nil || info.Size() != int64(stateSize) {
		t.Errorf("%v, %v", info, err)
	}
}

// lines counts lines of a log.
type lines int

func (n *lines) Write(p []byte) (int, error) { *n++; return len(p), nil }

// If the clock is set back, no budget grows, and the refill goes on from the new time.
func TestClockSetBack(t *testing.T) {
	c := newClock()
	l := newLedger(t, nil, c)
	one := New(Tenant{Name: "t", Limits: Limits{Requests: 6}})
	for range 6 {
		l.Take(context.Background(), one, 0)
	}
	c.pass(-24 * time.Hour)
	if a := l.Take(context.Background(), one, 0); a.Refused != Requests || a.Retry != 10*time.Second {
		t.Errorf("after a large step: %+v", a)
	}
	c.pass(10 * time.Second)
	if a := l.Take(context.Background(), one, 0); a.Refused != Admitted {
		t.Errorf("10 s later: %+v", a)
	}
	c.pass(-time.Second / 2)
	c.pass(10 * time.Second)
	if a := l.Take(context.Background(), one, 0); a.Refused != Requests || a.Retry != time.Second/2 {
		t.Errorf("a small step added time: %+v", a)
	}
}

// More tenants than records: the one that was used least recently makes room.
func TestMostTenants(t *testing.T) {
	c := newClock()
	l := newLedger(t, nil, c)
	limits := Limits{Requests: 1}
	for n := range 4 {
		c.pass(time.Millisecond)
		one := New(Tenant{Name: fmt.Sprint("t", n), Limits: limits})
		if n == 3 { // all other records are in use, too
			for at := 3; at < MaxTenants; at++ {
				l.table.records[at].key = New(Tenant{Name: fmt.Sprint("other", at)}).key
				l.table.records[at].pairs[0].requests.at = c.time().UnixMicro()
			}
		}
		if a := l.Take(context.Background(), one, 0); a.Refused != Admitted {
			t.Fatalf("tenant %d: %+v", n, a)
		}
		if n > 0 { // the first keeps its place while its request runs
			l.Settle(one, Spent{})
		}
	}
	for _, tt := range []struct {
		name string
		want Reason
	}{{"t0", Requests}, {"t2", Requests}, {"t1", Admitted}} {
		if a := l.Take(context.Background(), New(Tenant{Name: tt.name, Limits: limits}), 0); a.Refused != tt.want {
			t.Errorf("%s: %+v, want %d", tt.name, a, tt.want)
		}
	}
}

// Many goroutines of several ledgers get exactly the budget.
func TestConcurrentTake(t *testing.T) {
	both(t, func(t *testing.T, dir *privatedir.Dir) {
		c := newClock()
		ledgers := []*Ledger{newLedger(t, dir, c)}
		if dir != nil {
			ledgers = append(ledgers, newLedger(t, dir, c), newLedger(t, dir, c))
		}
		one := New(Tenant{Name: "t", Limits: Limits{Requests: 100, Tokens: 1000, Exchanges: 200}})
		var wg sync.WaitGroup
		admitted := make([]int, 3*len(ledgers))
		for n := range admitted {
			wg.Go(func() {
				for range 60 {
					if a := ledgers[n%len(ledgers)].Take(context.Background(), one, 10); a.Refused == Admitted {
						admitted[n]++
						ledgers[n%len(ledgers)].Settle(one, Spent{Reserved: a.Reserved, Used: 10})
					}
				}
			})
		}
		wg.Wait()
		sum := 0
		for _, n := range admitted {
			sum += n
		}
		if sum != 100 {
			t.Errorf("%d requests of %v, want 100", sum, admitted)
		}
	})
}

// Copy copies the budgets of another ledger, or a share of them.
func TestCopy(t *testing.T) {
	c := newClock()
	from, to := newLedger(t, nil, c), newLedger(t, nil, c)
	one := New(Tenant{Name: "t", Limits: Limits{Requests: 7, Tokens: 1000}})
	from.Take(context.Background(), one, 10)
	a := from.Take(context.Background(), one, 333)
	to.Copy(&a, 1)
	if b := to.Take(context.Background(), one, 0); b.Requests.Remaining != a.Requests.Remaining-1 || b.Tokens.Remaining != a.Tokens.Remaining {
		t.Errorf("%+v after %+v", b, a)
	}
	half := one.Share(2)
	if half.Limits != (Limits{Requests: 3, Tokens: 500}) {
		t.Errorf("a half is %+v", half.Limits)
	}
	if least := one.Share(8).Limits; least != (Limits{Requests: 1, Tokens: 125}) {
		t.Errorf("an eighth is %+v", least)
	}
	to.Copy(&a, 2)
	if b := to.Take(context.Background(), half, 0); b.Requests.Remaining != 1 || b.Tokens.Remaining != 328 { // 3 - 2/2 - 1, 500 - 343/2
		t.Errorf("the half of %+v is %+v", a, b)
	}
	if n := to.Running(one); n != 4 { // two of answers, and two of Take
		t.Errorf("%d running requests", n)
	}
}

// A ledger that has the states of another one refuses where the other one would.
func TestMerge(t *testing.T) {
	both(t, func(t *testing.T, dir *privatedir.Dir) {
		c := newClock()
		from, to := newLedger(t, nil, c), newLedger(t, dir, c)
		one := New(Tenant{Name: "t", Limits: Limits{Requests: 6, Tokens: 1000}})
		if states, until := from.Changes(0); len(states) != 0 || until != 0 {
			t.Errorf("an unused ledger has the states %+v, %d", states, until)
		}
		from.Lead(3)
		a := from.Take(context.Background(), one, 10)
		early, until := from.Changes(0)
		if len(early) != 1 || early[0] != a.State || a.State.Version.Epoch != 3 {
			t.Fatalf("%+v after %+v", early, a)
		}
		if states, again := from.Changes(until); len(states) != 0 || again != until {
			t.Errorf("without a change: %+v, %d after %d", states, again, until)
		}
		from.Settle(one, Spent{Reserved: 10, Used: 110})
		from.Take(context.Background(), one, 200)
		late, _ := from.Changes(until)
		if len(late) != 1 || late[0].Version.Compare(early[0].Version) <= 0 {
			t.Fatalf("%+v after %+v", late, early)
		}
		c.pass(5 * time.Second)
		aged, _ := from.Changes(until)
		if aged[0].Age != 5*time.Second {
			t.Errorf("%+v", aged)
		}
		if before := to.Lead(4); before != 0 {
			t.Errorf("epoch %d before the first", before)
		}
		to.Merge(aged)
		to.Merge(early)                                 // older: it changes nothing
		got := to.Take(context.Background(), one, 1000) // all, also for the refusal
		want := from.Take(context.Background(), one, 1000)
		if got.Refused != Tokens || got.Tokens != want.Tokens || got.Requests != want.Requests || got.Retry != want.Retry {
			t.Errorf("got %+v\nwant %+v", got, want)
		}
		to.Merge(late) // of the earlier epoch
		if got := to.Take(context.Background(), one, 0); got.Requests.Remaining != 3 || got.State.Version.Epoch != 4 {
			t.Errorf("%+v", got)
		}
		lower := New(Tenant{Name: "t", Limits: Limits{Requests: 3}}) // a reload between the leaders
		if got := to.Take(context.Background(), lower, 0); got.Refused != Requests || got.Requests.Remaining != 0 {
			t.Errorf("with a lower limit: %+v", got)
		}
		if before := to.Lead(7); before != 4 {
			t.Errorf("epoch %d before 7, want 4", before)
		}
		c.pass(MaxAge)
		if states, _ := to.Changes(0); len(states) != 0 {
			t.Errorf("states of budgets that are whole: %+v", states)
		}
	})
}

// A process keeps the newest state of each tenant, until the state is worthless.
func TestNewest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n Newest
		state := func(k byte, epoch, change uint64) State {
			return State{Key: Key{k}, Version: Version{epoch, change}, Requests: int64(change)}
		}
		n.Add(state(2, 1, 9), state(1, 2, 1), state(1, 1, 5), state(2, 1, 8))
		time.Sleep(time.Second)
		old := state(3, 1, 1)
		old.Age = MaxAge - 10*time.Second
		n.Add(state(1, 2, 2), old)
		aged := state(2, 1, 9)
		aged.Age = time.Second
		if got := n.States(); !slices.Equal(got, []State{state(1, 2, 2), aged, old}) {
			t.Errorf("%+v", got)
		}
		time.Sleep(10 * time.Second)
		if got := n.States(); len(got) != 2 || got[0].Age != 10*time.Second {
			t.Errorf("%+v", got)
		}
		for k := range MaxTenants + 1 { // a peer that names more tenants than there may be
			s := state(9, 1, 1)
			s.Key[1], s.Key[2] = byte(k), byte(k>>8)
			n.Add(s)
		}
		if got := n.States(); len(got) != MaxTenants {
			t.Errorf("%d states", len(got))
		}
	})
}

func TestHeader(t *testing.T) {
	for _, tt := range []struct {
		a    Answer
		want http.Header
	}{
		{Answer{}, http.Header{}},
		{Answer{Requests: Level{60, 59, time.Second}}, http.Header{
			"X-Ratelimit-Limit-Requests": {"60"}, "X-Ratelimit-Remaining-Requests": {"59"}, "X-Ratelimit-Reset-Requests": {"1s"},
		}},
		{Answer{Refused: Tokens, Retry: 1500 * time.Millisecond, Tokens: Level{1000, 0, 6 * time.Minute}}, http.Header{
			"X-Ratelimit-Limit-Tokens": {"1000"}, "X-Ratelimit-Remaining-Tokens": {"0"}, "X-Ratelimit-Reset-Tokens": {"6m0s"}, "Retry-After": {"2"},
		}},
		{Answer{Refused: Exchanges}, http.Header{"Retry-After": {"1"}}},
	} {
		got := http.Header{}
		if tt.a.SetHeader(got); !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%+v: got %v, want %v", tt.a, got, tt.want)
		}
	}
	for d, want := range map[time.Duration]string{0: "0s", time.Microsecond: "1ms", 12 * time.Millisecond: "12ms", time.Second: "1s", 59*time.Second + 1: "59.001s", 6 * time.Minute: "6m0s"} {
		if got := Duration(d); got != want {
			t.Errorf("Duration(%d) = %s, want %s", d, got, want)
		}
	}
}

func TestWith(t *testing.T) {
	one := New(Tenant{Name: "t", Class: "low", Models: []string{"a", "b"}})
	for _, tt := range []struct {
		class  string
		models []string
		want   Tenant
	}{
		{"", nil, Tenant{Class: "low", Models: []string{"a", "b"}}},
		{"high", []string{"b", "c"}, Tenant{Class: "high", Models: []string{"b"}}},
		{"", []string{"c"}, Tenant{Class: "low", Models: []string{}}},
	} {
		if got := one.With(tt.class, tt.models); got.Class != tt.want.Class || !reflect.DeepEqual(got.Models, tt.want.Models) || got.key != one.key || got.Weight != 1 {
			t.Errorf("%q, %v: %+v", tt.class, tt.models, got)
		}
	}
	if got := New(Tenant{Name: "t"}).With("", []string{"c"}); !got.Allows("c") || got.Allows("a") {
		t.Errorf("of a tenant with all models: %+v", got)
	}
	if (*Tenant)(nil).Allows("x") != true || one.Allows("c") {
		t.Error("Allows is wrong")
	}
}
