package sleepmode

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/engine/loads"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// vllm is a fake engine with the routes that the package and the registry use. Fields change only
// with mu held.
type vllm struct {
	mu     sync.Mutex
	calls  []string // of the sleep mode, with their queries
	asleep bool
	level  int // of the sleep, for the metrics
	load   string
	// fail decides about the calls of the sleep mode: a status, 0: as the engine does. A negative
	// status is no answer.
	fail  func(path string) int
	delay time.Duration // of the calls of the sleep mode
	stuck bool          // /wake_up has no effect
	early bool          // /is_sleeping says nothing
}

func (v *vllm) RoundTrip(r *http.Request) (*http.Response, error) {
	answer := func(status int, body string) (*http.Response, error) {
		return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(body)), Header: http.Header{}, Request: r}, nil
	}
	switch r.URL.Path {
	case "/v1/models":
		models := strings.Split(strings.TrimRight(r.URL.Hostname(), "0123456789"), "-")
		return answer(200, `{"data":[{"id":"`+strings.Join(models, `"},{"id":"`)+`"}]}`)
	case "/version":
		return answer(200, `{"version":"0.33.0"}`)
	case "/health":
		return answer(200, "")
	case "/kv_event_sources":
		return answer(200, "{}")
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if r.URL.Path == "/metrics" {
		awake, discarded := 1, 0
		if v.asleep {
			awake, discarded = 0, v.level/2
		}
		return answer(200, fmt.Sprintf("vllm:num_requests_running{engine=\"0\"} 0\n%s\nvllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} %d\nvllm:engine_sleep_state{engine=\"0\",sleep_state=\"discard_all\"} %d\n", v.load, awake, discarded))
	}
	v.calls = append(v.calls, r.Method+" "+r.URL.RequestURI())
	v.mu.Unlock()
	select {
	case <-time.After(v.delay):
	case <-r.Context().Done():
	}
	v.mu.Lock()
	if r.Context().Err() != nil {
		return nil, r.Context().Err()
	}
	if v.fail != nil {
		if status := v.fail(r.URL.Path); status < 0 {
			return nil, errors.New("connection reset")
		} else if status > 0 {
			return answer(status, "")
		}
	}
	switch r.URL.Path {
	case "/sleep":
		v.asleep, v.level = true, 1
	case "/wake_up":
		v.asleep = v.asleep && v.stuck
	default:
		if v.early {
			return answer(200, `{}`)
		}
		return answer(200, fmt.Sprintf(`{"is_sleeping":%t}`, v.asleep))
	}
	return answer(200, `{"status":""}`)
}

// take returns the calls since the last take.
func (v *vllm) take() string {
	v.mu.Lock()
	defer v.mu.Unlock()
	defer func() { v.calls = nil }()
	return strings.Join(v.calls, ", ")
}

func (v *vllm) set(change func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	change()
}

// nopClient is a client that no test calls.
type nopClient struct{ upstream.Client }

func (nopClient) CloseIdle() {}

// lab is a registry of fake engines with their polls and a manager.
type lab struct {
	*Manager
	t        *testing.T
	registry *engine.Registry
	engines  map[string]*vllm
	leads    atomic.Bool
	results  []string
}

// newLab starts a lab with engines of role both. The name of an engine lists its models, with hyphens
// between them, before digits at the end.
func newLab(t *testing.T, cfg config.Sleep, names ...string) *lab {
	l := &lab{t: t, engines: make(map[string]*vllm)}
	l.leads.Store(true)
	h := config.Default().Health
	l.registry = engine.New(engine.Options{
		Health: h, Circuit: config.Default().Circuit,
		Protocols: func(name string) (engine.Protocol, bool) { return connector.ByName(name) },
		NewClient: func(config.Engine) (upstream.Client, error) { return nopClient{}, nil },
		NewProbe:  func(e config.Engine) (http.RoundTripper, error) { return l.engines[e.Name], nil },
	})
	var specs []config.Engine
	for _, name := range names {
		spec := config.DefaultEngine()
		spec.Name, spec.URL, spec.Role, spec.Connector = name, "http://"+name, "both", config.ConnectorVLLMNixl
		l.engines[name] = &vllm{load: `vllm:kv_cache_usage_perc{engine="0"} 0`}
		specs = append(specs, spec)
	}
	if err := l.registry.Apply(engine.SourceStatic, specs, time.Hour); err != nil {
		t.Fatal(err)
	}
	note := func(call string) func(engine, result string, took time.Duration) {
		return func(engine, result string, took time.Duration) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.results = append(l.results, fmt.Sprintf("%s %s %s %v", call, engine, result, took))
		}
	}
	l.Manager = New(cfg, Options{Registry: l.registry, Leads: l.leads.Load, Woke: note("wake"), Slept: note("sleep"), Log: slog.New(slog.DiscardHandler)})
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { l.registry.Run(ctx) })
	running.Go(func() { loads.New(l.registry, h, nil).Run(ctx) })
	running.Go(func() { l.Run(ctx) })
	t.Cleanup(func() { stop(); running.Wait() })
	time.Sleep(3 * time.Second)
	return l
}

func (l *lab) instance(name string) *engine.Instance { return l.registry.Snapshot().Instance(name) }

// states returns the states of all engines.
func (l *lab) states() string {
	var s []string
	for _, i := range l.registry.Snapshot().Instances {
		s = append(s, i.Shown())
	}
	return strings.Join(s, " ")
}

// want compares the states, and the results since the last call.
func (l *lab) want(when, states string, results ...string) {
	l.t.Helper()
	synctest.Wait()
	l.mu.Lock()
	got := l.results
	l.results = nil
	l.mu.Unlock()
	slices.Sort(got)
	if s := l.states(); s != states || !slices.Equal(got, results) {
		l.t.Errorf("%s: %s, %q; want %s, %q", when, s, got, states, results)
	}
}

const (
	wakeCalls  = "POST /wake_up, GET /is_sleeping"
	sleepCalls = "POST /sleep?level=1&mode=wait"
)

// TestWake: many requests wake an engine once. The engine gets requests when it says that it is
// awake. After a failure it is not called again for a while.
func TestWake(t *testing.T) {
	for _, tt := range []struct {
		name    string
		fault   func(v *vllm)
		level   int // of the sleep
		result  string
		took    time.Duration
		after   string // state
		calls   string
		heals   func(v *vllm)
		retries bool // the next request after the pause wakes the engine
	}{
		{name: "awake", result: OK, took: 4 * time.Second, after: "ready", calls: wakeCalls},
		{name: "no route", fault: func(v *vllm) { v.fail = status(404) }, result: Unsupported, took: 2 * time.Second, after: "asleep", calls: "POST /wake_up", retries: true},
		{name: "refused", fault: func(v *vllm) { v.fail = status(500) }, result: Refused, took: 2 * time.Second, after: "asleep", calls: "POST /wake_up", retries: true},
		{name: "the connection fails", fault: func(v *vllm) { v.fail = status(-1) }, result: NoAnswer, took: 2 * time.Second, after: "asleep", calls: "POST /wake_up", retries: true},
		{name: "never answers", fault: func(v *vllm) { v.delay = time.Hour }, result: Timeout, took: 10 * time.Second, after: "asleep", calls: "POST /wake_up", heals: func(v *vllm) { v.delay = 0 }, retries: true},
		{name: "stays asleep", fault: func(v *vllm) { v.stuck = true }, result: StillAsleep, took: 4 * time.Second, after: "asleep", calls: wakeCalls, retries: true},
		{name: "an unreadable answer", fault: func(v *vllm) { v.stuck, v.early = true, true }, result: BadAnswer, took: 4 * time.Second, after: "asleep", calls: wakeCalls, retries: true},
		{name: "without weights", level: 2, after: "asleep"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLab(t, config.Sleep{Wake: true, Timeout: config.Duration(10 * time.Second)}, "m")
				v, i := l.engines["m"], l.instance("m")
				v.set(func() { v.asleep, v.level, v.delay = true, max(1, tt.level), 2*time.Second })
				time.Sleep(2 * time.Second)
				l.want("before", "asleep")
				if tt.fault != nil {
					v.set(func() { tt.fault(v) })
				}
				for range 100 {
					l.Wake(i)
				}
				if tt.result == "" {
					time.Sleep(time.Minute)
					l.want("after", tt.after)
					if l.May(i) || v.take() != "" {
						t.Error("an engine without weights is woken")
					}
					return
				}
				l.want("while it wakes", "waking")
				time.Sleep(tt.took)
				l.want("after", tt.after, fmt.Sprintf("wake m %s %v", tt.result, tt.took))
				if calls := v.take(); calls != tt.calls {
					t.Errorf("calls %q, want %q", calls, tt.calls)
				}
				l.Wake(i)
				if calls := v.take(); calls != "" {
					t.Errorf("calls at once again: %q", calls)
				}
				if !tt.retries {
					return
				}
				v.set(func() { v.fail, v.stuck, v.early, v.delay = nil, false, false, 2*time.Second })
				time.Sleep(firstPause)
				l.Wake(i)
				time.Sleep(4 * time.Second)
				l.want("at last", "ready", "wake m ok 4s")
			})
		})
	}
}

func status(n int) func(string) int { return func(string) int { return n } }

// TestPauses: the pause between failed calls doubles, up to a minute.
func TestPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, config.Sleep{Wake: true, Timeout: config.Duration(time.Second)}, "m")
		v, i := l.engines["m"], l.instance("m")
		v.set(func() { v.asleep, v.level, v.fail = true, 1, status(500) })
		time.Sleep(2 * time.Second)
		began, last := time.Now(), time.Now()
		var pauses []time.Duration
		for time.Since(began) < 4*time.Minute {
			l.Wake(i)
			if synctest.Wait(); v.take() != "" {
				pauses = append(pauses, time.Since(last))
				last = time.Now()
			}
			time.Sleep(time.Second / 4)
		}
		var seconds []int
		for _, p := range pauses {
			seconds = append(seconds, int(p.Seconds()))
		}
		if want := []int{0, 1, 2, 4, 8, 16, 32, 60, 60}; !slices.Equal(seconds, want) {
			t.Errorf("pauses %v, want %v", seconds, want)
		}
	})
}

// TestLeaves: the call ends when the engine leaves, and when the proxy ends.
func TestLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, config.Sleep{Wake: true, Timeout: config.Duration(time.Hour)}, "m", "n")
		for _, name := range []string{"m", "n"} {
			v := l.engines[name]
			v.set(func() { v.asleep, v.level, v.delay = true, 1, time.Hour })
		}
		time.Sleep(2 * time.Second)
		l.Wake(l.instance("m"))
		l.Wake(l.instance("n"))
		time.Sleep(time.Second)
		if err := l.registry.Remove("m", time.Minute); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		l.want("removed", "waking", "wake m gone 1s")
		l.cancel()
		l.want("the proxy ends", "asleep", "wake n gone 2s")
	})
}

// TestSleep: the engines of a model that nothing uses are put to sleep, and only those.
func TestSleep(t *testing.T) {
	cfg := config.Sleep{Wake: true, After: config.Duration(10 * time.Second), Timeout: config.Duration(4 * time.Second)}
	for _, tt := range []struct {
		name    string
		use     func(l *lab, v *vllm) // of the engine a1 of model a, while a2 is idle
		states  string                // of a1, a2 and b after 17 s
		results []string
		calls   string // of a1
	}{
		{name: "nothing uses them", states: "asleep asleep asleep", results: []string{"sleep a1 ok 0s", "sleep a2 ok 0s", "sleep b ok 0s"}, calls: sleepCalls},
		{name: "a request of the proxy", use: func(l *lab, _ *vllm) { l.instance("a1").Load[0].Hold(1) }, states: "ready ready asleep", results: []string{"sleep b ok 0s"}},
		{name: "KV that decode has not fetched", use: func(l *lab, _ *vllm) { l.instance("a1").Pin() }, states: "ready ready asleep", results: []string{"sleep b ok 0s"}},
		{name: "short requests", use: func(l *lab, _ *vllm) {
			for range 4 {
				time.Sleep(3 * time.Second)
				l.instance("a1").Load[0].Placed(1, time.Now())
			}
		}, states: "ready ready asleep", results: []string{"sleep b ok 0s"}},
		{name: "a request of others", use: func(_ *lab, v *vllm) { v.set(func() { v.load = `vllm:num_requests_waiting{engine="0"} 1` }) }, states: "ready ready asleep", results: []string{"sleep b ok 0s"}},
		{name: "KV of others", use: func(_ *lab, v *vllm) { v.set(func() { v.load = `vllm:kv_cache_usage_perc{engine="0"} 0.01` }) }, states: "ready ready asleep", results: []string{"sleep b ok 0s"}},
		{name: "drained", use: func(l *lab, _ *vllm) { _ = l.registry.Drain("a1", false) }, states: "draining asleep asleep", results: []string{"sleep a2 ok 0s", "sleep b ok 0s"}},
		{name: "another process leads", use: func(l *lab, _ *vllm) { l.leads.Store(false) }, states: "ready ready ready"},
		{name: "no route", use: func(_ *lab, v *vllm) { v.set(func() { v.fail = status(404) }) }, states: "ready asleep asleep",
			results: []string{"sleep a1 unsupported 0s", "sleep a2 ok 0s", "sleep b ok 0s"}, calls: sleepCalls},
		{name: "refused", use: func(_ *lab, v *vllm) { v.set(func() { v.fail = refuseSleep }) }, states: "ready asleep asleep",
			results: []string{"sleep a1 refused 0s", "sleep a2 ok 0s", "sleep b ok 0s"}, calls: sleepCalls + ", " + wakeCalls},
		{name: "never answers", use: func(_ *lab, v *vllm) { v.set(func() { v.delay = time.Hour }) }, states: "ready asleep asleep",
			results: []string{"sleep a1 timeout 8s", "sleep a2 ok 0s", "sleep b ok 0s"}, calls: sleepCalls + ", POST /wake_up"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLab(t, cfg, "a1", "a2", "b")
				l.want("before", "ready ready ready")
				began := time.Now()
				if tt.use != nil {
					tt.use(l, l.engines["a1"])
				}
				time.Sleep(17*time.Second - time.Since(began))
				l.want("after", tt.states, tt.results...)
				if calls := l.engines["a1"].take(); calls != tt.calls {
					t.Errorf("calls %q, want %q", calls, tt.calls)
				}
			})
		})
	}
}

// TestSharedModels: an engine of several models sleeps when none of them is used.
func TestSharedModels(t *testing.T) {
	cfg := config.Sleep{Wake: true, After: config.Duration(10 * time.Second), Timeout: config.Duration(5 * time.Second)}
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, cfg, "a", "a-b", "b")
		hold := l.instance("b").Load[0].Hold(1)
		time.Sleep(time.Minute)
		l.want("b is used", "asleep ready ready", "sleep a ok 0s")
		hold.Drop()
		time.Sleep(time.Minute)
		l.want("nothing is used", "asleep asleep asleep", "sleep a-b ok 0s", "sleep b ok 0s")
	})
}

func refuseSleep(path string) int {
	if path == "/sleep" {
		return 500
	}
	return 0
}

// TestUsedMeanwhile: an engine that a placement has taken before it was out of placements does not
// fall asleep, or is woken again.
func TestUsedMeanwhile(t *testing.T) {
	cfg := config.Sleep{Wake: true, After: config.Duration(10 * time.Second), Timeout: config.Duration(10 * time.Second)}
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, cfg, "m")
		v, i := l.engines["m"], l.instance("m")
		hold := i.Load[0].Hold(1)
		if !l.registry.BeginSleep(i) || l.registry.BeginSleep(i) || l.registry.BeginWake(i) {
			t.Error("the sleep mode is changed twice at once")
		}
		l.want("out of placements", "asleep")
		l.rest(i)
		l.want("used before the call", "ready", "sleep m used 0s")
		hold.Drop()
		v.set(func() { v.delay = 3 * time.Second })
		for i.Shown() == "ready" {
			time.Sleep(lookEvery)
		}
		time.Sleep(2 * time.Second) // the engine falls asleep, and its reports say that it is awake
		l.want("falls asleep", "asleep")
		hold = i.Load[0].Hold(1)
		time.Sleep(2 * time.Second)
		l.want("used while it fell asleep", "waking", "sleep m ok 3s")
		time.Sleep(6 * time.Second)
		l.want("woken", "ready", "wake m ok 6s")
		hold.Drop()
		if calls := v.take(); calls != sleepCalls+", "+wakeCalls {
			t.Errorf("calls %q", calls)
		}
	})
}

// TestSleepsAgain: a woken engine counts as used. A reload turns the rule on and off.
func TestSleepsAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config.Sleep{Wake: true, Timeout: config.Duration(5 * time.Second)}
		l := newLab(t, cfg, "m")
		time.Sleep(time.Hour)
		l.want("the rule is off", "ready")
		cfg.After = config.Duration(10 * time.Second)
		l.Configure(cfg)
		time.Sleep(11 * time.Second)
		l.want("the rule is on", "asleep", "sleep m ok 0s")
		l.Wake(l.instance("m"))
		time.Sleep(9 * time.Second)
		l.want("used a moment ago", "ready", "wake m ok 0s")
		time.Sleep(3 * time.Second)
		l.want("idle again", "asleep", "sleep m ok 0s")
		cfg.Wake, cfg.After = false, 0
		l.Configure(cfg)
		l.Wake(l.instance("m"))
		time.Sleep(time.Minute)
		l.want("off", "asleep")
	})
}

// FuzzReadSleeping: any answer is read without a panic, and only a boolean counts.
func FuzzReadSleeping(f *testing.F) {
	for _, s := range []string{`{"is_sleeping":true}`, `{"is_sleeping":false}`, `{"is_sleeping":null}`, `{"is_sleeping":"true"}`, `[]`, ``, `{`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		asleep, err := readSleeping(b)
		if err == nil && !strings.Contains(strings.ToLower(string(b)), fmt.Sprint(asleep)) && !strings.Contains(string(b), `\u`) {
			t.Errorf("%q is read as %t", b, asleep)
		}
	})
}
