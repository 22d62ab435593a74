package kvevents

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/engine/kvevents"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

const (
	blockTokens = 4 // of engine.py
	model       = "model"
	patience    = 20 * time.Second
)

// follower is a manager that follows one engine.py.
type follower struct {
	t       *testing.T
	index   *kvindex.Index
	targets []kvindex.Target
	manager *kvevents.Manager

	mu     sync.Mutex
	counts map[string]int // counts of the hooks' calls; guarded by mu
}

func follow(t *testing.T, s *script, encoding string, replay bool) *follower {
	t.Helper()
	f := &follower{t: t, index: kvindex.New(kvindex.Options{}), counts: map[string]int{}}
	f.targets = []kvindex.Target{f.index.Add(), f.index.Add()}
	f.manager = kvevents.New(kvevents.Options{Index: f.index, Hooks: kvevents.Hooks{
		Gap:       func(string) { f.count("gap", 1) },
		Replay:    func(_, outcome string) { f.count("replay "+outcome, 1) },
		Resync:    func(_, reason string) { f.count("resync "+reason, 1) },
		Malformed: func(_ string, n int) { f.count("malformed", n) },
	}})
	source := kvevents.Source{Name: "engine", Model: model, Targets: f.targets}
	for rank := range f.targets {
		at := engine.KVEndpoints{Events: fmt.Sprint("tcp://127.0.0.1:", s.events+rank)}
		if replay {
			at.Replay = fmt.Sprint("tcp://127.0.0.1:", s.replay+rank)
		}
		source.Publishers = append(source.Publishers, at)
	}
	if strings.HasPrefix(encoding, "trtllm") {
		source.Kind, source.URL = kvevents.Poll, fmt.Sprint("http://127.0.0.1:", s.events)
		transport := &http.Transport{}
		t.Cleanup(transport.CloseIdleConnections)
		source.Transport = transport
	}
	if err := f.manager.Follow(source); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.manager.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	return f
}

func (f *follower) count(what string, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts[what] += n
}

func (f *follower) counted(what string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.counts[what]
}

// told returns the numbers of events so far, as a text.
func (f *follower) told() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return fmt.Sprint(f.counts)
}

// match returns the index's answer for a prompt at one rank.
func (f *follower) match(rank int, r row) [3]uint32 {
	out := make([]kvindex.Match, f.index.Targets())
	f.index.Match(kvindex.AppendTokens(nil, kvindex.Seed(model, r.Lora, r.Salt), r.Tokens, blockTokens), out)
	m := out[f.targets[rank]]
	return [3]uint32{m.GPU, m.CPU, m.Disk}
}

// compare returns the number of blocks that the index lacks, and one block that
// it has in addition or in a better tier than the engine.
func (f *follower) compare(ranks [][]row) (missing int, wrong string) {
	for rank, rows := range ranks {
		for i, r := range rows {
			got := f.match(rank, r)
			missing += int(r.Held[0]+r.Held[1]+r.Held[2]) - int(got[0]+got[1]+got[2])
			if got != r.Held {
				wrong = fmt.Sprintf("rank %d, prompt %d: matched %v, the engine holds %v", rank, i, got, r.Held)
			}
			if got[0]+got[1]+got[2] > r.Held[0]+r.Held[1]+r.Held[2] {
				return missing, wrong
			}
		}
	}
	if missing > 0 {
		return missing, ""
	}
	return 0, wrong
}

// caughtUp makes the engine store a new prompt on each rank, and waits until
// the index has it: then it has processed all earlier events.
func (f *follower) caughtUp(s *script) [][]row {
	f.t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); {
		ranks := s.check()
		for again := time.Now().Add(time.Second); time.Now().Before(again); time.Sleep(2 * time.Millisecond) {
			seen := true
			for rank, rows := range ranks {
				seen = seen && f.match(rank, rows[len(rows)-1])[0] == 1
			}
			if seen {
				return ranks
			}
		}
	}
	f.t.Fatalf("the index does not follow: %s, %+v", f.told(), f.manager.States("engine"))
	return nil
}

// holdsNoMore checks that the index has no block that the engine does not hold.
func (f *follower) holdsNoMore(s *script) {
	f.t.Helper()
	missing, wrong := f.compare(f.caughtUp(s))
	if wrong != "" {
		f.t.Errorf("%s; %s", wrong, f.told())
	}
	f.t.Logf("%d blocks are not in the index; %s", missing, f.told())
}

// holdsAll checks that the index has exactly the blocks that the engine holds.
func (f *follower) holdsAll(s *script) {
	f.t.Helper()
	missing, wrong := f.compare(f.caughtUp(s))
	if missing != 0 || wrong != "" {
		f.t.Errorf("%d blocks are not in the index; %s; %s", missing, wrong, f.told())
	}
}

// TestEngines runs engines of each encoding with faults. The index may lack
// lost blocks, but must never have wrong ones. It is complete again after all
// blocks have been replaced. Where a replay returns the lost events, it lacks
// none.
func TestEngines(t *testing.T) {
	for _, tt := range []struct {
		encoding string
		replay   bool
		faults   []string // no effect if there is a replay
	}{
		{"vllm-2025", true, []string{"gap", "reorder", "duplicate", "junk", "restart"}},
		{"vllm-bytes", true, []string{"gap", "reorder", "duplicate", "junk", "restart"}},
		{"vllm-2026", true, []string{"gap", "reorder", "duplicate", "junk", "restart"}},
		{"vllm-live", false, []string{"gap", "reorder", "duplicate", "junk", "restart"}},
		{"sglang", true, []string{"gap", "reorder", "duplicate", "junk", "restart"}},
		{"sglang-eagle", false, []string{"gap", "reorder", "duplicate", "junk", "restart"}},
		{"trtllm-v1", false, []string{"gap", "error", "cut", "restart"}},
		{"trtllm-v2", false, []string{"gap", "error", "cut", "restart"}},
	} {
		t.Run(tt.encoding, func(t *testing.T) {
			t.Parallel()
			s := start(t, tt.encoding, 0, 0, 1)
			s.steps(50) // before any subscriber connects
			f := follow(t, s, tt.encoding, tt.replay)
			polled := strings.HasPrefix(tt.encoding, "trtllm")
			if tt.replay || polled {
				f.holdsAll(s)
			} else {
				f.holdsNoMore(s)
			}
			for range 5 {
				s.steps(150, tt.faults...)
				if tt.replay {
					f.holdsAll(s)
				} else {
					f.holdsNoMore(s)
				}
			}
			s.steps(150, append(tt.faults, "garbage", "garbage")...)
			f.holdsNoMore(s)
			s.op("garbage")
			f.holdsNoMore(s)
			s.op("turnover")
			f.holdsAll(s)
			s.steps(150)
			f.holdsAll(s)
			if n := f.counted("malformed"); n == 0 {
				t.Error("no garbage was counted")
			}
			if !polled && f.counted("gap") == 0 {
				t.Error("no gap was counted")
			}

			// The engine dies, and another replaces it.
			s.kill()
			s = start(t, tt.encoding, s.events, s.replay, 2)
			s.steps(50)
			if tt.replay || polled {
				f.holdsAll(s)
			} else {
				f.holdsNoMore(s)
			}
			s.op("turnover")
			f.holdsAll(s)
		})
	}
}

// TestForeignPublisher: an endpoint that does not use ZeroMQ is reported, and
// an engine that replaces it is followed.
func TestForeignPublisher(t *testing.T) {
	s := start(t, "trtllm-v1", 0, 0, 1)
	f := follow(t, s, "vllm-2025", true)
	state := func() kvevents.State { return f.manager.States("engine")[0] }
	for end := time.Now().Add(patience); state().Error == ""; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("state %+v", state())
		}
	}
	if state().Connected {
		t.Errorf("state %+v", state())
	}
	s.kill()
	s = start(t, "vllm-2025", s.events, s.replay, 2)
	s.steps(50)
	f.holdsAll(s)
	if st := state(); !st.Connected || st.Error != "" || st.BlockTokens != blockTokens {
		t.Errorf("state %+v", st)
	}
}
