package kvevents

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// drain simulates a TensorRT-LLM engine for a poller. Each answer contains the whole
// queue and empties the queue.
type drain struct {
	mu    sync.Mutex
	queue []string // events
	err   error    // error of the next polls
	code  int
	cut   bool // the next answer ends too early
	polls []time.Time
	reqs  []string
}

func (d *drain) RoundTrip(r *http.Request) (*http.Response, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.polls = append(d.polls, time.Now())
	d.reqs = append(d.reqs, fmt.Sprint(r.Method, " ", r.URL, " ", r.Header.Get("Authorization")))
	if d.err != nil {
		return nil, d.err
	}
	var body io.Reader = strings.NewReader("[" + strings.Join(d.queue, ",") + "]")
	if d.cut {
		body = io.MultiReader(strings.NewReader(`[{"event_id"`), failing{})
	}
	d.queue, d.cut = nil, false
	return &http.Response{StatusCode: max(d.code, 200), Body: io.NopCloser(body)}, nil
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

func (d *drain) set(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

// gaps returns the times between the polls since the last call of gaps, in ms.
func (d *drain) gaps() (ms []int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := 1; i < len(d.polls); i++ {
		ms = append(ms, int(d.polls[i].Sub(d.polls[i-1]).Milliseconds()))
	}
	d.polls = d.polls[max(len(d.polls)-1, 0):]
	return ms
}

// polled calls f in simulated time, with a manager that polls one engine of two
// ranks.
func polled(t *testing.T, f func(t *testing.T, m *Manager, e *drain, x *kvindex.Index, counts *counted)) {
	synctest.Test(t, func(t *testing.T) {
		x := kvindex.New(kvindex.Options{})
		counts, e := &counted{}, &drain{}
		m := New(Options{Index: x, Hooks: counts.hooks()})
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() {
			if err := m.Run(ctx); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
		if err := m.Follow(Source{
			Name: "a", Kind: Poll, Model: "m", Targets: []kvindex.Target{x.Add(), x.Add()},
			URL: "http://a:8000/", Transport: e, APIKey: "secret",
		}); err != nil {
			t.Fatal(err)
		}
		f(t, m, e, x, counts)
		cancel()
		running.Wait()
	})
}

// matched returns for each target the number of the prompt's blocks that the target
// holds. A block has one token.
func matched(x *kvindex.Index, tokens ...uint32) []uint32 {
	out := make([]kvindex.Match, x.Targets())
	x.Match(kvindex.AppendTokens(nil, kvindex.Seed("m", "", ""), tokens, 1), out)
	var n []uint32
	for _, m := range out {
		n = append(n, m.Blocks())
	}
	return n
}

func TestPoll(t *testing.T) {
	polled(t, func(t *testing.T, m *Manager, e *drain, x *kvindex.Index, counts *counted) {
		expect := func(want ...uint32) {
			t.Helper()
			time.Sleep(2 * pollMax)
			synctest.Wait()
			if got := matched(x, 7, 8); !slices.Equal(got, want) {
				t.Errorf("matched %v, want %v", got, want)
			}
		}
		e.set(func() {
			e.queue = []string{storedJSON(0, "", "null", blockJSON("1", 0, "", 7), blockJSON("2", 0, "", 8)),
				storedJSON(0, `,"attention_dp_rank":1`, "null", blockJSON("1", 0, "", 7))}
		})
		expect(2, 1)
		if got := e.reqs[0]; got != "POST http://a:8000/kv_cache_events Bearer secret" {
			t.Errorf("request %q", got)
		}
		if st := m.States("a"); len(st) != 2 || !st[0].Connected || st[1].BlockTokens != 1 || st[0].Last.IsZero() {
			t.Errorf("states %+v", st)
		}
		counts.expect(t, map[string]int{"applied": 3, "block tokens": 2})

		e.set(func() {
			e.queue = []string{`{"event_id":1,"data":{"type":"removed","block_hashes":[2]},"window_size":4096}`}
		})
		expect(1, 1)
		e.set(func() { e.queue = []string{storedJSON(9, "", "null", blockJSON("9", 0, "", 9))} })
		expect(0, 1)
		e.set(func() { e.cut = true })
		expect(0, 0)
		e.set(func() {
			e.queue = []string{storedJSON(10, "", "null", blockJSON("1", 0, "", 7)), storedJSON(1, `,"attention_dp_rank":1`, "null", blockJSON("1", 0, "", 7))}
		})
		expect(1, 1)
		e.set(func() { e.queue = []string{storedJSON(0, "", "null", blockJSON("1", 0, "", 8))} })
		expect(0, 1)
		e.set(func() { e.queue = []string{`{"event_id":1,"da`} })
		expect(0, 0)
		counts.expect(t, map[string]int{"applied": 8, "block tokens": 2, "gap": 1, "malformed": 1,
			"resync gap": 1, "resync restart": 1, "resync unreadable": 4})
	})
}

// TestPollGone: an engine that refuses connections loses its blocks at once. An
// engine that does not answer keeps its blocks.
func TestPollGone(t *testing.T) {
	polled(t, func(t *testing.T, m *Manager, e *drain, x *kvindex.Index, counts *counted) {
		e.set(func() { e.queue = []string{storedJSON(0, "", "null", blockJSON("1", 0, "", 7))} })
		time.Sleep(2 * pollMax)
		e.set(func() { e.err = context.DeadlineExceeded })
		time.Sleep(2 * pollFailed)
		synctest.Wait()
		if got := matched(x, 7); got[0] != 1 || m.States("a")[0].Connected {
			t.Errorf("matched %v, %+v", got, m.States("a"))
		}
		e.set(func() { e.err = &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED} })
		time.Sleep(2 * pollFailed)
		synctest.Wait()
		if got := matched(x, 7); got[0] != 0 {
			t.Errorf("matched %v", got)
		}
		e.set(func() { e.err, e.code = nil, 404 })
		time.Sleep(2 * pollFailed)
		e.set(func() {
			e.code = 0
			e.queue = []string{storedJSON(0, "", "null", blockJSON("1", 0, "", 7))}
		})
		time.Sleep(2 * pollFailed)
		synctest.Wait()
		if got := matched(x, 7); got[0] != 1 || !m.States("a")[0].Connected {
			t.Errorf("matched %v, %+v", got, m.States("a"))
		}
		counts.expect(t, map[string]int{"applied": 2, "block tokens": 1, "resync restart": 1})
	})
}

// TestPollPace: the manager polls often while events come, and rarely otherwise.
func TestPollPace(t *testing.T) {
	polled(t, func(t *testing.T, m *Manager, e *drain, x *kvindex.Index, counts *counted) {
		time.Sleep(4 * time.Second)
		if got := e.gaps(); !slices.Equal(got, []int{100, 200, 400, 800, 1000, 1000}) {
			t.Errorf("idle: %v", got)
		}
		e.set(func() { e.queue = []string{storedJSON(0, "", "null", blockJSON("1", 0, "", 7))} })
		time.Sleep(600 * time.Millisecond)
		if got := e.gaps(); !slices.Equal(got, []int{1000, 50}) {
			t.Errorf("pauses after an event: %v", got)
		}
		e.set(func() { e.err = errors.New("no") })
		time.Sleep(30 * time.Second)
		if got := e.gaps(); got[len(got)-1] != int(pollFailed.Milliseconds()) {
			t.Errorf("failing: %v", got)
		}
	})
}

// followed returns the names of the followed instances, sorted.
func (m *Manager) followed() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.followers))
}

func TestManager(t *testing.T) {
	polled(t, func(t *testing.T, m *Manager, e *drain, x *kvindex.Index, counts *counted) {
		e.set(func() { e.queue = []string{storedJSON(0, "", "null", blockJSON("1", 0, "", 7))} })
		time.Sleep(2 * pollMax)
		m.Restarted("a")
		m.Restarted("nobody")
		synctest.Wait()
		if got := matched(x, 7); got[0] != 0 {
			t.Errorf("matched %v after a restart", got)
		}
		counts.expect(t, map[string]int{"applied": 1, "block tokens": 1, "resync told": 1})

		for _, bad := range []Source{
			{Name: "b"},
			{Name: "b", Targets: []kvindex.Target{0}, URL: "http://b", Kind: Poll},
		} {
			if m.Follow(bad) == nil {
				t.Errorf("%+v: no error", bad)
			}
		}
		if got := m.followed(); !slices.Equal(got, []string{"a"}) {
			t.Errorf("followed %v", got)
		}
		other := &drain{}
		if err := m.Follow(Source{Name: "a", Kind: Poll, Targets: []kvindex.Target{0}, URL: "http://a", Transport: other}); err != nil {
			t.Fatal(err)
		}
		e.gaps()
		time.Sleep(10 * time.Second)
		if got := e.gaps(); len(got) != 0 {
			t.Errorf("the former source was polled after %v ms", got)
		}
		if len(other.gaps()) == 0 || len(m.States("a")) != 1 {
			t.Error("the new source is not followed")
		}
		m.Forget("a")
		m.Forget("a")
		if m.States("a") != nil || len(m.followed()) != 0 {
			t.Error("still followed")
		}
	})
}
