package conformance

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// soak is a fleet under load, with its requests and results.
type soak struct {
	*fleet
	seed    uint64
	brief   bool // so short that no phase may be without an engine for long
	corpus  []*soakCase
	clients []*http.Client // HTTP/1.1 and h2c
	log     *logTail
	slots   []*slot
	config  config.Config
	past    pastEngines
	tally   tally
	serial  atomic.Int64 // numbers the requests
	found   atomic.Int64 // problems
}

// slot is the place of one engine. Its address and configuration outlive the
// engine.
type slot struct {
	name   string
	role   string
	engine **enginesim.Engine
	cfg    enginesim.Config
	ends   time.Time // end of its trouble; zero when it is healthy
	well   time.Time // time from which the process certainly serves after its last failure
	dies   bool      // the trouble may kill it
	closed bool      // it was closed regularly
	away   bool      // the configuration does not list it
}

// pastEngines sums the states of engines that have been replaced.
type pastEngines struct {
	engines, stale, expired, duplicates, transfers, aborted int64
}

func (p *pastEngines) add(s enginesim.State) {
	p.engines++
	p.stale += s.StaleReads
	p.expired += s.LeasesExpired
	p.duplicates += s.DuplicateIDs
	p.transfers += s.Transfers
	p.aborted += s.Aborted
}

// soakLease is how long prefill keeps KV that no decode reads, with the connectors that
// free such KV by a call. The call comes after decode has hung for timeouts.first_byte, and
// cleanup.Yield later. A shorter lease would end before the proxy may free the blocks. A
// prefill whose answer was cut keeps its blocks for the whole lease.
const soakLease = 6 * time.Second

// startSoak starts a fleet with scarce KV blocks and short time-outs.
func startSoak(t *testing.T, connector string, seed uint64) *soak {
	s := &soak{seed: seed, log: &logTail{}}
	configs := make(map[string]enginesim.Config)
	s.fleet = startFleet(t, connector, fleetOptions{
		log: s.log,
		engine: func(role string, n int, c *enginesim.Config) {
			if role == enginesim.RoleBoth {
				return
			}
			c.Log = slog.New(slog.NewTextHandler(s.log, nil)).With("engine", role[:1]+strconv.Itoa(n))
			c.KVBlocks = 160
			c.Ranks = 1 + n
			c.SSEKeepAlive = 200 * time.Millisecond
			c.PrefillUsPerToken, c.DecodeUsPerToken = 20+15*n, 1000+1000*n
			c.HandshakeTimeout = time.Second
			c.Lease = soakLease
			if connector == enginesim.ConnectorVLLMMoRIIORead {
				c.MoRIIO.DeferTimeout = soakLease
			}
			if connector == enginesim.ConnectorVLLMNixlPush {
				// Nothing else frees the blocks of an ended leg; a decode that
				// comes too late is retried.
				c.Lease, c.Nixl.ReclaimAfter, c.KVBlocks = 2*time.Second, 2*time.Second, 480
			}
			c.SGLang.HandshakeInterval, c.SGLang.HeartbeatInterval = 50*time.Millisecond, 250*time.Millisecond
			configs[role+strconv.Itoa(n)] = *c
		},
		config: func(c *config.Config) {
			for i := range c.Engines {
				c.Engines[i].Ranks = configs[c.Engines[i].Role+c.Engines[i].Name[1:]].Ranks
			}
			c.Timeouts.Prefill = config.Duration(time.Second)
			c.Timeouts.FirstByte = config.Duration(2 * time.Second)
			c.Timeouts.StreamIdle = config.Duration(time.Second)
			c.Timeouts.Dial = config.Duration(time.Second)
			c.Timeouts.Cleanup = config.Duration(time.Second)
			c.Health.Timeout = config.Duration(500 * time.Millisecond)
			c.Circuit.OpenFor = config.Duration(500 * time.Millisecond)
			c.Retry.Budget = 1
			c.Retry.MoveAfter = config.Duration(100 * time.Millisecond)
			s.config = *c
		},
	})
	for role, engines := range map[string][]*enginesim.Engine{enginesim.RolePrefill: s.prefill, enginesim.RoleDecode: s.decode} {
		for n, e := range engines {
			cfg := configs[role+strconv.Itoa(n)]
			keepKVPorts(&cfg, e)
			s.slots = append(s.slots, &slot{name: role[:1] + strconv.Itoa(n), role: role, engine: &engines[n], cfg: cfg})
		}
	}
	slices.SortFunc(s.slots, func(a, b *slot) int { return strings.Compare(a.name, b.name) })
	h2 := new(http.Protocols)
	h2.SetUnencryptedHTTP2(true)
	s.clients = []*http.Client{
		{Transport: &http.Transport{MaxIdleConnsPerHost: 100, DisableCompression: true}},
		{Transport: &http.Transport{Protocols: h2, DisableCompression: true}},
	}
	t.Cleanup(func() { // before the fleet checks that nothing is left
		for _, c := range s.clients {
			c.CloseIdleConnections()
		}
	})
	s.corpus = makeCorpus(s.rand(0, 1<<21), strings.HasPrefix(connector, enginesim.ConnectorVLLMNixl)) // the others do not support them
	return s
}

// rand returns an independent random source for one part of the soak.
func (s *soak) rand(round, part uint64) *rand.Rand {
	return rand.New(rand.NewPCG(s.seed, round<<32|part))
}

// hopeless reports whether enough problems were found to stop.
func (s *soak) hopeless() bool { return s.found.Load() >= 5 }

// problem reports a request with a wrong end, with all that is known about it.
func (s *soak) problem(q asked, r reply, what string) {
	s.t.Helper()
	if s.found.Add(1) > 5 {
		return
	}
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d, request %s (%s): %s\n", s.seed, q.id, s.connector, what)
	fmt.Fprintf(&b, "  POST %s h2c=%t leave=%s %s\n", q.path, q.h2c, q.leave, shortened(q.body))
	fmt.Fprintf(&b, "  status %d after %v, %d events, err %v\n  body %s\n", r.status, r.took, r.events, r.err, shortened(string(r.raw)))
	if q.c != nil {
		fmt.Fprintf(&b, "  got  %q\n  want %q\n", r.choices, q.c.want.choices)
	}
	if resp, err := s.client.Get(s.front.AdminURL() + "/v1/explain/" + q.id); err == nil {
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		fmt.Fprintf(&b, "  explain %s\n", text)
	}
	for _, line := range s.log.with(q.id, "trouble") {
		fmt.Fprintf(&b, "  %s\n", line)
	}
	s.t.Error(b.String())
}

// shortened shortens a text for a report.
func shortened(text string) string {
	if len(text) <= 700 {
		return text
	}
	return text[:300] + " … " + text[len(text)-300:]
}

// logTail keeps the last lines of a log. It is safe for concurrent use.
type logTail struct {
	mu    sync.Mutex
	lines [8192]string // guarded by mu
	next  int          // guarded by mu
}

// Write adds whole lines, as slog's handlers write them.
func (l *logTail) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range bytes.Lines(p) {
		l.lines[l.next%len(l.lines)] = string(bytes.TrimSpace(line))
		l.next++
	}
	return len(p), nil
}

// with returns the kept lines that contain one of the texts, oldest first.
func (l *logTail) with(texts ...string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var found []string
	for i := range l.lines {
		line := l.lines[(l.next+i)%len(l.lines)]
		if slices.ContainsFunc(texts, func(t string) bool { return strings.Contains(line, t) }) {
			found = append(found, line)
		}
	}
	return found[max(0, len(found)-40):]
}

// tally counts by kind. It is safe for concurrent use.
type tally struct {
	mu     sync.Mutex
	counts map[string]int // guarded by mu
	asked  int            // guarded by mu
	slow   time.Duration  // the longest request; guarded by mu
}

func (c *tally) add(kinds ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.counts == nil {
		c.counts = make(map[string]int)
	}
	for _, k := range kinds {
		c.counts[k]++
	}
}

// took counts a request that has ended.
func (c *tally) took(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked++
	c.slow = max(c.slow, d)
}

func (c *tally) of(kind string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts[kind]
}

// sum returns the number of requests that have ended.
func (c *tally) sum() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.asked
}

// engineTotals returns the sums over all present and past engines.
func (s *soak) engineTotals() pastEngines {
	sum := s.past
	for _, sl := range s.slots {
		sum.add((*sl.engine).State())
	}
	return sum
}

// report prints the results.
func (s *soak) report() {
	s.t.Helper()
	c := &s.tally
	c.mu.Lock()
	defer c.mu.Unlock()
	s.t.Logf("%d requests, the longest took %v", c.asked, c.slow.Round(time.Millisecond))
	for _, k := range slices.Sorted(maps.Keys(c.counts)) {
		s.t.Logf("  %6d %s", c.counts[k], k)
	}
	for _, name := range []string{"pdproxy_retries_total", "pdproxy_fallbacks_total", "pdproxy_kv_cleanups_total", "pdproxy_legs_cancelled_total", "pdproxy_broken_streams_total", "pdproxy_continuations_total"} {
		series := s.series(name)
		for _, labels := range slices.Sorted(maps.Keys(series)) {
			s.t.Logf("  %6.0f %s%s", series[labels], name, labels)
		}
	}
	s.t.Logf("time to free: %s", s.timeToFree())
	errs := s.series("pdproxy_leg_errors_total")
	for _, labels := range slices.Sorted(maps.Keys(errs)) {
		s.t.Logf("  %6.0f leg_errors%s", errs[labels], labels)
	}
	s.t.Logf("engines: %+v", s.engineTotals())
}

// series returns the values of one metric by its labels.
func (f *fleet) series(name string) map[string]float64 {
	f.t.Helper()
	values := make(map[string]float64)
	resp, err := f.client.Get(f.front.AdminURL() + "/metrics")
	if err != nil {
		f.t.Error(err)
		return values
	}
	defer resp.Body.Close()
	for sc := bufio.NewScanner(resp.Body); sc.Scan(); {
		rest, ok := strings.CutPrefix(sc.Text(), name)
		i := strings.LastIndexByte(rest, ' ')
		if !ok || i < 0 || rest[0] != ' ' && rest[0] != '{' {
			continue
		}
		if v, err := strconv.ParseFloat(rest[i+1:], 64); err == nil {
			values[rest[:i]] = v
		}
	}
	return values
}

// timeToFree returns, for each way of freeing, an upper bound of the time until
// the engines' memory of an ended exchange was free, as far as the proxy can
// see.
func (s *soak) timeToFree() string {
	buckets := s.series("pdproxy_kv_cleanup_seconds_bucket")
	var out []string
	for labels, count := range s.series("pdproxy_kv_cleanup_seconds_count") {
		least := ""
		for _, le := range []string{"0.001", "0.0025", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1", "2.5", "5", "10", "25", "60", "120", "300", "+Inf"} {
			if buckets[strings.TrimSuffix(labels, "}")+`,le="`+le+`"}`] >= count {
				least = le
				break
			}
		}
		out = append(out, fmt.Sprintf("%s: %.0f times, all within %s s", labels, count, least))
	}
	slices.Sort(out)
	return strings.Join(out, "; ")
}

// upTo returns a random duration below d.
func upTo(rng *rand.Rand, d time.Duration) time.Duration { return time.Duration(rng.Int64N(int64(d))) }
