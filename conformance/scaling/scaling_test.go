package scaling

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/internal/loadgen"
	"github.com/pdproxy/pdproxy/internal/plot"
)

var plots = flag.String("plots", "", "folder for the plots of the documents; empty: none are written")

// phase is a part of the load.
type phase struct {
	name              string
	seconds           float64
	rate              float64 // requests per second
	words, tokens     int     // of a prompt and of an answer
	prefills, decodes int     // each role gets at least that many engines during the phase
}

// A prompt has about 2 tokens for each word. So a prefill engine computes 2 long prompts or
// 13 short ones a second, and a decode engine 4 long answers or 100 short ones.
var phases = []phase{
	{"from zero", 6, 1, 100, 16, 1, 1},
	{"long prompts", 14, 6, 100, 4, 3, 1},
	{"pause", 6, 0.5, 15, 4, 1, 1},
	{"long answers", 14, 10, 15, 96, 1, 2},
}

// The rule looks at the metrics in this interval.
const every = 250 * time.Millisecond

// history holds the course of a test for the plots: values over seconds.
type history struct {
	engines map[string][][2]float64
	wanted  map[string][][2]float64 // value of the first trigger by its threshold
	begins  []float64               // of phases
	waited  float64                 // the most requests that waited for an engine
}

// TestScaling: the queries of the ScaledObjects alone start and stop engines. The first
// requests find no engine, wait, and start one of each role. Each kind of load gets engines of
// the role that it needs, no request is lost when engines leave, and no engine is left after
// the load.
func TestScaling(t *testing.T) {
	f := newFleet(t)
	h := &history{engines: map[string][][2]float64{}, wanted: map[string][][2]float64{}}
	r := map[string]*rule{}
	for _, role := range roles {
		r[role] = ruleOf(t, role)
		if n := f.running(role); n != 0 {
			t.Fatalf("the test begins with %d %s engines", n, role)
		}
	}
	start := time.Now()
	var clients sync.WaitGroup
	var mu sync.Mutex
	sent, failures := 0, map[string]int{}
	highest := make([]map[string]int, len(phases))
	for i, p := range phases {
		highest[i] = map[string]int{}
		h.begins = append(h.begins, time.Since(start).Seconds())
		clients.Go(func() {
			result, err := loadgen.Run(t.Context(), p.load(f.proxy.URL(), i))
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failures[err.Error()]++
				return
			}
			sent += result.Requests
			for reason, n := range result.Failures {
				failures[reason] += n
			}
		})
		// On a busy machine, a phase lasts until it has the engines.
		f.follow(t.Context(), r, h, start, func() bool {
			return time.Since(start).Seconds() >= h.begins[i]+p.seconds && p.reached(highest[i])
		}, highest[i])
	}
	done := make(chan struct{})
	go func() {
		clients.Wait()
		close(done)
	}()
	f.follow(t.Context(), r, h, start, func() bool {
		select {
		case <-done:
			return len(f.replicas) == 0
		default:
			return false
		}
	}, highest[len(phases)-1])
	f.close()
	want := 0
	for _, p := range phases {
		want += p.requests()
	}
	if sent != want || len(failures) > 0 {
		t.Errorf("%d of %d requests ended, failures %v", sent, want, failures)
	}
	if h.waited == 0 {
		t.Error("no request waited for the first engines")
	}
	if *plots != "" {
		h.write(t, *plots)
	}
}

// reached reports whether the roles have had as many engines as the phase needs.
func (p *phase) reached(highest map[string]int) bool {
	return highest[enginesim.RolePrefill] >= p.prefills && highest[enginesim.RoleDecode] >= p.decodes
}

func (p *phase) requests() int { return int(p.rate * p.seconds) }

// load returns the load of phase i.
func (p *phase) load(url string, i int) loadgen.Config {
	return loadgen.Config{
		URL: url, API: loadgen.APIChat, Model: modelName, Requests: p.requests(), Rate: p.rate, PromptWords: p.words,
		MaxTokens: p.tokens, IgnoreEOS: true, Timeout: 5 * time.Minute, Seed: uint64(i + 1),
	}
}

// follow applies the rules until the condition holds. highest gets the largest number of
// engines of each role.
func (f *fleet) follow(ctx context.Context, rules map[string]*rule, h *history, start time.Time, until func() bool, highest map[string]int) {
	f.t.Helper()
	deadline := time.Now().Add(3 * time.Minute)
	for !until() && ctx.Err() == nil {
		if time.Now().After(deadline) {
			f.t.Fatalf("the fleet does not settle: %d prefill and %d decode engines", f.running(enginesim.RolePrefill), f.running(enginesim.RoleDecode))
		}
		f.reap()
		m, now := f.metrics(), time.Now()
		h.waited = max(h.waited, f.value(m, `sum(pdproxy_requests_waiting{reason="no_engine"})`))
		for role, r := range rules {
			values := make([]float64, len(r.triggers))
			for i, t := range r.triggers {
				values[i] = f.value(m, t.query)
			}
			present := f.present(role)
			if n := r.replicas(now, present, values); n != present {
				f.scale(role, n)
			}
			highest[role] = max(highest[role], f.present(role))
			at := now.Sub(start).Seconds()
			h.engines[role] = append(h.engines[role], [2]float64{at, float64(f.running(role))})
			h.wanted[role] = append(h.wanted[role], [2]float64{at, values[0] / r.triggers[0].threshold})
		}
		time.Sleep(every)
	}
}

// value evaluates a query on one scrape.
func (f *fleet) value(m metrics, query string) float64 {
	f.t.Helper()
	v, err := m.value(query)
	if err != nil {
		f.t.Fatal(err)
	}
	return v
}

// write draws the plots.
func (h *history) write(t *testing.T, folder string) {
	t.Helper()
	for name, of := range map[string]struct {
		label, y string
		series   map[string][][2]float64
	}{
		"scaling-engines.svg": {"Engines by role while the load changes", "engines", h.engines},
		"scaling-signals.svg": {"Value of the first query of each role by its threshold, while the load changes", "engines wanted", h.wanted},
	} {
		p := plot.New(of.label, 260)
		for _, points := range of.series {
			for _, v := range points {
				p.X.To, p.Y.To = max(p.X.To, v[0]), max(p.Y.To, v[1]*1.15)
			}
		}
		p.Axes("seconds", of.y, plot.TickCount, plot.TickCount)
		for i, begin := range h.begins {
			p.Mark(begin, fmt.Sprintf("%s, %g/s", phases[i].name, phases[i].rate))
		}
		for i, role := range roles {
			p.Steps(plot.Color(i), role, of.series[role])
		}
		p.Legend(roles)
		if err := os.WriteFile(filepath.Join(folder, name), []byte(p.File()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
