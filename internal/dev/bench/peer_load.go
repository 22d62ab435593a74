package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"
)

// peerCase is one measurement of the part load.
type peerCase struct {
	name  string
	what  string // as the page says it
	works []string
	fresh bool // on a new process, because memory or the start is measured
	cores int  // that the proxy has; 2: it shares them with load and engines
	load  load
}

// measured are the results of one case of one peer. Each list has a value for
// each round; a round without a result is absent in all of them.
type measured struct {
	Peer    string               `json:"peer"`
	Case    string               `json:"case"`
	Rounds  []int                `json:"rounds"`
	Others  []float64            `json:"others"` // share of the two cores that other programs used
	Figures map[string][]float64 `json:"figures"`
	Quick   bool                 `json:"quick,omitempty"` // short measurements
	Failed  []string             `json:"failed,omitempty"`
}

// Figures of a measurement.
const (
	figCPU      = "cpu_us"       // per request, or per event of a stream
	figRate     = "per_second"   // requests
	figP50      = "p50_us"       // of a request
	figP99      = "p99_us"       //
	figP999     = "p999_us"      //
	figEventP50 = "event_p50_us" // from the engine to the client
	figEventP99 = "event_p99_us" //
	figFirstP50 = "first_p50_ms" // from the request to the first event
	figFirstP99 = "first_p99_ms" //
	figRSS      = "rss_mb"       //
	figStream   = "stream_kb"    // growth of RSS for an open stream
	figStart    = "start_ms"     // to the first good answer
	figIdle     = "idle_mb"      // RSS then
)

func peerCases(quick bool, descriptors int) []peerCase {
	d := func(t time.Duration) time.Duration {
		if quick {
			return t / 3
		}
		return t
	}
	const kb = 1 << 10
	closed := func(conns, body, events int) load { return closedLoad(conns, body, events, d(2*time.Second)) }
	sse := func(conns int) load { return sseLoad(conns, 2*kb, int(d(2500*time.Millisecond)/tokenPeriod)) }
	weighed, _ := holdCounts(descriptors)
	streams := min(2000, weighed)
	pass, pd := []string{workPass}, []string{workVLLM, workSGLang}
	return []peerCase{
		{name: "one", what: "2 KB requests on one connection", works: pass, load: closed(1, 2*kb, 0)},
		{name: "many", what: "2 KB requests on 64 connections", works: pass, load: closed(64, 2*kb, 0)},
		{name: "rate300", what: "300 requests of 2 KB a second", works: pass, load: openLoad(300, d(3*time.Second))},
		{name: "rate1000", what: "1,000 requests of 2 KB a second", works: pass, load: openLoad(1000, d(4*time.Second))},
		{name: "sse100", what: "100 streams that start together, 50 events a second each", works: pass, load: sse(100)},
		{name: "sse500", what: "500 streams that start together", works: pass, load: sse(500)},
		{name: "pd2k", what: "2 KB requests on 16 connections", works: pd, load: closed(16, 2*kb, 1)},
		{name: "pd32k", what: "32 KB requests", works: pd, load: closed(16, 32*kb, 1)},
		{name: "pd256k", what: "256 KB requests", works: pd, load: closed(16, 256*kb, 1)},
		{name: "unary2k", what: "2 KB requests, 16 connections, answers of 16 tokens in one piece", works: []string{workVLLM, workDynamo}, load: closed(16, 2*kb, 0)},
		{name: "two", what: "2 KB requests on 64 connections, two cores that load and engine share", works: pass, fresh: true, cores: 2, load: closed(64, 2*kb, 0)},
		{name: "hold", what: fmt.Sprintf("%d open streams", streams), works: []string{workPass, workVLLM, workSGLang}, fresh: true,
			load: holdLoad(streams, slowPeriod, d(2*time.Second))},
	}
}

func (s *peerSuite) loadAll(ctx context.Context) (err error) {
	if s.stubs, err = startStubs(ctx, s.self, s.dir, s.loadCore); err != nil {
		return err
	}
	defer s.stubs.stop()
	all := s.chosen(func(*peer) bool { return true })
	for _, p := range all { // results of an earlier run do not mix with this one's
		s.result.Loads = slices.DeleteFunc(s.result.Loads, func(m measured) bool {
			return m.Peer == p.Name && s.cases.MatchString(m.Case)
		})
	}
	for round := 1; round <= s.rounds; round++ {
		begin := time.Now()
		for i := range all { // the first one of a round changes
			if err := s.loadPeer(ctx, round, all[(i+round-1)%len(all)]); err != nil {
				return err
			}
		}
		fmt.Fprintf(s.log, "round %d took %.1f minutes\n", round, time.Since(begin).Minutes())
	}
	order := func(m measured) int {
		return slices.IndexFunc(peers, func(p peer) bool { return p.Name == m.Peer })
	}
	slices.SortStableFunc(s.result.Loads, func(a, b measured) int { return cmp.Compare(order(a), order(b)) })
	return nil
}

// loadPeer runs the cases of one peer: first those that share a process.
func (s *peerSuite) loadPeer(ctx context.Context, round int, p *peer) error {
	var shared, fresh []peerCase
	for _, c := range peerCases(s.quick, s.descriptors) {
		switch {
		case !slices.Contains(c.works, p.Work) || !s.cases.MatchString(c.name):
		case c.fresh:
			fresh = append(fresh, c)
		default:
			shared = append(shared, c)
		}
	}
	if len(shared) > 0 {
		if err := s.loadOn(ctx, round, p, shared...); err != nil {
			return err
		}
	}
	for _, c := range fresh {
		if err := s.loadOn(ctx, round, p, c); err != nil {
			return err
		}
	}
	return nil
}

func (s *peerSuite) loadOn(ctx context.Context, round int, p *peer, cases ...peerCase) error {
	cores, n := fmt.Sprint(s.core), 1
	if cases[0].cores == 2 {
		cores, n = fmt.Sprintf("%d,%d", s.core, s.loadCore), 2
	}
	if why := s.unfit(p); why != "" {
		for _, c := range cases {
			s.addFailed(p, c, why)
		}
		return nil
	}
	r := &running{peer: p, scene: s.stubs.of(p.Work).scene(p.Work, n)}
	r.scene.listen = r.scene.engines[0]
	if p.start != nil {
		var err error
		if r, err = s.start(ctx, p, r.scene, cores, s.loadCore); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			for _, c := range cases {
				s.addFailed(p, c, err.Error())
			}
			return nil
		}
		defer r.stop()
	}
	if cases[0].name == "hold" && p.start != nil {
		if err := s.addIdle(r, round); err != nil {
			return err
		}
	}
	if !cases[0].fresh || cases[0].cores == 2 { // warm up
		l := cases[0].load
		l.Mode, l.Conns, l.For, l.Addr, l.Header = modeClosed, 4, 300*time.Millisecond, r.scene.listen, r.header()
		if _, _, err := s.suite(s.stubs.of(p.Work)).runLoad(ctx, &l); err != nil && ctx.Err() == nil {
			fmt.Fprintf(s.log, "%s: warm up: %v\n", p.Name, err)
		}
	}
	for _, c := range cases {
		l := c.load
		figures, others, err := s.measureLoad(ctx, r, &l)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			s.addFailed(p, c, err.Error())
			continue
		}
		s.addFigures(p, c.name, round, others, figures)
		fmt.Fprintf(s.log, "round %d  %-28s %-9s cpu %8.1f  %7.0f/s  p50 %6.0f  first %5.1f  rss %5.1f  others %2.0f %%\n", round, p.Name, c.name,
			figures[figCPU], figures[figRate], figures[figP50], figures[figFirstP50], figures[figRSS], others*100)
	}
	return nil
}

// addIdle records the start of a new process and its memory after the first
// answer.
func (s *peerSuite) addIdle(r *running, round int) error {
	time.Sleep(500 * time.Millisecond)
	u, err := usageOf(r.pids)
	if err != nil {
		return err
	}
	s.addFigures(r.peer, "start", round, 0, map[string]float64{figStart: r.took.Seconds() * 1000, figIdle: float64(u.RSS) / (1 << 20)})
	return nil
}

// measureLoad runs a load.
func (s *peerSuite) measureLoad(ctx context.Context, r *running, l *load) (figures map[string]float64, others float64, err error) {
	kind := pdproxy
	switch {
	case r.peer.Work == workDynamo:
		kind = ownEngines
	case legs(r.peer.Work):
		kind = pdproxyPD
	}
	l.Addr, l.Header, l.PIDs = r.scene.listen, r.header(), r.pids
	res, others, err := s.suite(s.stubs.of(r.peer.Work)).measure(ctx, kind, l, r.engines()...)
	if err != nil {
		return nil, 0, err
	}
	return figuresOf(l, res), others, nil
}

// suite returns a suite that measures one load at engines.
func (s *peerSuite) suite(st *stub) *suite {
	return &suite{programs: programs{self: s.self, core: s.core}, core: s.loadCore, backend: st.process}
}

// figuresOf returns what the page shows of a load.
func figuresOf(l *load, r *result) map[string]float64 {
	f := map[string]float64{figRSS: r.RSS}
	switch l.Mode {
	case modeHold:
		f[figStream] = r.StreamRSS
	case modeSSE:
		f[figCPU], f[figEventP50], f[figEventP99] = r.CPUEvent, r.Event.P50*1000, r.Event.P99*1000
		f[figFirstP50], f[figFirstP99] = r.First.P50, r.First.P99
	default:
		f[figCPU], f[figRate] = r.CPURequest, float64(r.Requests)/r.Seconds
		f[figP50], f[figP99], f[figP999] = r.Request.P50*1000, r.Request.P99*1000, r.RequestP999*1000
	}
	return f
}

func (s *peerSuite) entry(p *peer, name string) *measured {
	l := &s.result.Loads
	for i := range *l {
		if (*l)[i].Peer == p.Name && (*l)[i].Case == name {
			return &(*l)[i]
		}
	}
	*l = append(*l, measured{Peer: p.Name, Case: name, Quick: s.quick, Figures: map[string][]float64{}})
	return &(*l)[len(*l)-1]
}

func (s *peerSuite) addFigures(p *peer, name string, round int, others float64, figures map[string]float64) {
	m := s.entry(p, name)
	m.Rounds, m.Others = append(m.Rounds, round), append(m.Others, rounded(others))
	for key, v := range figures {
		m.Figures[key] = append(m.Figures[key], rounded(v))
	}
}

// rounded keeps four digits, which is more than the measurement has.
func rounded(v float64) float64 {
	var r float64
	fmt.Sscan(fmt.Sprintf("%.4g", v), &r)
	return r
}

func (s *peerSuite) addFailed(p *peer, c peerCase, why string) {
	fmt.Fprintf(s.log, "failed: %s %s: %s\n", p.Name, c.name, why)
	m := s.entry(p, c.name)
	if !slices.Contains(m.Failed, why) {
		m.Failed = append(m.Failed, why)
	}
}

// others returns the median share of the cores that other programs used.
func (c *comparison) others() float64 {
	var all []float64
	for _, m := range c.Loads {
		if m.Case != "start" {
			all = append(all, m.Others...)
		}
	}
	return median(all)
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
