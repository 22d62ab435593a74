package enginesim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// newBare builds an engine without starting it: its ranks and its protocol work
// without a socket, so that time can be simulated.
func newBare(t *testing.T, cfg Config) *Engine {
	t.Helper()
	e, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// newSequence is a sequence for a completion request of a bare engine.
func newSequence(t *testing.T, e *Engine, prompt, extra string) *core.Sequence {
	t.Helper()
	req, refusal := e.Proto.Parse(core.RouteCompletions, nil, []byte(completion(prompt, extra)))
	if refusal != nil {
		t.Fatal(refusal)
	}
	return e.NewSequences(req)[0]
}

func run(ctx context.Context, e *Engine, s *core.Sequence) error {
	return e.Proto.Generate(ctx, s, func(core.Token) {})
}

func TestTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newBare(t, Config{PrefillUsPerToken: 100, DecodeUsPerToken: 5000})
		prompt := words(1, 330)
		for _, want := range []struct {
			prefill time.Duration
			cached  int
		}{{33 * time.Millisecond, 0}, {time.Millisecond, 320}} {
			start := time.Now()
			var first time.Duration
			s := newSequence(t, e, prompt, `"max_tokens":10`)
			err := e.Proto.Generate(t.Context(), s, func(core.Token) {
				if first == 0 {
					first = time.Since(start)
				}
			})
			if err != nil || s.Finish != "length" || len(s.Output) != 10 || s.Cached != want.cached {
				t.Errorf("%v %s %d tokens, %d cached", err, s.Finish, len(s.Output), s.Cached)
			}
			if first != want.prefill+5*time.Millisecond || time.Since(start) != want.prefill+50*time.Millisecond {
				t.Errorf("first token after %v, all after %v", first, time.Since(start))
			}
		}
	})
}

// TestQueue: slots and blocks are granted in order of arrival. A request that
// leaves frees them at once, at every stage.
func TestQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newBare(t, Config{KVBlocks: 10, MaxRunning: 2, PrefillUsPerToken: 1000, DecodeUsPerToken: 1000})
		type job struct {
			s     *core.Sequence
			leave context.CancelFunc
			err   error
			done  bool
		}
		start := func(seed, tokens, output int) *job {
			ctx, cancel := context.WithCancel(t.Context())
			j := &job{s: newSequence(t, e, words(seed, tokens), fmt.Sprintf(`"max_tokens":%d`, output)), leave: cancel}
			go func() { j.err = run(ctx, e, j.s); j.done = true }()
			synctest.Wait()
			return j
		}
		expect := func(what string, used, running, waiting int) {
			t.Helper()
			synctest.Wait()
			if s := e.State(); s.BlocksUsed != used || s.RequestsRunning != running || s.RequestsWaiting != waiting {
				t.Errorf("%s: %d blocks, %d running, %d waiting; want %d, %d, %d", what, s.BlocksUsed, s.RequestsRunning, s.RequestsWaiting, used, running, waiting)
			}
			checkAccounting(t, e.Ranks[0])
		}
		a := start(1, 64, 17) // 80 tokens of KV: 5 blocks
		expect("first", 5, 1, 0)
		b := start(2, 100, 1) // 7 blocks: not enough are free
		expect("second", 5, 1, 1)
		c := start(3, 10, 1) // fits, but must wait for its turn
		expect("third", 5, 1, 2)
		b.leave()
		expect("second left the queue", 6, 2, 0)
		d := start(4, 10, 1) // no slot
		expect("fourth", 6, 2, 1)
		if !b.done || !errors.Is(b.err, context.Canceled) {
			t.Errorf("second: %v %v", b.done, b.err)
		}
		time.Sleep(11 * time.Millisecond) // third has finished
		expect("third ended", 6, 2, 0)
		a.leave() // while it prefills
		expect("first left in prefill", 1, 1, 0)
		time.Sleep(12 * time.Millisecond)
		expect("all ended", 0, 0, 0)
		if !c.done || c.err != nil || !d.done || d.err != nil {
			t.Errorf("third %v, fourth %v", c.err, d.err)
		}
		f := start(5, 64, 60)
		time.Sleep(80 * time.Millisecond)
		synctest.Wait()
		if n := len(f.s.Output); n != 16 {
			t.Errorf("%d tokens after 80 ms", n)
		}
		f.leave() // while it decodes
		expect("left in decode", 0, 0, 0)
		if f.err == nil {
			t.Error("no error after leaving")
		}
	})
}

func TestTooLarge(t *testing.T) {
	e := newBare(t, Config{KVBlocks: 4})
	s := newSequence(t, e, words(1, 60), `"max_tokens":100`)
	if err := run(t.Context(), e, s); err != nil || len(s.Output) != 4 {
		t.Errorf("%v, %d tokens", err, len(s.Output))
	}
	s = newSequence(t, e, words(1, 60), `"max_tokens":4`)
	if err := e.Ranks[0].Reserve(t.Context(), s, 65, true); err != core.ErrTooLarge {
		t.Errorf("reserve: %v", err)
	}
}

func TestLeaseTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newBare(t, Config{Lease: 30 * time.Second})
		r := e.Ranks[0]
		hold := func(key string, lease time.Duration) {
			s := newSequence(t, e, words(1, 40), "")
			if err := r.Reserve(t.Context(), s, 40, false); err != nil {
				t.Fatal(err)
			}
			r.Pin(s, key, lease)
			r.Release(s)
		}
		pinned := func(want int, expired int64) {
			t.Helper()
			synctest.Wait()
			if s := e.State(); s.BlocksPinned != want || s.BlocksUsed != want || s.LeasesExpired != expired {
				t.Errorf("pinned %d, used %d, expired %d; want %d, %d", s.BlocksPinned, s.BlocksUsed, s.LeasesExpired, want, expired)
			}
		}
		hold("a", 30*time.Second)
		time.Sleep(29 * time.Second)
		pinned(3, 0)
		if !r.Renew("a", 20*time.Second) || r.Renew("b", time.Second) {
			t.Error("renew")
		}
		time.Sleep(19 * time.Second)
		pinned(3, 0)
		if !r.Renew("a", time.Second/2) { // never shortens
			t.Error("renew")
		}
		time.Sleep(time.Second - time.Millisecond)
		pinned(3, 0)
		time.Sleep(time.Millisecond)
		pinned(0, 1)
		hold("c", 30*time.Second)
		if !r.Unpin("c") || r.Unpin("c") {
			t.Error("unpin")
		}
		pinned(0, 1)
		hold("d", 0)
		time.Sleep(time.Hour)
		pinned(3, 1)
		hold("d", time.Second) // the same key once more
		pinned(3, 1)
		time.Sleep(time.Second)
		pinned(0, 2)
		checkAccounting(t, r)
	})
}

// TestHammer runs and abandons requests at random points of simulated time and
// then finds every block free.
func TestHammer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newBare(t, Config{
			Connector: ConnectorVLLMNixl, KVBlocks: 60, MaxRunning: 5, PrefillUsPerToken: 50, DecodeUsPerToken: 700, Lease: 20 * time.Millisecond,
		})
		for _, r := range e.Ranks {
			var err error
			if r.Side, err = core.OpenSideChannel(r, "127.0.0.1", 0); err != nil {
				t.Fatal(err)
			}
			defer r.Side.Close(false)
		}
		rng := rand.New(rand.NewPCG(3, 4))
		var wg sync.WaitGroup
		for range 400 {
			extra := fmt.Sprintf(`"max_tokens":%d`, 1+rng.IntN(40))
			if rng.IntN(2) == 0 {
				extra = `"max_tokens":1,` + prefillParams
			}
			s := newSequence(t, e, words(rng.IntN(6), 1+rng.IntN(300)), extra)
			delay, stay := time.Duration(rng.IntN(300))*time.Millisecond, time.Duration(rng.IntN(60))*time.Millisecond
			leaves := rng.IntN(2) == 0
			wg.Go(func() {
				time.Sleep(delay)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if leaves {
					ctx, cancel = context.WithTimeout(ctx, stay)
					defer cancel()
				}
				if err := run(ctx, e, s); err == nil && s.Finish == "" || err != nil && !leaves {
					t.Errorf("ended with %v, finish %q", err, s.Finish)
				}
			})
		}
		for range 40 {
			time.Sleep(10 * time.Millisecond)
			checkAccounting(t, e.Ranks[0])
		}
		wg.Wait()
		time.Sleep(20 * time.Millisecond)
		synctest.Wait()
		if s := e.State(); s.BlocksUsed != 0 || s.BlocksPinned != 0 || s.RequestsRunning != 0 || s.RequestsWaiting != 0 || s.LeasesExpired == 0 {
			t.Errorf("state %+v", s)
		}
		checkAccounting(t, e.Ranks[0])
	})
}

// TestContinuation: when an answer's tokens are appended to the prompt, the
// continuation equals that of the same answer.
func TestContinuation(t *testing.T) {
	e := newBare(t, Config{})
	prompt := words(9, 30)
	whole := newSequence(t, e, prompt, `"max_tokens":20`)
	begun := newSequence(t, e, prompt, `"max_tokens":8`)
	for _, s := range []*core.Sequence{whole, begun} {
		if err := run(t.Context(), e, s); err != nil {
			t.Fatal(err)
		}
	}
	rest := newSequence(t, e, prompt+begun.AnswerText(), `"max_tokens":12`)
	if err := run(t.Context(), e, rest); err != nil {
		t.Fatal(err)
	}
	if got := begun.AnswerText() + rest.AnswerText(); got != whole.AnswerText() {
		t.Errorf("continued text %q, whole text %q", got, whole.AnswerText())
	}
	if rest.Cached != 32 {
		t.Errorf("cached %d of the history", rest.Cached)
	}
}
