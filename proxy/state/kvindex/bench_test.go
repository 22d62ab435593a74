package kvindex

import (
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/usage"
)

const (
	benchTargets = 64
	benchPrompt  = 2048 // blocks of a prompt
	benchBlock   = 16   // tokens of a block
	benchEvent   = 16   // blocks of an event
)

// fleet is an index with its feeds and the data that was stored through them.
type fleet struct {
	x       *Index
	feeds   []*Feed
	rand    *rand.Rand
	prompts []prompt
	bytes   int64 // heap bytes of the index and its feeds
}

// prompt is the number of a prompt. Its tokens depend only on the number.
type prompt struct {
	number uint64
	blocks int
}

// systemBlocks is the number of blocks that all prompts share.
const systemBlocks = 64

// tokens returns the tokens of block i of a prompt, and the engine's hash of the block.
func (p prompt) tokens(i int, dst []uint32) ([]uint32, uint64) {
	key := p.number
	if i < systemBlocks {
		key = 0
	}
	z := key*0x9e3779b97f4a7c15 + uint64(i)*0xbf58476d1ce4e5b9
	for k := range benchBlock {
		z = z*6364136223846793005 + 1442695040888963407
		dst = append(dst, uint32(z>>33)+uint32(k))
	}
	return dst, z | 1
}

// chain returns the hashes of a prompt.
func (p prompt) chain() []Hash {
	var tokens []uint32
	for i := range p.blocks {
		tokens, _ = p.tokens(i, tokens)
	}
	return AppendTokens(nil, Seed("m", "", ""), tokens, benchBlock)
}

// events returns the store events of a prompt.
func (p prompt) events() []Stored {
	var all []Stored
	var parent uint64
	for at := 0; at < p.blocks; at += benchEvent {
		e := Stored{BlockTokens: benchBlock, HasParent: at > 0, Parent: parent}
		for i := at; i < min(at+benchEvent, p.blocks); i++ {
			e.Tokens, parent = p.tokens(i, e.Tokens)
			e.Hashes = append(e.Hashes, parent)
		}
		all = append(all, e)
	}
	return all
}

// newFleet fills an index up to a number of (block, target) pairs. All prompts have a
// common beginning, and half of them have the maximum length. One target holds each
// prompt; two more targets hold one in four prompts; all targets hold four prompts.
func newFleet(entries int) *fleet {
	before := usage.Heap()
	f := &fleet{
		x:    New(Options{MaxEntries: 4 * entries}),
		rand: rand.New(rand.NewPCG(1, 2)),
	}
	for range benchTargets {
		f.feeds = append(f.feeds, NewFeed(f.x, f.x.Add(), "m"))
	}
	for number := uint64(1); int(f.x.entries.Load()) < entries; number++ {
		p, t, holders := prompt{number, benchPrompt}, f.rand.IntN(benchTargets), 1
		switch {
		case number <= 4:
			holders = benchTargets
		case number%4 == 0:
			holders = 3
		}
		if number%2 == 0 {
			p.blocks = systemBlocks + f.rand.IntN(benchPrompt-systemBlocks)
		}
		events := p.events()
		for k := range holders {
			for i := range events {
				f.feeds[(t+k)%benchTargets].Stored(&events[i])
			}
		}
		f.prompts = append(f.prompts, p)
	}
	f.bytes = usage.Heap() - before
	return f
}

// churn stores prompts and removes them again: a steady load of block events.
type churn struct {
	f       *fleet
	events  [][]Stored
	removed [][]uint64
	next    int
}

// churnPrompts is the number of prompts that a churn uses. Half of them are stored at any
// time.
const churnPrompts = 512

func (f *fleet) churn() *churn {
	c := &churn{f: f}
	for i := range churnPrompts {
		p := prompt{uint64(1<<32 + i), benchPrompt}
		c.events = append(c.events, p.events())
		var hashes []uint64
		for b := p.blocks - 1; b >= systemBlocks; b-- {
			_, h := p.tokens(b, nil)
			hashes = append(hashes, h)
		}
		c.removed = append(c.removed, hashes)
	}
	for range churnPrompts {
		c.step() // the first removals find no blocks
	}
	return c
}

// step stores one prompt and removes another. It returns the number of block events.
func (c *churn) step() int {
	n, i := 0, c.next
	c.next++
	for k := range c.events[i%churnPrompts] {
		e := &c.events[i%churnPrompts][k]
		c.f.feeds[i%benchTargets].Stored(e)
		n += len(e.Hashes)
	}
	i += churnPrompts / 2
	hashes := c.removed[i%churnPrompts]
	for at := 0; at < len(hashes); at += benchEvent {
		part := hashes[at:min(at+benchEvent, len(hashes))]
		c.f.feeds[i%benchTargets].Removed(GPU, part)
		n += len(part)
	}
	return n
}

// queries returns chains of 2,048 blocks. One target, three targets or all targets hold
// the whole prompt or a part.
func (f *fleet) queries() [][]Hash {
	var all [][]Hash
	for i := range 256 {
		number := f.prompts[f.rand.IntN(len(f.prompts))].number
		if i%16 == 0 {
			number = uint64(1 + f.rand.IntN(4))
		}
		all = append(all, prompt{number, benchPrompt}.chain())
	}
	return all
}

// BenchmarkIndex measures an index of 10 million (block, target) pairs over 64 targets;
// KVINDEX_ENTRIES sets another number of pairs. It measures the bytes per pair, including
// the feeds; block events through the feeds (16 tokens per block, as many removals as
// stores); matches of 2,048-block prompts; and both together: 10,000 matches per second
// during as many events as one thread can process, or during 2.2 million events per
// second. Times are CPU times of the thread if the system reports them, so that other
// processes have no effect. Figures with wall_ are wall-clock times.
func BenchmarkIndex(b *testing.B) {
	entries := 10_000_000
	if text := os.Getenv("KVINDEX_ENTRIES"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil {
			b.Fatal(err)
		}
		entries = n
	}
	f := newFleet(entries)
	stats := f.x.Stats()
	b.Run("fill", func(b *testing.B) {
		for b.Loop() {
			f.x.Stats()
		}
		b.ReportMetric(float64(stats.Entries), "pairs")
		b.ReportMetric(float64(stats.Blocks), "blocks")
		b.ReportMetric(float64(f.bytes)/float64(stats.Entries), "heap_B/pair")
		b.ReportMetric(float64(stats.Bytes)/float64(stats.Entries), "stats_B/pair")
	})
	c, queries := f.churn(), f.queries()
	b.Run("ingest", func(b *testing.B) { benchIngest(b, c, 0) })
	b.Run("match", func(b *testing.B) { benchMatch(b, f, queries) })
	b.Run("both", func(b *testing.B) { benchBoth(b, f, c, queries, 0) })
	b.Run("both_at_2M", func(b *testing.B) { benchBoth(b, f, c, queries, 2_200_000) })
}

// BenchmarkScaleIndex measures indexes of up to 100 million (block, target) pairs over 64 targets:
// bytes per pair, CPU time of an event and of a match of a 2,048-block prompt. The largest needs
// about 4 GB with GOGC=25.
func BenchmarkScaleIndex(b *testing.B) {
	for entries := 100_000; entries <= 100_000_000; entries *= 10 {
		for _, n := range []int{entries, 3 * entries} {
			if n <= 100_000_000 {
				b.Run(strconv.Itoa(n), func(b *testing.B) { benchScale(b, n) })
			}
		}
	}
}

func benchScale(b *testing.B, entries int) {
	const matches = 20_000
	f := newFleet(entries)
	b.ReportMetric(float64(f.bytes)/float64(f.x.Stats().Entries), "B/pair")
	queries, c := f.queries(), f.churn()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	events, start := 0, usage.ThreadTime()
	for usage.ThreadTime()-start < time.Second {
		events += c.step()
	}
	b.ReportMetric(float64((usage.ThreadTime()-start).Nanoseconds())/float64(events), "cpu-ns/event")
	out, times := make([]Match, f.x.Targets()), make([]time.Duration, 0, matches)
	for i := range matches {
		start := usage.ThreadTime()
		f.x.Match(queries[i%len(queries)], out)
		times = append(times, usage.ThreadTime()-start)
	}
	b.ReportMetric(usage.QuantileMicros(times, 0.5), "match-p50-µs")
	b.ReportMetric(usage.QuantileMicros(times, 0.99), "match-p99-µs")
	b.ReportMetric(0, "ns/op") // the work has a fixed length
	runtime.KeepAlive(f)
}

// benchIngest processes events at a rate per second, or without a limit if rate is 0.
func benchIngest(b *testing.B, c *churn, rate float64) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	events := 0
	start := usage.ThreadTime()
	for b.Loop() {
		events += c.step()
		if rate > 0 {
			time.Sleep(time.Duration(float64(events)/rate*1e9) - b.Elapsed())
		}
	}
	cpu := usage.ThreadTime() - start
	b.ReportMetric(float64(events)/cpu.Seconds(), "events/s")
	b.ReportMetric(float64(events)/b.Elapsed().Seconds(), "wall_events/s")
}

func benchBoth(b *testing.B, f *fleet, c *churn, queries [][]Hash, rate float64) {
	stop, done := make(chan struct{}), make(chan struct{})
	var cpu, wall []time.Duration
	go func() {
		defer close(done)
		cpu, wall = f.matches(queries, stop)
	}()
	benchIngest(b, c, rate)
	close(stop)
	<-done
	b.ReportMetric(float64(len(cpu))/b.Elapsed().Seconds(), "matches/s")
	b.ReportMetric(usage.QuantileMicros(cpu, 0.5), "p50_µs")
	b.ReportMetric(usage.QuantileMicros(cpu, 0.99), "p99_µs")
	b.ReportMetric(usage.QuantileMicros(wall, 0.5), "wall_p50_µs")
	b.ReportMetric(usage.QuantileMicros(wall, 0.99), "wall_p99_µs")
}

func benchMatch(b *testing.B, f *fleet, queries [][]Hash) {
	out := make([]Match, f.x.Targets())
	b.ReportAllocs()
	blocks, i := 0, 0
	for b.Loop() {
		f.x.Match(queries[i%len(queries)], out)
		longest := uint32(0)
		for _, m := range out {
			longest = max(longest, m.Blocks())
		}
		blocks += int(longest)
		i++
	}
	b.ReportMetric(float64(blocks)/float64(i), "blocks/match")
}

// matches makes 10,000 matches per second until stop is closed, and returns the time of
// each match.
func (f *fleet) matches(queries [][]Hash, stop chan struct{}) (cpu, wall []time.Duration) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	out := make([]Match, f.x.Targets())
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for begin := time.Now(); ; {
		select {
		case <-stop:
			return cpu, wall
		case <-tick.C:
		}
		for due := int(time.Since(begin).Seconds() * 10_000); len(wall) < due; {
			start, from := time.Now(), usage.ThreadTime()
			f.x.Match(queries[len(wall)%len(queries)], out)
			cpu = append(cpu, usage.ThreadTime()-from)
			wall = append(wall, time.Since(start))
		}
	}
}

// BenchmarkExpect measures one Expect of 512 blocks that no other prompt has, at a target whose
// capacity of 200,000 expected blocks is used up, so that as many old blocks go.
func BenchmarkExpect(b *testing.B) {
	const prompt, capacity = 512, 200_000
	x := New(Options{})
	targets := make([]Target, 4)
	for i := range targets {
		targets[i] = x.Add()
		x.Limit(targets[i], Limits{Blocks: capacity})
	}
	r := rand.New(rand.NewPCG(1, 2))
	blocks, i := make([]Hash, prompt), 0
	expect := func() {
		for k := range blocks {
			blocks[k] = Hash(r.Uint64()) &^ 7
		}
		x.Expect(targets[i%len(targets)], blocks, at(0))
		i++
	}
	for range len(targets) * (capacity/prompt + 1) {
		expect()
	}
	for b.Loop() {
		expect()
	}
}
