package conformance

import (
	"context"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/usage"
	"github.com/pdproxy/pdproxy/internal/enginesim"
)

const (
	// soakSeed draws the requests and the troubles; PDPROXY_SOAK_SEED replaces
	// it. The timing remains random.
	soakSeed = 1
	// soakClients is the number of simultaneous clients.
	soakClients = 24
	// soakHalves is the shortest soak whose two halves are compared.
	soakHalves = 30 * time.Second
	// soakBound is the longest time of a request: three attempts at each leg,
	// with the timeouts of startSoak, and the clean-ups between them.
	soakBound = 30 * time.Second
	// errorPause is a client's wait after a wrong answer. Errors come at once,
	// so without it a client would ask all the time.
	errorPause = 250 * time.Millisecond
	// soakWarm is the number of requests that fill the proxy's rings. Before
	// that the heap size has no meaning.
	soakWarm = 6000
)

// TestSoak puts a fleet of each protocol under mixed load while its engines are
// killed, restarted, hung and made to fail. Every request ends in the text of
// one engine alone, in a clear error, or in an error event after a prefix of
// that text. Afterwards nothing remains. PDPROXY_SOAK is the duration of the
// load for all connectors together.
func TestSoak(t *testing.T) {
	for _, c := range connectors { // all of them in the second tier too, which chooses some for eachConnector
		t.Run(c, func(t *testing.T) { runSoak(t, c, soakTime(t)) })
	}
}

// soakTime returns one connector's share of PDPROXY_SOAK, or the default. The
// default is long compared with a trouble, which lasts up to 3 s.
func soakTime(t *testing.T) time.Duration {
	v := os.Getenv("PDPROXY_SOAK")
	if v == "" {
		return 4 * time.Second
	}
	all, err := time.ParseDuration(v)
	if err != nil || all <= 0 {
		t.Fatalf("PDPROXY_SOAK=%q is no duration", v)
	}
	return all / time.Duration(len(connectors))
}

// runSoak loads one fleet; a long soak has two halves. After each half all
// engines are healed, nothing may remain, and every pair of engines must serve
// again.
func runSoak(t *testing.T, connector string, d time.Duration) {
	seed := uint64(soakSeed)
	if v := os.Getenv("PDPROXY_SOAK_SEED"); v != "" {
		var err error
		if seed, err = strconv.ParseUint(v, 10, 64); err != nil {
			t.Fatalf("PDPROXY_SOAK_SEED=%q is no number", v)
		}
	}
	s := startSoak(t, connector, seed)
	defer s.report()
	rounds := uint64(1)
	if s.brief = d < soakHalves; !s.brief {
		rounds = 2
	}
	var heap int64
	var asked int
	for round := range rounds {
		heap, asked = usage.Heap(), s.tally.sum()
		s.load(d/time.Duration(rounds), round)
		s.healAll()
		s.settled()
		s.cleanRound()
	}
	s.checkBooks()
	end := usage.Heap()
	t.Logf("heap %.1f MB before the last round, %.1f MB at the end", mb(heap), mb(end))
	if asked >= soakWarm && end > heap+heap/5+4<<20 {
		t.Errorf("the heap grew from %.1f MB to %.1f MB in the second half", mb(heap), mb(end))
	}
}

// checkBooks asserts the final values of the counters.
func (s *soak) checkBooks() {
	s.t.Helper()
	if n := s.metric("pdproxy_exchanges_total", `outcome="internal"`); n > 0 {
		s.t.Errorf("%v exchanges ended by the proxy's own fault", n)
	}
	if right, wanted := s.tally.of("right"), s.tally.of("wanted"); right < wanted/2 {
		s.t.Errorf("got %d right answers, want at least half of the %d that no client has left", right, wanted)
	}
	engines := s.engineTotals()
	if engines.duplicates > 0 {
		s.t.Errorf("engines saw %d ids twice: %s", engines.duplicates, strings.Join(s.log.with("in flight already"), "\n"))
	}
	// A lease may expire only where the proxy could not know the blocks,
	// because prefill's answer was lost, or where the protocol has no other
	// way. The proxy counts a clean-up up to cleanup.Yield after the attempt,
	// which may be later than the end of the lease.
	var lost float64
	s.eventually("each ended lease of KV blocks belongs to a lost answer of prefill", func() bool {
		lost = s.lostAnswers()
		return float64(engines.expired) <= lost
	})
	if float64(engines.expired) > lost {
		s.t.Errorf("%d leases of KV blocks have ended, %v answers of prefill were lost", engines.expired, lost)
	}
}

// lostAnswers returns the number of prefill legs whose blocks the proxy could not free.
func (s *soak) lostAnswers() float64 {
	lost := s.metric("pdproxy_legs_cancelled_total", `phase="prefill"`)
	for _, how := range []string{"engine_timeout", "prefill_again"} {
		lost += s.metric("pdproxy_kv_cleanups_total", `how="`+how+`"`)
	}
	for _, reason := range []string{"body", "head", "timeout", "bad_answer"} {
		lost += s.metric("pdproxy_leg_errors_total", `phase="prefill"`, `reason="`+reason+`"`)
	}
	return lost
}

func mb(bytes int64) float64 { return float64(bytes) / (1 << 20) }

// load sends requests from many clients for d, while the engines have troubles.
// When it returns every request has ended.
func (s *soak) load(d time.Duration, round uint64) {
	ctx, stop := context.WithTimeout(context.Background(), d)
	defer stop()
	var load sync.WaitGroup
	load.Go(func() { s.trouble(ctx, s.rand(round, 0)) })
	for n := range uint64(soakClients) {
		load.Go(func() {
			rng := s.rand(round, n+1)
			for ctx.Err() == nil && !s.hopeless() {
				if _, kind := s.ask(s.draw(rng)); kind != "right" {
					time.Sleep(errorPause)
				}
			}
		})
	}
	load.Wait()
}

// cleanRound sends requests until every pair of engines has given a right
// answer. With all engines healed every answer must be right. The first requests
// go one after another: the circuit of a healed engine may still admit only one
// trial request at a time, and several requests would meet only such circuits.
func (s *soak) cleanRound() {
	s.t.Helper()
	s.waitReady()
	missing := make(map[string]bool)
	for p := range s.prefill {
		for d := range s.decode {
			missing["p"+strconv.Itoa(p)+" d"+strconv.Itoa(d)] = true
		}
	}
	rng := s.rand(0, 1<<20)
	for end := time.Now().Add(patience); len(missing) > 0 && !s.hopeless(); {
		if time.Now().After(end) {
			s.t.Errorf("no answer in the clean round from %v\n%s", missing, strings.Join(s.log.with("level=ERROR", "pair is", "has restarted", "warm-up"), "\n"))
			return
		}
		var mu sync.Mutex
		var wg sync.WaitGroup
		together := 4
		if len(missing) == len(s.prefill)*len(s.decode) {
			together = 1 // no circuit is known to be closed
		}
		for range together {
			q := s.draw(rng)
			q.leave, q.bad = leaveNever, nil
			wg.Go(func() {
				r, kind := s.ask(q)
				if kind != "right" {
					s.problem(q, r, "not right in the clean round: "+kind)
				}
				mu.Lock()
				defer mu.Unlock()
				delete(missing, r.header.Get("X-Pdproxy-Prefill")+" "+r.header.Get("X-Pdproxy-Decode"))
			})
		}
		wg.Wait()
	}
}

// TestHungDecodeEndsNoLease: a decode receives legs and never answers. The proxy gives the
// legs up after timeouts.first_byte and frees prefill's blocks by a call, before their
// leases end. With TensorRT-LLM no call frees them, so the proxy counts these legs.
func TestHungDecodeEndsNoLease(t *testing.T) {
	for _, connector := range append([]string{enginesim.ConnectorTRTLLM}, leasing...) {
		t.Run(connector, func(t *testing.T) {
			s := startSoak(t, connector, soakSeed)
			defer s.report()
			s.decode[1].SetFault("", 0, "head")
			var load sync.WaitGroup
			for n := range uint64(soakClients) {
				q := s.draw(s.rand(0, n))
				q.leave, q.bad = leaveNever, nil
				load.Go(func() { s.ask(q) })
			}
			load.Wait()
			s.decode[1].SetFault("", 0, "")
			s.settled()
			s.checkBooks()
			if s.metric("pdproxy_leg_errors_total", `engine="d1"`, `phase="decode"`, `reason="timeout"`) == 0 {
				t.Error("no decode leg has hung")
			}
		})
	}
}
