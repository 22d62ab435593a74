package kvevents

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// removal returns a batch that removes one block.
func removal(hash byte) []byte {
	return slices.Concat([]byte{0x92, 0, 0x91, 0x92, 0xac}, []byte("BlockRemoved"), []byte{0x91, hash})
}

// locked is a notes with a lock, for a test that reads lines while the feed records.
type locked struct {
	mu sync.Mutex
	notes
}

func (l *locked) do(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
}

func (l *locked) Stored(e *kvindex.Stored) (applied, refused int) {
	l.do(func() { applied, refused = l.notes.Stored(e) })
	return applied, refused
}
func (l *locked) Removed(t kvindex.Tier, h []uint64) { l.do(func() { l.notes.Removed(t, h) }) }
func (l *locked) Moved(from, to kvindex.Tier, h []uint64) (refused int) {
	l.do(func() { refused = l.notes.Moved(from, to, h) })
	return refused
}
func (l *locked) Cleared() { l.do(func() { l.notes.Cleared() }) }

// await waits until the feed has recorded the last line of want, and compares all
// lines.
func (l *locked) await(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		l.do(func() { got = slices.Clone(l.lines) })
		if len(got) >= len(want) {
			break
		}
	}
	if !slices.Equal(got, want) {
		t.Fatalf("noted\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
	l.do(func() { l.lines = nil })
}

// counted counts the calls of hooks.
type counted struct {
	mu sync.Mutex
	by map[string]int
}

func (c *counted) add(what string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by == nil {
		c.by = map[string]int{}
	}
	c.by[what] += n
}

func (c *counted) hooks() Hooks {
	return Hooks{
		Applied:     func(_ string, n int) { c.add("applied", n) },
		Gap:         func(string) { c.add("gap", 1) },
		Replay:      func(_, outcome string) { c.add("replay "+outcome, 1) },
		Resync:      func(_, reason string) { c.add("resync "+reason, 1) },
		Malformed:   func(_ string, n int) { c.add("malformed", n) },
		BlockTokens: func(_ string, n int) { c.add("block tokens", n) },
	}
}

// expect waits until the counts equal want. The wait is needed because a replay ends
// a little after its last batch is applied.
func (c *counted) expect(t *testing.T, want map[string]int) {
	t.Helper()
	var got string
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		c.mu.Lock()
		got = fmt.Sprint(c.by)
		c.mu.Unlock()
		if got == fmt.Sprint(want) {
			return
		}
	}
	t.Errorf("counted %s, want %v", got, want)
}

// testSubscriber returns a subscriber, the record of its events, and its counts.
func testSubscriber(events, replay string) (*subscriber, *locked, *counted) {
	to, counts := &locked{}, &counted{}
	hooks := counts.hooks()
	s := &subscriber{
		rank:   &rank{engine: "a", hooks: &hooks, log: slog.New(slog.DiscardHandler)},
		events: events, replay: replay, batches: batches{to: to}, idle: replayIdle, subscribe: time.Hour,
	}
	return s, to, counts
}

func number(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }

// TestMessages passes messages to a subscriber without a replay endpoint.
func TestMessages(t *testing.T) {
	s, to, counts := testSubscriber("", "")
	for _, step := range []struct {
		frames [][]byte
		want   []string
	}{
		{[][]byte{[]byte("kv"), number(7), removal(1)}, []string{"remove gpu: [1]"}},
		{[][]byte{{}, number(8), removal(2)}, []string{"remove gpu: [2]"}},
		{[][]byte{number(9), removal(3)}, []string{"remove gpu: [3]"}},
		{[][]byte{{}, number(9), removal(3)}, nil},
		{[][]byte{{}, number(12), removal(4)}, []string{"clear", "remove gpu: [4]"}},
		{[][]byte{{}, number(11), removal(5)}, nil},
		{[][]byte{{}, number(0), removal(6)}, []string{"clear", "remove gpu: [6]"}},
		{[][]byte{{}, number(1), []byte("no batch")}, []string{"clear"}},
		{[][]byte{{}, number(2), removal(7)}, []string{"remove gpu: [7]"}},
		{[][]byte{{}, number(2), removal(8)}, []string{"clear", "remove gpu: [8]"}},
		{[][]byte{{}, {1, 2, 3}, removal(9)}, nil},
		{[][]byte{removal(9)}, nil},
		{[][]byte{{}, {}, {}, number(3), removal(9)}, nil},
		{[][]byte{{}, number(endOfReplay), removal(9)}, nil},
		{nil, nil},
	} {
		s.message(t.Context(), step.frames)
		to.await(t, step.want...)
	}
	counts.expect(t, map[string]int{"applied": 7, "gap": 1, "resync gap": 1, "resync restart": 2,
		"resync unreadable": 1, "malformed": 6})
}

// follow runs a subscriber until the test ends.
func follow(t *testing.T, s *subscriber) *worker {
	w := &worker{session: s.session, restarted: s.restarted, down: s.rank.connect}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { w.run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return w
}

// TestLateJoin: the replay delivers the batches from before the connection and the
// batches of a gap. Both forms of the replay work: with and without topics.
func TestLateJoin(t *testing.T) {
	for _, topics := range []bool{false, true} {
		t.Run(fmt.Sprintf("topics %v", topics), func(t *testing.T) {
			p := publish(t, true, topics)
			p.add(t, removal(1), true)
			p.add(t, removal(2), true)
			s, to, counts := testSubscriber(p.events(), p.replay())
			follow(t, s)
			to.await(t, "remove gpu: [1]", "remove gpu: [2]")
			p.subscribed(t)
			p.add(t, removal(3), true)
			p.add(t, removal(4), false)
			p.add(t, removal(5), true)
			p.send(3, removal(4))
			p.add(t, removal(6), true)
			to.await(t, "remove gpu: [3]", "remove gpu: [4]", "remove gpu: [5]", "remove gpu: [6]")
			counts.expect(t, map[string]int{"applied": 6, "gap": 1, "replay complete": 2})
			if st := s.rank.state(); !st.Connected || st.Last.IsZero() || st.Resyncs != 0 {
				t.Errorf("state %+v", st)
			}
		})
	}
}

// TestSlowSubscription: the publisher reads the subscription after the replay, and publishes a
// batch before. The subscriber asks for a second replay, because no later batch shows the gap.
func TestSlowSubscription(t *testing.T) {
	for _, before := range [][][]byte{nil, {removal(1)}} {
		p := publish(t, true, true, before...)
		p.mu.Lock()
		p.next = [][]byte{removal(2)}
		p.mu.Unlock()
		s, to, counts := testSubscriber(p.events(), p.replay())
		s.subscribe = 10 * time.Millisecond
		follow(t, s)
		want := []string{"remove gpu: [2]"}
		if before != nil {
			want = []string{"remove gpu: [1]", "remove gpu: [2]"}
		}
		to.await(t, want...)
		counts.expect(t, map[string]int{"applied": len(want), "replay complete": 2})
	}
}

// TestBufferTooShort: batches that the replay's buffer no longer has are lost. The
// subscriber clears the feed and continues with the batches that the buffer has.
func TestBufferTooShort(t *testing.T) {
	p := publish(t, true, true)
	s, to, counts := testSubscriber(p.events(), p.replay())
	follow(t, s)
	p.subscribed(t)
	p.add(t, removal(1), true)
	to.await(t, "remove gpu: [1]")
	for i := range byte(4) {
		p.add(t, removal(2+i), false)
	}
	p.mu.Lock()
	p.first = 3
	p.mu.Unlock()
	p.add(t, removal(6), true)
	to.await(t, "clear", "remove gpu: [4]", "remove gpu: [5]", "remove gpu: [6]")
	counts.expect(t, map[string]int{"applied": 4, "gap": 1, "replay complete": 2, "resync gap": 1})
}

// TestReconnect: after a lost connection an engine whose replay still has the last
// batch is the same engine, and no batch is lost. Otherwise the subscriber clears
// the feed.
func TestReconnect(t *testing.T) {
	for _, tt := range []struct {
		name   string
		same   bool
		replay bool
		want   []string
		counts map[string]int
	}{
		{"the same engine", true, true, []string{"remove gpu: [3]", "remove gpu: [4]"},
			map[string]int{"applied": 4, "replay complete": 2}},
		{"another engine", false, true, []string{"clear", "remove gpu: [8]", "remove gpu: [9]", "remove gpu: [3]", "remove gpu: [4]"},
			map[string]int{"applied": 6, "replay complete": 3, "resync reconnect": 1}},
		{"no replay", true, false, []string{"clear", "remove gpu: [4]"},
			map[string]int{"applied": 3, "resync reconnect": 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := publish(t, tt.replay, true)
			s, to, counts := testSubscriber(p.events(), p.replay())
			follow(t, s)
			p.subscribed(t)
			p.add(t, removal(1), true)
			p.add(t, removal(2), true)
			to.await(t, "remove gpu: [1]", "remove gpu: [2]")
			before := [][]byte{removal(8), removal(9)}
			if tt.same {
				p.mu.Lock()
				before = p.batches
				p.mu.Unlock()
			}
			p.restart(append(slices.Clone(before), removal(3))...)
			p.subscribed(t)
			p.add(t, removal(4), true)
			to.await(t, tt.want...)
			counts.expect(t, tt.counts)
		})
	}
}

// TestReplayFails: if the replay fails, the subscriber clears the feed and applies
// the events that follow. It does not ask a silent replay endpoint again at once.
func TestReplayFails(t *testing.T) {
	for _, tt := range []struct {
		name   string
		refuse bool
		failed int
	}{{"refused", true, 2}, {"silent", false, 1}} {
		t.Run(tt.name, func(t *testing.T) {
			endpoint := "tcp://127.0.0.1:1" // no program listens there
			if !tt.refuse {
				mute := listen(t, "ROUTER", func(c net.Conn) { io.Copy(io.Discard, c) })
				defer mute.close()
				endpoint = "tcp://" + mute.Addr().String()
			}
			p := publish(t, false, false)
			s, to, counts := testSubscriber(p.events(), endpoint)
			s.idle = 50 * time.Millisecond
			follow(t, s)
			p.subscribed(t)
			p.add(t, removal(1), true)
			p.add(t, removal(2), false)
			p.add(t, removal(3), true)
			p.add(t, removal(4), true)
			to.await(t, "remove gpu: [1]", "clear", "remove gpu: [3]", "remove gpu: [4]")
			counts.expect(t, map[string]int{"applied": 3, "gap": 1, "replay failed": tt.failed, "resync gap": 1})
		})
	}
}

// TestTold: the subscriber clears the feed and connects again, to the same address,
// when the manager reports that the engine has restarted.
func TestTold(t *testing.T) {
	p := publish(t, true, true)
	s, to, counts := testSubscriber(p.events(), p.replay())
	w := follow(t, s)
	p.subscribed(t)
	p.add(t, removal(1), true)
	to.await(t, "remove gpu: [1]")
	w.reset()
	to.await(t, "clear", "remove gpu: [1]")
	counts.expect(t, map[string]int{"applied": 2, "replay complete": 2, "resync told": 1})
}

// TestReplayOfAnother: a replay with another batch under a known number comes from
// another engine. The subscriber clears the feed.
func TestReplayOfAnother(t *testing.T) {
	s, to, counts := testSubscriber("", "")
	s.late(7, removal(1))
	s.late(7, removal(1))
	s.late(7, removal(2))
	s.late(8, removal(3))
	to.await(t, "remove gpu: [1]", "clear", "remove gpu: [2]", "remove gpu: [3]")
	counts.expect(t, map[string]int{"applied": 3, "resync restart": 1})
}

// TestManagerSubscribes: a manager applies the events of a publisher to the index
// until the manager has to forget the engine.
func TestManagerSubscribes(t *testing.T) {
	x := kvindex.New(kvindex.Options{})
	m := New(Options{Index: x})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = m.Run(ctx) })
	defer running.Wait()
	defer cancel()

	stored := func(hash, token byte) []byte {
		return slices.Concat([]byte{0x92, 0, 0x91, 0x97, 0xab}, []byte("BlockStored"),
			[]byte{0x91, hash, 0xc0, 0x91, token, 1, 0xc0, 0xa3}, []byte("GPU"))
	}
	p := publish(t, true, false, stored(1, 7))
	if err := m.Follow(Source{
		Name: "a", Model: "m", Targets: []kvindex.Target{x.Add()}, BlockTokens: 1,
		Publishers: []engine.KVEndpoints{{Events: p.events(), Replay: p.replay()}},
	}); err != nil {
		t.Fatal(err)
	}
	p.subscribed(t)
	p.add(t, stored(2, 8), true)
	for end := time.Now().Add(20 * time.Second); matched(x, 7)[0]+matched(x, 8)[0] < 2; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the index does not follow: %+v", m.States("a"))
		}
	}
	m.Forget("a")
	p.add(t, stored(3, 9), true)
	if got := matched(x, 9); got[0] != 0 {
		t.Errorf("matched blocks %v after Forget", got)
	}
}
