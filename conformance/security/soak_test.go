package security

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

const (
	// honestClients is the number of simultaneous honest clients, a third over
	// each protocol.
	honestClients = 18
	// soakHostile is how many hostile clients there are.
	soakHostile = 2
	// think is an honest client's wait between two requests, so that the honest
	// load alone does not use both cores.
	think = 20 * time.Millisecond
	// soakAsserted is the shortest soak whose latency and memory are judged. In a
	// shorter one they say more about the machine.
	soakAsserted = time.Minute
	// soakGrowth is how much memory the attackers may cost, in bytes.
	soakGrowth = 256 << 20
)

// TestHostileSoak loads a pair of simulated engines with honest clients, first
// alone and then together with hostile ones, for PDPROXY_SECURITY_SOAK.
func TestHostileSoak(t *testing.T) {
	d := 6 * time.Second
	if v := os.Getenv("PDPROXY_SECURITY_SOAK"); v != "" {
		var err error
		if d, err = time.ParseDuration(v); err != nil || d <= 0 {
			t.Fatalf("PDPROXY_SECURITY_SOAK=%q is no duration", v)
		}
	} else {
		t.Parallel()
	}
	s := &soak{pair: newPair(t, setup{secure: true, server: shortTimes}), want: map[string]string{}, attacks: map[string]*tally{}}
	s.learn()
	alone := s.load(max(d/4, time.Second), false)
	before := s.rss()
	s.watch()
	beside := s.load(d-d/4, true)
	s.unwatch()
	s.serves("after the soak")
	s.nothingLeft()
	s.report(alone, beside, before)
	if alone.failed+beside.failed > 0 {
		t.Errorf("%d honest requests failed without attackers, %d with attackers: %v", alone.failed, beside.failed, beside.first)
	}
	if d >= soakAsserted {
		if beside.percentile(99) > 2*alone.percentile(99) {
			t.Errorf("p99 is %s with attackers, %s without", beside.percentile(99), alone.percentile(99))
		}
		s.judgeMemory(before)
	}
}

// soak is one run of the load.
type soak struct {
	*pair
	want map[string]string // the text of each prompt, from the first answer

	mu      sync.Mutex
	attacks map[string]*tally // by kind

	memory   []int64 // RSS in bytes, ten samples a second at most
	watching chan struct{}
	watched  sync.WaitGroup
}

// tally counts the tries of one kind of attack.
type tally struct{ tries, answered atomic.Int64 }

// measured holds the measurements of the honest clients.
type measured struct {
	times      []time.Duration
	ok, failed int
	first      error // the first failure
}

// percentile is the time that p per cent of the requests needed at most.
func (m *measured) percentile(p int) time.Duration {
	if len(m.times) == 0 {
		return 0
	}
	slices.Sort(m.times)
	return m.times[min(len(m.times)-1, len(m.times)*p/100)]
}

// honestPrompts are few, so that every answer can be compared with the first one.
var honestPrompts = []string{"a short prompt", "a prompt of some more words", strings.Repeat("a long prompt ", 60), "the last prompt"}

// learn asks each prompt once.
func (s *soak) learn() {
	c := s.client(1, "127.0.0.1")
	defer c.close()
	for _, prompt := range honestPrompts {
		text, err := answerOf(c, prompt, false)
		if err != nil {
			s.t.Fatal(err)
		}
		s.want[prompt] = text
	}
}

// answerOf is the text of one chat answer.
func answerOf(c *honestClient, prompt string, stream bool) (string, error) {
	body := strings.Replace(chat(prompt, stream), `"max_tokens":3`, `"max_tokens":12`, 1)
	text, err := c.post(chatPath, body)
	if err != nil {
		return "", err
	}
	if stream && !strings.Contains(text, "data: [DONE]") {
		return "", fmt.Errorf("the stream has no end: %.300q", text)
	}
	var all strings.Builder
	for line := range strings.Lines(text) {
		data := strings.TrimSpace(strings.TrimPrefix(line, "data: "))
		if data == "" || data == "[DONE]" {
			continue
		}
		var event struct {
			Choices []struct {
				Message, Delta struct{ Content string }
			}
		}
		if err := json.Unmarshal([]byte(data), &event); err != nil {
			return "", fmt.Errorf("%w: %.200q", err, data)
		}
		for _, choice := range event.Choices {
			all.WriteString(choice.Message.Content + choice.Delta.Content)
		}
	}
	return all.String(), nil
}

// load runs the honest clients for d, together with the hostile ones.
func (s *soak) load(d time.Duration, attacked bool) *measured {
	total, end := &measured{}, time.Now().Add(d)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for n := range honestClients {
		wg.Go(func() {
			m := s.honest(1+n%3, n%2 == 0, end)
			mu.Lock()
			defer mu.Unlock()
			total.times = append(total.times, m.times...)
			total.ok, total.failed = total.ok+m.ok, total.failed+m.failed
			if total.first == nil {
				total.first = m.first
			}
		})
	}
	for n := range soakHostile {
		if attacked {
			wg.Go(func() { s.hostile(n, end) })
		}
	}
	wg.Wait()
	return total
}

// honest asks over one protocol until the end.
func (s *soak) honest(major int, stream bool, end time.Time) *measured {
	m, c := &measured{}, s.client(major, "127.0.0.1")
	defer c.close()
	for n := 0; time.Now().Before(end); n++ {
		prompt := honestPrompts[n%len(honestPrompts)]
		begun := time.Now()
		text, err := answerOf(c, prompt, stream)
		if err == nil && text != s.want[prompt] {
			err = fmt.Errorf("the text is %q, want %q", text, s.want[prompt])
		}
		if err != nil {
			m.failed++
			if m.first == nil {
				m.first = fmt.Errorf("HTTP/%d, stream %t: %w", major, stream, err)
			}
		} else {
			m.ok++
			m.times = append(m.times, time.Since(begun))
		}
		time.Sleep(think)
	}
	return m
}

// hostile runs one attack after another until the end. The first attacker has the
// address of the honest clients for a part of its time, the others have their own.
func (s *soak) hostile(n int, end time.Time) {
	kinds, rng := s.kinds(), rand.New(rand.NewPCG(uint64(n), 1))
	for time.Now().Before(end) {
		a := s.attacker()
		a.from = fmt.Sprintf("127.0.0.%d", 60+rng.IntN(20))
		if n == 0 && rng.IntN(3) == 0 {
			a.from = "127.0.0.1"
		}
		kind := kinds[rng.IntN(len(kinds))]
		count := s.tally(kind.name)
		count.tries.Add(1)
		if kind.run(a, rng) {
			count.answered.Add(1)
		}
	}
}

func (s *soak) tally(kind string) *tally {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.attacks[kind] == nil {
		s.attacks[kind] = &tally{}
	}
	return s.attacks[kind]
}

// soakKind is one kind of attack. run returns true if the proxy answered or ended it.
type soakKind struct {
	name string
	run  func(a attacker, rng *rand.Rand) bool
}

func (s *soak) kinds() []soakKind {
	const brief = 4 * time.Second
	slow := slowAttacks()
	kinds := []soakKind{
		{"slow heads and bodies", func(a attacker, rng *rand.Rand) bool {
			var ended atomic.Int64
			first := rng.IntN(len(slow))
			testbed.Parallel(8, 8, func(n int) {
				if ok, _ := slow[(first+n)%len(slow)].run(a, brief); ok {
					ended.Add(1)
				}
			})
			return ended.Load() == 8
		}},
		{"announced bodies", func(a attacker, rng *rand.Rand) bool {
			var held holder
			defer held.release()
			held.announce(a, 1+rng.IntN(3), 40, 16<<20)
			time.Sleep(200 * time.Millisecond)
			return true
		}},
		{"resets over HTTP/2", func(a attacker, _ *rand.Rand) bool { return reset2(a, 100) == nil }},
		{"resets over HTTP/3", func(a attacker, _ *rand.Rand) bool { return reset3(a, 100) == nil }},
		{"frame floods", func(a attacker, rng *rand.Rand) bool { return flood2(a, rng.IntN(len(frameFloods)), 500) }},
		{"idle connections", func(a attacker, _ *rand.Rand) bool {
			var held holder
			defer held.release()
			for range 30 {
				if c, err := a.dial("http/1.1"); err == nil {
					held.add(func() { c.Close() })
					io.WriteString(c, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
				}
			}
			time.Sleep(100 * time.Millisecond)
			return true
		}},
		{"framing", func(a attacker, rng *rand.Rand) bool {
			cases := framingCases()
			n := rng.IntN(len(cases))
			answer, _, err := a.exchange(cases[n].expand(n), 300*time.Millisecond, cases[n].half)
			return err == nil && answer != ""
		}},
		{"header injection", func(a attacker, rng *rand.Rand) bool {
			head := post2(injectedFields[rng.IntN(len(injectedFields))]...)
			ask := a.ask2
			if rng.IntN(2) == 0 {
				ask = a.ask3
			}
			_, err := ask(chat("injected", false), head...)
			return err == nil
		}},
		{"smuggled parameters", func(a attacker, rng *rand.Rand) bool {
			c := s.client(1, a.from)
			defer c.close()
			c.post(chatPath, smuggles(chatPath, carriers[rng.IntN(3)], 4096, nil))
			return true
		}},
		{"garbage", func(a attacker, rng *rand.Rand) bool {
			answer, ended, err := a.exchange(strings.Repeat("\x00\xffgarbage\r\n", 100), time.Second, false)
			return err == nil && (ended || answer != "")
		}},
	}
	return kinds
}

// flood2 sends n frames of one flood.
func flood2(a attacker, kind, n int) bool {
	c, err := a.http2()
	if err != nil {
		return false
	}
	defer c.Close()
	go c.drain()
	c.SetWriteDeadline(time.Now().Add(5 * time.Second))
	for i := range n {
		c.mu.Lock()
		err := frameFloods[kind].write(c, i)
		c.mu.Unlock()
		if err != nil {
			break
		}
	}
	return true
}

// watch samples the memory until unwatch.
func (s *soak) watch() {
	s.watching = make(chan struct{})
	s.watched.Go(func() {
		for {
			select {
			case <-s.watching:
				return
			case <-time.After(100 * time.Millisecond):
				s.memory = append(s.memory, s.rss())
			}
		}
	})
}

func (s *soak) unwatch() {
	close(s.watching)
	s.watched.Wait()
}

// slope returns by how many bytes the memory grew over the second half,
// according to the best-fitting line.
func (s *soak) slope() float64 {
	half := s.memory[len(s.memory)/2:]
	n := float64(len(half))
	var x, y, xx, xy float64
	for i, rss := range half {
		x, y, xx, xy = x+float64(i), y+float64(rss), xx+float64(i*i), xy+float64(i)*float64(rss)
	}
	if d := n*xx - x*x; d != 0 {
		return n * (n*xy - x*y) / d
	}
	return 0
}

// judgeMemory asserts that the memory is bounded and flat.
func (s *soak) judgeMemory(before int64) {
	s.t.Helper()
	if most := slices.Max(s.memory); most-before > soakGrowth {
		s.t.Errorf("the resident memory grew from %d MiB to %d MiB", before>>20, most>>20)
	}
	if grown := s.slope(); grown > 24<<20 {
		s.t.Errorf("the resident memory grew by %.0f MiB over the second half", grown/(1<<20))
	}
}

// report prints the table of the run.
func (s *soak) report(alone, beside *measured, before int64) {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%-24s %8s %8s\n", "attack", "tries", "ended")
	var names []string
	for name := range s.attacks {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(&b, "%-24s %8d %8d\n", name, s.attacks[name].tries.Load(), s.attacks[name].answered.Load())
	}
	fmt.Fprintf(&b, "\n%-24s %8s %8s %12s %12s\n", "honest clients", "ok", "failed", "p50", "p99")
	for _, row := range []struct {
		name string
		m    *measured
	}{{"alone", alone}, {"beside attackers", beside}} {
		fmt.Fprintf(&b, "%-24s %8d %8d %12s %12s\n", row.name, row.m.ok, row.m.failed, row.m.percentile(50).Round(10*time.Microsecond), row.m.percentile(99).Round(10*time.Microsecond))
	}
	fmt.Fprintf(&b, "\nresident memory: %d MiB before, %d MiB at most, %d MiB at the end, %+.1f MiB over the second half\n",
		before>>20, slices.Max(s.memory)>>20, s.memory[len(s.memory)-1]>>20, s.slope()/(1<<20))
	s.t.Log(b.String())
}
