// Package loads polls engines for their load and passes the reports to the load counters
// of their targets. Between two polls it passes on the loads that an engine publishes. All
// of this runs outside the request path. An engine that gives no answer, or an unreadable
// one, keeps its health state. Its earlier reports lose weight with time.
//
// The decisions behind this package are in docs/design/engines.md.
package loads

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// restFor is the pause after an engine has reported no load on any path.
const restFor = time.Minute

// Poller polls the ready instances of a registry. Each instance has at most one poll in
// progress.
type Poller struct {
	registry *engine.Registry
	log      *slog.Logger
	health   atomic.Pointer[config.Health]
	wake     chan struct{} // wakes Run after a new configuration
}

// New returns a poller with the intervals in h (LoadInterval, Timeout). It starts
// nothing. log may be nil.
func New(registry *engine.Registry, h config.Health, log *slog.Logger) *Poller {
	p := &Poller{registry: registry, log: log, wake: make(chan struct{}, 1)}
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	p.health.Store(&h)
	return p
}

// Configure replaces the interval and the time-out of a poll, from the next poll on. It
// is safe for concurrent use.
func (p *Poller) Configure(h config.Health) {
	p.health.Store(&h)
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Run polls until ctx ends. When it returns, no poll is in flight.
func (p *Poller) Run(ctx context.Context) {
	var polls sync.WaitGroup
	defer polls.Wait()
	asked := make(map[*engine.Instance]*pollState)
	tick := time.NewTicker(time.Hour)
	tick.Stop()
	defer tick.Stop()
	var every time.Duration
	for ctx.Err() == nil {
		select {
		case <-p.wake: // this round already uses the new configuration
		default:
		}
		h := p.health.Load()
		if d := time.Duration(h.LoadInterval); d != every {
			if every = d; every > 0 {
				tick.Reset(every)
			} else {
				tick.Stop()
				for i, a := range asked { // nothing reports that they wake up
					a.pushes.stop()
					p.registry.ReportSleep(i, engine.SleepReport{}, time.Now())
				}
			}
		}
		if every > 0 {
			p.round(ctx, h, asked, &polls)
		}
		select {
		case <-ctx.Done():
		case <-p.wake:
		case <-tick.C:
		}
	}
}

// round starts a poll of each ready instance that is not being polled.
func (p *Poller) round(ctx context.Context, h *config.Health, asked map[*engine.Instance]*pollState, polls *sync.WaitGroup) {
	now := time.Now()
	for _, i := range p.registry.Snapshot().Instances {
		if i.State() != engine.Ready {
			continue
		}
		a := asked[i]
		if a == nil {
			a = &pollState{registry: p.registry, i: i, routes: i.LoadRoutes()}
			asked[i] = a
		}
		a.pushes.follow(ctx, i, polls)
		if len(a.routes) == 0 || !a.busy.CompareAndSwap(false, true) {
			continue
		}
		if now.Before(a.rest) {
			a.busy.Store(false)
			continue
		}
		polls.Go(func() {
			defer a.busy.Store(false)
			a.poll(ctx, h, p.log)
		})
	}
	for i, a := range asked {
		if i.Gone() {
			a.pushes.stop()
			delete(asked, i)
		}
	}
}

// pollState is the state of polling one instance. While busy is set only the poll may
// access it.
type pollState struct {
	registry    *engine.Registry
	i           *engine.Instance
	routes      []engine.LoadRoute
	busy        atomic.Bool
	next        int       // index in routes of the next route to poll
	rest        time.Time // no poll before this time
	lastProblem string    // the problem that was logged last
	answer      bytes.Buffer
	marks       []load.Mark
	moved       []Rank // last measured transfer of each rank
	pushes      pushes // belongs to Run, not to the poll
}

// readers read the forms of load reports.
var readers = [...]func(body []byte) (Answer, error){
	engine.LoadMetrics:      ReadMetrics,
	engine.LoadSGLang:       ReadSGLang,
	engine.LoadSGLangLegacy: ReadSGLangLegacy,
	engine.LoadTRTLLM:       ReadTRTLLM,
}

// keepAnswer is the largest answer buffer that is kept for the next answer, in bytes.
const keepAnswer = 1 << 20

// poll makes one poll and passes the report on.
func (a *pollState) poll(ctx context.Context, h *config.Health, log *slog.Logger) {
	limited, cancel := context.WithTimeout(ctx, time.Duration(h.Timeout))
	defer cancel()
	a.marks = a.marks[:0]
	for rank := range a.i.Load {
		a.marks = append(a.marks, a.i.Load[rank].Mark())
	}
	from, asked := a.routes[a.next], time.Now()
	answer, err := ask(limited, a.i, from, &a.answer)
	if a.answer.Cap() > keepAnswer {
		a.answer = bytes.Buffer{}
	}
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		a.failed(err, log)
		return
	}
	a.lastProblem = ""
	a.i.GuessBlockTokens(answer.BlockTokens)
	a.measure(answer.Ranks)
	a.report(answer.Ranks, time.Now(), time.Duration(h.LoadInterval))
	a.registry.ReportSleep(a.i, sleepReport(answer.Ranks, len(a.i.Load)), asked)
}

// ask makes one GET of a route, and reads the report in its answer.
func ask(ctx context.Context, i *engine.Instance, from engine.LoadRoute, buf *bytes.Buffer) (Answer, error) {
	buf.Reset()
	status, err := i.Get(ctx, from.Path, buf)
	switch {
	case err != nil:
		return Answer{}, err
	case status == http.StatusNotFound, status == http.StatusMethodNotAllowed, status == http.StatusNotImplemented,
		status == http.StatusBadRequest, status == http.StatusUnprocessableEntity: // SGLang also gives this answer to an unknown section in the query
		return Answer{}, errNoLoad
	case status/100 != 2:
		return Answer{}, &statusError{from.Path, status}
	}
	return readers[from.Form](buf.Bytes())
}

// Examine asks i once for its load, as the polls do. It returns the path of the route that has the
// report, and whether all ranks sleep.
func Examine(ctx context.Context, i *engine.Instance) (path string, sleeps bool, err error) {
	var buf bytes.Buffer
	for _, from := range i.LoadRoutes() {
		answer, problem := ask(ctx, i, from, &buf)
		if problem == nil {
			return from.Path, sleepReport(answer.Ranks, 1).Ranks[0], nil
		}
		err = problem
	}
	return "", false, err
}

// failed notes why an answer could not be used. If it contained no load it selects the
// next route.
func (a *pollState) failed(err error, log *slog.Logger) {
	if err == errNoLoad {
		if a.next++; a.next < len(a.routes) {
			return
		}
		a.next, a.rest = 0, time.Now().Add(restFor)
		a.registry.ReportSleep(a.i, engine.SleepReport{}, time.Now())
	}
	if text := err.Error(); text != a.lastProblem {
		a.lastProblem = text
		log.Info("engine's load is not known", "engine", a.i.Spec.Name, "error", err)
	}
}

// measure passes new transfers since the last poll to the instance's estimate of the
// speed of KV transfers. With concurrent legs only the engines know when a transfer
// begins.
func (a *pollState) measure(ranks []Rank) {
	for _, r := range ranks {
		if r.Moved == 0 || r.Rank == Whole {
			continue
		}
		n := slices.IndexFunc(a.moved, func(o Rank) bool { return o.Rank == r.Rank })
		switch {
		case n < 0:
			a.moved = append(a.moved, r)
		case a.moved[n].Moved == r.Moved && a.moved[n].MovedIn == r.MovedIn:
			continue
		default:
			a.moved[n] = r
		}
		a.i.Transfers.Measure(r.Moved, r.MovedIn)
	}
}

// sleepReport returns which of n counters are about ranks that sleep. The ranks correspond to the
// counters as in report, which has sorted them. A counter without a report counts as awake, and so does
// the one counter of several ranks if one of them is awake.
func sleepReport(ranks []Rank, n int) engine.SleepReport {
	all := len(ranks) > 0 && !slices.ContainsFunc(ranks, func(r Rank) bool { return !r.Sleep.asleep() })
	out := make([]bool, n)
	for at, r := range ranks {
		if len(ranks) == n {
			r.Rank = at
		}
		switch {
		case n == 1:
			out[0] = all
		case r.Rank == Whole:
			for i := range out {
				out[i] = out[i] || r.Sleep.asleep()
			}
		case r.Rank < n:
			out[r.Rank] = r.Sleep.asleep()
		}
	}
	return engine.SleepReport{
		Known:      slices.ContainsFunc(ranks, func(r Rank) bool { return r.Sleep != SleepUnknown }),
		Ranks:      out,
		Weightless: slices.ContainsFunc(ranks, func(r Rank) bool { return r.Sleep == Discarded }),
	}
}

// report passes the report about each rank to the rank's counter. An instance with one
// counter gets the sum of all ranks. A report about the whole instance is divided among
// the counters. If there are as many ranks as counters, they correspond in order: vLLM
// behind a hybrid load balancer numbers its engines over all nodes, but counts the ranks
// that it accepts requests for from 0.
func (a *pollState) report(ranks []Rank, at time.Time, every time.Duration) {
	counters := a.i.Load
	if len(counters) == 1 && len(ranks) > 0 {
		r := sum(ranks)
		r.At, r.Every = at, every
		counters[0].Report(r, a.marks[0])
		return
	}
	inOrder := len(ranks) == len(counters)
	if inOrder {
		slices.SortFunc(ranks, func(x, y Rank) int { return x.Rank - y.Rank })
	}
	for n, r := range ranks {
		r.At, r.Every = at, every
		if inOrder {
			r.Rank = n
		}
		switch {
		case r.Rank == Whole:
			for n := range counters {
				counters[n].Report(r.share(n, len(counters)), a.marks[n])
			}
		case r.Rank < len(counters):
			counters[r.Rank].Report(r.Report, a.marks[r.Rank])
		}
	}
}
