package load

import (
	"math"
	"sync"
	"testing"
	"time"
)

// own is the load of this proxy that a counter holds.
type own struct {
	requests               int32
	tokens, queued, decode int64
}

func (c *Counter) own() own {
	return own{c.Requests(), c.Tokens(), c.Queued(), c.Decode()}
}

func TestHold(t *testing.T) {
	var c Counter
	stream := c.Hold(100)
	prefill := c.HoldPrefill(50, 20)
	whole := c.Hold(30)
	wholeQueued := c.HoldQueued(10)
	if got, want := c.own(), (own{3, 180, 30, 130}); got != want {
		t.Errorf("all: %+v, want %+v", got, want)
	}
	wholeQueued.Drop()
	if got, want := c.own(), (own{3, 180, 20, 130}); got != want {
		t.Errorf("load after the first token: %+v, want %+v", got, want)
	}
	prefill.Drop()
	prefill.Drop() // an empty hold changes nothing
	if got, want := c.own(), (own{2, 130, 0, 130}); got != want {
		t.Errorf("prefill is done: %+v, want %+v", got, want)
	}
	stream.Drop()
	whole.Drop()
	var none Hold
	none.Drop()
	if got := c.own(); got != (own{}) {
		t.Errorf("load %+v remains", got)
	}
}

func TestWork(t *testing.T) {
	var c Counter
	first := c.HoldPrefill(1000, 600)
	stream := c.Hold(5000)
	second := c.HoldPrefill(500, 400)
	third := c.HoldQueued(8)
	for name, tt := range map[string]struct {
		h    *Hold
		want int64
	}{
		"nothing before": {&first, 600},
		"a stream":       {&stream, 0},
		"one before":     {&second, 1000},
		"two before":     {&third, 1008},
	} {
		if got := tt.h.Work; got != tt.want {
			t.Errorf("%s: work %d, want %d", name, got, tt.want)
		}
		tt.h.Drop()
		if got := tt.h.Work; got != tt.want {
			t.Errorf("%s: work %d after the drop, want %d", name, got, tt.want)
		}
	}
}

func TestHoldHammer(t *testing.T) {
	var (
		c    Counter
		wg   sync.WaitGroup
		base = time.Unix(1000, 0)
	)
	for g := range 8 {
		wg.Go(func() {
			for i := range 3000 {
				n := int64(g*i + 1)
				h, p := c.Hold(n), c.HoldPrefill(2*n, n)
				if v := c.View(base); v.Requests < 2 || v.Tokens < 3*n || v.Queued < n || v.Decode < n {
					t.Error("the view is below the held load")
				}
				c.Report(Report{At: base, Every: time.Second, Running: 5, Waiting: 1, Tokens: 10, Queued: 3, Usage: 0.5}, c.Mark())
				c.Prefill.Measure(p.Work, time.Millisecond)
				p.Drop()
				h.Drop()
			}
		})
	}
	wg.Wait()
	if got := c.own(); got != (own{}) {
		t.Errorf("load %+v remains", got)
	}
	if v := c.View(base); v.Requests < 0 || v.Requests > 6 || v.Usage != 0.5 || v.PrefillMicros <= 0 {
		t.Errorf("c.View(base) = %+v", v)
	}
}

func TestNothingAllocates(t *testing.T) {
	var c Counter
	now := time.Now()
	c.Report(Report{At: now, Every: time.Second, Running: 3, Queued: -1, Usage: 0.5}, c.Mark())
	var sum int64
	if n := testing.AllocsPerRun(100, func() {
		h, p, q := c.Hold(1), c.HoldPrefill(2, 1), c.HoldQueued(1)
		v := c.View(now)
		sum += v.Tokens
		c.Output.Measure(10, time.Millisecond)
		h.Drop()
		p.Drop()
		q.Drop()
	}); n != 0 {
		t.Errorf("got %v allocations", n)
	}
}

func BenchmarkHold(b *testing.B) {
	var c Counter
	for b.Loop() {
		h := c.Hold(100)
		h.Drop()
	}
}

func BenchmarkHoldPrefill(b *testing.B) {
	var c Counter
	for b.Loop() {
		h := c.HoldPrefill(100, 50)
		h.Drop()
	}
}

// BenchmarkView reads 64 targets, as the candidates of one request.
func BenchmarkView(b *testing.B) {
	now := time.Now()
	counters := make([]Counter, 64)
	for i := range counters {
		c := &counters[i]
		c.Prefill.Measure(100, time.Millisecond)
		c.Report(Report{At: now, Every: time.Second, Running: 3, Waiting: 1, Tokens: 1000, Queued: 10, Usage: 0.5}, c.Mark())
	}
	var sum int64
	for b.Loop() {
		for i := range counters {
			v := counters[i].View(now)
			sum += v.Tokens
		}
	}
	if sum == 0 {
		b.Error("no load")
	}
}

func TestRecent(t *testing.T) {
	var c Counter
	now := time.Unix(1_700_000_000, 0)
	if tokens, requests, busy := c.Recent(now); tokens != 0 || requests != 0 || busy != 0 {
		t.Errorf("of a new target: %v, %v, %v", tokens, requests, busy)
	}
	c.Placed(1000, now)
	c.Placed(500, now)
	c.Placed(0, now.Add(recentTime))
	later := now.Add(2 * recentTime)
	tokens, requests, _ := c.Recent(later)
	e := math.Exp(-1)
	if want := 1500 * e * e; math.Abs(float64(tokens)-want) > 1e-3 {
		t.Errorf("got %v tokens, want %v", tokens, want)
	}
	if want := 2*e*e + e; math.Abs(float64(requests)-want) > 1e-5 {
		t.Errorf("got %v requests, want %v", requests, want)
	}
	if tokens, _, _ := c.Recent(now.Add(-time.Hour)); tokens > 600 {
		t.Errorf("Recent with a clock that was set back: %v tokens", tokens)
	}
}

// TestBusy: a target that gets half of the work that it can do in a minute is half busy.
// It soon becomes idle without work.
func TestBusy(t *testing.T) {
	var c Counter
	now := time.Unix(1_700_000_000, 0)
	c.Placed(1000, now)
	if _, _, busy := c.Recent(now); busy != 0 {
		t.Errorf("busy = %v for a target of unknown speed, want 0", busy)
	}
	c.Prefill.Measure(1000, 100*time.Millisecond) // 100 µs a token
	for range 600 {
		now = now.Add(time.Second)
		c.Placed(5000, now)
	}
	if _, _, busy := c.Recent(now); math.Abs(float64(busy)-0.5) > 0.01 {
		t.Errorf("busy %v, want 0.5", busy)
	}
	if _, _, busy := c.Recent(now.Add(busyTime)); math.Abs(float64(busy)-0.5/math.E) > 0.01 {
		t.Errorf("busy %v a minute later", busy)
	}
	if _, _, busy := c.Recent(now.Add(10 * busyTime)); busy > 0.001 {
		t.Errorf("busy %v ten minutes later", busy)
	}
}

// A target that refused a request is full for a moment, while it has as many requests as then.
func TestFull(t *testing.T) {
	var c Counter
	now := time.Now()
	if c.Full(now) {
		t.Error("a new target is full")
	}
	held := []Hold{c.Hold(1), c.Hold(1), c.Hold(1), c.Hold(1)}
	c.NoRoom(now) // two of the four are refused
	held[3].Drop()
	c.NoRoom(now)
	held[2].Drop()
	if !c.Full(now) {
		t.Error("with the two requests that it has accepted it is not full")
	}
	held[1].Drop()
	if c.Full(now) {
		t.Error("it is full although one of its requests has ended")
	}
	held[1] = c.Hold(1)
	if !c.Full(now.Add(refusalCounts - 1)) {
		t.Error("it is no longer full after the next request")
	}
	if c.Full(now.Add(refusalCounts)) {
		t.Error("the refusal counts too long")
	}
	if c.Full(now.Add(-time.Hour)) {
		t.Error("the refusal counts after the clock has gone back")
	}
	later := now.Add(refusalCounts)
	held = append(held[:2], c.Hold(1), c.Hold(1))
	c.NoRoom(later) // the refusal of an earlier time no longer counts
	if held[3].Drop(); !c.Full(later) {
		t.Error("with the three requests that it has accepted it is not full")
	}
	if held[2].Drop(); c.Full(later) {
		t.Error("it is full with fewer requests than at the last refusal")
	}
	var others Counter // others use all room
	h := others.Hold(1)
	others.NoRoom(now)
	if h.Drop(); !others.Full(now) {
		t.Error("a target that refused the only request is not full")
	}
}
