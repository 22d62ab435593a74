package loads

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/load"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// fakeEngines answers for every engine, by host. It answers probes as a healthy engine
// that serves model m, and all other paths with the host's function in load. Without
// a function the call fails.
type fakeEngines struct {
	mu    sync.Mutex
	load  map[string]func(path string) (status int, body string) // by host
	delay map[string]time.Duration                               // delay of the load calls, by host
	calls map[string]int                                         // by host and path
	busy  map[string]int                                         // running load calls, by host
	most  int                                                    // largest number of simultaneous load calls of one host
	key   string                                                 // Authorization header of the last load call
}

func (f *fakeEngines) RoundTrip(r *http.Request) (*http.Response, error) {
	host, path := r.URL.Hostname(), r.URL.RequestURI()
	answer := func(status int, body string) (*http.Response, error) {
		return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(body)), Header: http.Header{}, Request: r}, nil
	}
	switch path {
	case "/v1/models":
		return answer(200, `{"data":[{"id":"m"}]}`)
	case "/version", "/server_info":
		return answer(200, `{"version":"1.0"}`)
	case "/kv_event_sources":
		return answer(200, "{}")
	case "/health":
		return answer(200, "")
	}
	f.mu.Lock()
	say, delay := f.load[host], f.delay[host]
	f.calls[host+path]++
	f.key = r.Header.Get("Authorization")
	f.busy[host]++
	f.most = max(f.most, f.busy[host])
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.busy[host]--
	}()
	select {
	case <-time.After(delay):
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	if say == nil {
		return nil, errors.New("connection refused")
	}
	return answer(say(path))
}

// lab is a registry of fake engines with a poller.
type lab struct {
	*fakeEngines
	registry *engine.Registry
	poller   *Poller
	health   config.Health
	log      testbed.Log
}

// quiet is a connector that does not read the metrics itself. So the tests count
// only the poller's calls.
type quiet struct{ engine.Protocol }

func (q quiet) FactPaths(role abi.Role) []string {
	return slices.DeleteFunc(q.Protocol.FactPaths(role), func(path string) bool { return path == "/metrics" })
}

// noLoads is a connector whose engines report no load.
type noLoads struct{ quiet }

func (noLoads) Loads() []engine.LoadRoute { return nil }

// nopClient is a client that no test calls.
type nopClient struct{ upstream.Client }

func (nopClient) CloseIdle() {}

func newLab(t *testing.T, specs ...config.Engine) *lab {
	t.Helper()
	l := &lab{fakeEngines: &fakeEngines{
		load: map[string]func(string) (int, string){}, delay: map[string]time.Duration{}, calls: map[string]int{}, busy: map[string]int{},
	}}
	l.health = config.Default().Health
	l.registry = engine.New(engine.Options{
		Health: l.health, Circuit: config.Default().Circuit,
		Protocols: func(name string) (engine.Protocol, bool) {
			if name == "noloads" {
				c, _ := connector.ByName(config.ConnectorNone)
				return noLoads{quiet{c}}, true
			}
			c, ok := connector.ByName(name)
			return quiet{c}, ok
		},
		NewClient: func(config.Engine) (upstream.Client, error) { return nopClient{}, nil },
		NewProbe:  func(config.Engine) (http.RoundTripper, error) { return l.fakeEngines, nil },
		APIKey:    func(config.Engine) (string, error) { return "k", nil },
	})
	for i := range specs {
		s := &specs[i]
		s.URL, s.Role = "http://"+s.Name, config.RoleBoth
		s.Ranks = max(1, s.Ranks)
	}
	if err := l.registry.Apply(engine.SourceStatic, specs, 0); err != nil {
		t.Fatal(err)
	}
	l.poller = New(l.registry, l.health, slog.New(slog.NewTextHandler(&l.log, nil)))
	return l
}

// start runs the lab until the test ends, in simulated time. The polls come half a
// second after the steps of the test.
func (l *lab) start(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { l.registry.Run(ctx) })
	synctest.Wait() // all engines are ready
	time.Sleep(time.Second / 2)
	running.Go(func() { l.poller.Run(ctx) })
	time.Sleep(time.Second / 2)
	t.Cleanup(func() { cancel(); running.Wait() })
}

func (l *lab) set(change func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change()
}

func (l *lab) count(call string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.calls[call]
}

// view returns the current load of a rank.
func (l *lab) view(name string, rank int) load.View {
	return l.registry.Snapshot().Instance(name).Load[rank].View(time.Now())
}

// says returns a function that answers one path with body, and other paths with 404.
func says(path, body string) func(string) (int, string) {
	return func(asked string) (int, string) {
		if asked == path {
			return 200, body
		}
		return 404, `{"detail":"Not Found"}`
	}
}

func TestPoll(t *testing.T) {
	const sglangLoads = `{"loads":[{"dp_rank":0,"num_running_reqs":2,"num_total_tokens":100,"num_waiting_uncached_tokens":30,"token_usage":0.5},
		{"dp_rank":1,"num_running_reqs":4,"num_total_tokens":300,"num_waiting_uncached_tokens":0,"token_usage":1}]}`
	tests := []struct {
		name  string
		spec  config.Engine
		say   func(string) (int, string)
		polls int // polls until the load is known
		want  []load.View
		block int
	}{
		{"vllm", config.Engine{Connector: config.ConnectorVLLMNixl, Ranks: 2}, says("/metrics", vllmMetrics), 1,
			[]load.View{{Requests: 5, Tokens: 2292, Decode: 2292, Usage: 0.25}, {Requests: 5, Tokens: 4584, Decode: 4584, Usage: 0.5}}, 16},
		{"vllm on the second of two nodes", config.Engine{Connector: config.ConnectorVLLMNixl, Ranks: 2},
			says("/metrics", "vllm:num_requests_running{engine=\"3\"} 7\nvllm:num_requests_running{engine=\"2\"} 5\n"), 1,
			[]load.View{{Requests: 5}, {Requests: 7}}, 0},
		{"vllm as one target", config.Engine{Connector: config.ConnectorVLLMNixl}, says("/metrics", vllmMetrics), 1,
			[]load.View{{Requests: 10, Tokens: 6876, Decode: 6876, Usage: 0.375}}, 16},
		{"vllm with more ranks than configured and fewer", config.Engine{Connector: config.ConnectorVLLMNixl, Ranks: 3}, says("/metrics", vllmMetrics), 1,
			[]load.View{{Requests: 5, Tokens: 2292, Decode: 2292, Usage: 0.25}, {Requests: 5, Tokens: 4584, Decode: 4584, Usage: 0.5}, {}}, 16},
		{"sglang", config.Engine{Connector: config.ConnectorSGLang, Ranks: 2}, says("/v1/loads?include=core,disagg,queues,memory", sglangLoads), 1,
			[]load.View{{Requests: 2, Tokens: 100, Queued: 30, Decode: 70, Usage: 0.5}, {Requests: 4, Tokens: 300, Decode: 300, Usage: 1}}, 0},
		{"sglang without one of the sections", config.Engine{Connector: config.ConnectorSGLang}, func(path string) (int, string) {
			if path == "/v1/loads?include=core,disagg,queues,memory" {
				return 400, `{"detail":"Invalid include"}`
			}
			return says("/v1/loads?include=core", sglangLoads)(path)
		}, 2, []load.View{{Requests: 6, Tokens: 400, Queued: 30, Decode: 370, Usage: 0.75}}, 0},
		{"sglang of old", config.Engine{Connector: config.ConnectorSGLang}, says("/get_load", `[{"dp_rank":0,"num_reqs":3,"num_waiting_reqs":1,"num_tokens":90}]`), 3,
			[]load.View{{Requests: 3, Tokens: 90, Decode: 90}}, 0},
		{"sglang of older", config.Engine{Connector: config.ConnectorSGLang}, says("/metrics", "sglang:num_running_reqs 3\n"), 4,
			[]load.View{{Requests: 3}}, 0},
		{"trtllm", config.Engine{Connector: config.ConnectorTRTLLM, Ranks: 4}, says("/metrics", trtllmOld), 1,
			[]load.View{
				{Requests: 3, Tokens: 86880, Decode: 86880, Usage: 0.75}, {Requests: 3, Tokens: 86880, Decode: 86880, Usage: 0.75},
				{Requests: 1, Tokens: 86880, Decode: 86880, Usage: 0.75}, {Requests: 1, Tokens: 86880, Decode: 86880, Usage: 0.75},
			}, 64},
		{"vllm with adapters", config.Engine{Connector: config.ConnectorVLLMNixl}, says("/metrics", loraMetrics), 1, []load.View{{Requests: 4}}, 0},
		{"an engine of unknown kind", config.Engine{Connector: config.ConnectorNone}, says("/v1/loads?include=core", sglangLoads), 2,
			[]load.View{{Requests: 6, Tokens: 400, Queued: 30, Decode: 370, Usage: 0.75}}, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tt.spec.Name = "e"
				l := newLab(t, tt.spec)
				l.load["e"] = tt.say
				l.start(t)
				for n := 1; ; n++ {
					known := l.view("e", 0) != load.View{}
					if known != (n >= tt.polls) {
						t.Fatalf("after %d polls: load known = %v", n, known)
					}
					if known {
						break
					}
					time.Sleep(time.Second)
				}
				for rank, want := range tt.want {
					if got := l.view("e", rank); got != want {
						t.Errorf("rank %d: got  %+v\nwant %+v", rank, got, want)
					}
				}
				if got := l.registry.Snapshot().Instance("e").BlockTokens(); got != tt.block {
					t.Errorf("got %d tokens per block, want %d", got, tt.block)
				}
				l.mu.Lock()
				defer l.mu.Unlock()
				if l.log.String() != "" || l.key != "Bearer k" {
					t.Errorf("log %q, key %q", l.log.String(), l.key)
				}
			})
		})
	}
}

// TestAdapters: the report of a target has its engine's LoRA adapters. An engine whose ranks
// share one report has none.
func TestAdapters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, config.Engine{Name: "one", Connector: config.ConnectorVLLMNixl}, config.Engine{Name: "two", Connector: config.ConnectorVLLMNixl, Ranks: 2})
		l.load["one"] = says("/metrics", loraMetrics)
		l.load["two"] = says("/metrics", strings.ReplaceAll(loraMetrics, `engine="0",`, ""))
		l.start(t)
		for name, want := range map[string]abi.AdapterState{"one": abi.AdapterRunning, "two": abi.AdapterUnknown} {
			for rank := range l.registry.Snapshot().Instance(name).Load {
				r, ok := l.registry.Snapshot().Instance(name).Load[rank].Reported()
				if got := r.Adapters.State("chat"); got != want || !ok {
					t.Errorf("%s/%d: %v, %v, want %v", name, rank, got, ok, want)
				}
			}
		}
	})
}

// TestOwnIsNotForeign: an engine's answer also counts the requests that this proxy
// sent. They do not count as requests of others.
func TestOwnIsNotForeign(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, config.Engine{Name: "e", Connector: config.ConnectorVLLMNixl})
		l.load["e"] = says("/metrics", "vllm:num_requests_running 3\nvllm:num_requests_waiting 1\n")
		l.delay["e"] = 300 * time.Millisecond
		l.start(t)
		i := l.registry.Snapshot().Instance("e")
		holds := []load.Hold{i.Load[0].Hold(10), i.Load[0].Hold(10), i.Load[0].Hold(10)}
		time.Sleep(700 * time.Millisecond) // a poll is under way
		for n := range holds {
			holds[n].Drop()
		}
		time.Sleep(300 * time.Millisecond)
		if got := l.view("e", 0); got.Requests != 1 {
			t.Errorf("%+v: one of the four is foreign", got)
		}
		time.Sleep(time.Second)
		if got := l.view("e", 0); got.Requests != 4 {
			t.Errorf("%+v: got no foreign requests, want four", got)
		}
	})
}

// TestTrouble: after a bad answer of any kind the engine stays ready, its last load
// fades, and the log reports the cause once.
func TestTrouble(t *testing.T) {
	for name, say := range map[string]func(string) (int, string){
		"refuses":  nil,
		"status":   func(string) (int, string) { return 500, "SECRET" },
		"redirect": func(string) (int, string) { return 302, "SECRET" },
		"key":      func(string) (int, string) { return 401, "SECRET" },
		"garbage":  func(string) (int, string) { return 200, "[SECRET" },
		"silent":   func(string) (int, string) { return 200, "SECRET 1\n" },
		"unknown":  func(string) (int, string) { return 404, "SECRET" },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLab(t, config.Engine{Name: "e", Connector: config.ConnectorVLLMNixl})
				l.load["e"] = says("/metrics", vllmMetrics)
				l.start(t)
				if l.view("e", 0).Requests != 10 {
					t.Fatalf("%+v", l.view("e", 0))
				}
				l.set(func() { l.load["e"] = say })
				time.Sleep(3 * time.Second)
				if got := l.view("e", 0).Requests; got <= 0 || got >= 10 {
					t.Errorf("got %d requests after three seconds", got)
				}
				time.Sleep(10 * time.Second)
				if got := l.view("e", 0); got != (load.View{}) {
					t.Errorf("load %+v remains", got)
				}
				if s := l.registry.Snapshot().Instance("e").State(); s != engine.Ready {
					t.Errorf("state %v", s)
				}
				if text := l.log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "engine=e") || strings.Contains(text, "SECRET") {
					t.Errorf("log %q", text)
				}
				l.set(func() { l.load["e"] = says("/metrics", vllmMetrics) })
				time.Sleep(restFor + time.Second)
				if got := l.view("e", 0).Requests; got != 10 {
					t.Errorf("%d requests after the recovery", got)
				}
			})
		})
	}
}

// TestTransfers: the poller measures each transfer that an engine reports once. A
// token of this engine has 2^30/1024 bytes.
func TestTransfers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		last := func(speed, millis float64) func(string) (int, string) {
			return says("/v1/loads?include=core,disagg,queues,memory", fmt.Sprintf(`{"loads":[{"dp_rank":0,"num_running_reqs":1,"memory":{"kv_cache_gb":4,"token_capacity":4096},
				"disaggregation":{"mode":"prefill","kv_transfer_speed_gb_s":%g,"kv_transfer_latency_ms":%g}}]}`, speed, millis))
		}
		l := newLab(t, config.Engine{Name: "e", Connector: config.ConnectorSGLang})
		l.load["e"] = last(0, 0)
		l.start(t)
		speed := &l.registry.Snapshot().Instance("e").Transfers
		if got := speed.PerToken(); got != 0 {
			t.Errorf("%v µs a token before there was a transfer", got)
		}
		// 10 GB/s for 100 ms are 1024 tokens, 98 µs each.
		l.set(func() { l.load["e"] = last(10, 100) })
		time.Sleep(time.Minute) // every poll reports the same transfer
		if got := speed.PerToken(); got < 97 || got > 98 {
			t.Errorf("got %v µs a token, want 97.7", got)
		}
		l.set(func() { l.load["e"] = last(5, 200) }) // a transfer of the same size that took twice as long
		time.Sleep(2 * time.Second)
		if got := speed.PerToken(); got < 146 || got > 147 {
			t.Errorf("got %v µs a token, want the mean of 97.7 and 195.3", got)
		}
	})
}

// TestRest: the poller rarely polls an engine that has none of the paths.
func TestRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, config.Engine{Name: "e", Connector: config.ConnectorSGLang})
		l.load["e"] = says("", "")
		l.start(t)
		time.Sleep(5 * time.Minute)
		for _, path := range []string{"/v1/loads?include=core,disagg,queues,memory", "/v1/loads?include=core", "/get_load", "/metrics"} {
			if n := l.count("e" + path); n < 4 || n > 6 {
				t.Errorf("%s got %d polls in five minutes", path, n)
			}
		}
	})
}

// TestOneAtATime: the poller sends no second call to an engine before the first is
// answered. A slow engine does not delay the polls of others.
func TestOneAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		specs := []config.Engine{{Name: "slow", Connector: config.ConnectorVLLMNixl}, {Name: "fast", Connector: config.ConnectorVLLMNixl}}
		l := newLab(t, specs...)
		l.health.Timeout = config.Duration(time.Minute)
		l.poller.Configure(l.health)
		for _, s := range specs {
			l.load[s.Name] = says("/metrics", vllmMetrics)
		}
		l.delay["slow"] = 9500 * time.Millisecond
		l.start(t)
		time.Sleep(30 * time.Second)
		if slow, fast := l.count("slow/metrics"), l.count("fast/metrics"); slow != 4 || fast != 31 || l.most != 1 {
			t.Errorf("slow got %d polls, fast %d, at most %d at the same time", slow, fast, l.most)
		}
		if got := l.view("slow", 0).Requests; got == 0 {
			t.Error("no load of the slow engine is known")
		}
	})
}

// TestTimeout: a poll that gets no answer ends after its time-out.
func TestTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, config.Engine{Name: "e", Connector: config.ConnectorVLLMNixl})
		l.load["e"] = says("/metrics", vllmMetrics)
		l.delay["e"] = time.Hour
		l.start(t)
		time.Sleep(10 * time.Second)
		if n := l.count("e/metrics"); n < 5 {
			t.Errorf("got %d polls", n)
		}
		if !strings.Contains(l.log.String(), "deadline") {
			t.Errorf("log %q", l.log.String())
		}
	})
}

// TestInterval: a new interval takes effect, and an interval of 0 ends the polls.
func TestInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, config.Engine{Name: "e", Connector: config.ConnectorVLLMNixl})
		l.load["e"] = says("/metrics", vllmMetrics)
		l.start(t)
		asked := func(in time.Duration) int {
			before := l.count("e/metrics")
			time.Sleep(in)
			return l.count("e/metrics") - before
		}
		if n := asked(10 * time.Second); n != 10 {
			t.Errorf("%d polls in 10 s", n)
		}
		for _, tt := range []struct {
			every time.Duration
			want  int
		}{{5 * time.Second, 4}, {0, 0}, {250 * time.Millisecond, 80}, {0, 0}} {
			l.health.LoadInterval = config.Duration(tt.every)
			l.poller.Configure(l.health)
			synctest.Wait()
			if n := asked(20*time.Second - time.Millisecond); n != max(0, tt.want-1) {
				t.Errorf("interval %s: %d polls in 20 s after the first", tt.every, n)
			}
		}
	})
}

// TestComeAndGo: the poller polls engines from the time that they are ready until they leave.
func TestComeAndGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t)
		l.start(t)
		for n := range 3 {
			name := fmt.Sprint("e", n)
			l.set(func() { l.load[name] = says("/metrics", vllmMetrics) })
			spec := config.Engine{Name: name, URL: "http://" + name, Role: config.RoleBoth, Connector: config.ConnectorNone, Ranks: 1}
			if err := l.registry.Add(spec); err != nil {
				t.Fatal(err)
			}
			time.Sleep(5 * time.Second)
			if got := l.view(name, 0).Requests; got != 10 {
				t.Errorf("%s has %d requests", name, got)
			}
			if err := l.registry.Remove(name, 0); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
			before := l.count(name + "/metrics")
			time.Sleep(5 * time.Second)
			if after := l.count(name + "/metrics"); after != before {
				t.Errorf("%s got %d polls after it had left", name, after-before)
			}
		}
	})
}

// TestNoLoadRoutes: the poller does not call an engine whose connector has no load route.
func TestNoLoadRoutes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, config.Engine{Name: "e", Connector: "noloads"}, config.Engine{Name: "f", Connector: config.ConnectorNone})
		l.set(func() { l.load["f"] = says("/metrics", vllmMetrics) })
		l.start(t)
		time.Sleep(5 * time.Second)
		if n, other := l.count("e/metrics"), l.view("f", 0).Requests; n != 0 || other != 10 || l.log.String() != "" {
			t.Errorf("got %d polls and %d requests on the other engine, want 0 and 10; log %q", n, other, l.log.String())
		}
	})
}

// TestRunWaits: no poll outlives Run.
func TestRunWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, config.Engine{Name: "e", Connector: config.ConnectorVLLMNixl})
		l.delay["e"] = time.Second
		ready, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); l.registry.Run(ready) }()
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(300*time.Millisecond, cancel)
		l.poller.Run(ctx)
		if l.busy["e"] != 0 || l.count("e/metrics") != 1 || l.log.String() != "" {
			t.Errorf("%d polls under way of %d, log %q", l.busy["e"], l.count("e/metrics"), l.log.String())
		}
		stop()
		<-done
	})
}

// TestSleep: a rank that sleeps is no target, until a poll shows that it is awake. It is awake, too, if
// the engine does not report its sleep any more, or if the polls end.
func TestSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab(t, config.Engine{Name: "one", Connector: config.ConnectorVLLMNixl}, config.Engine{Name: "two", Connector: config.ConnectorVLLMNixl, Ranks: 2})
		const running = "vllm:num_requests_running{engine=\"0\"} 0\nvllm:num_requests_running{engine=\"1\"} 0\n"
		// The engine "one" has one counter for both of its ranks.
		state := func(name string, awake ...int) {
			l.set(func() {
				text := running
				for n, a := range awake {
					text += sleeps(strconv.Itoa(n), "m", a, 1-a)
				}
				l.load[name] = says("/metrics", text)
			})
			time.Sleep(2 * time.Second)
		}
		want := func(when string, one string, rows ...string) {
			t.Helper()
			var got []string
			for _, r := range l.pool(t).Both {
				got = append(got, fmt.Sprintf("%s/%d", r.Spec.Name, r.Rank))
			}
			if i := l.registry.Snapshot().Instance("one"); !slices.Equal(got, rows) || i.Shown() != one || len(l.pool(t).Asleep) != 3-len(rows) {
				t.Errorf("%s: targets %v, %d asleep, one is %s; want %v, one is %s", when, got, len(l.pool(t).Asleep), i.Shown(), rows, one)
			}
		}
		l.load["one"], l.load["two"] = says("/metrics", running), says("/metrics", running)
		l.start(t)
		want("no report", "ready", "one/0", "two/0", "two/1")
		state("one", 1, 0)
		want("one of the ranks of a counter", "ready", "one/0", "two/0", "two/1")
		state("one", 0, 0)
		want("all ranks", "asleep", "two/0", "two/1")
		state("two", 1, 0)
		want("one of two ranks", "asleep", "two/0")
		state("two", 0, 0)
		want("all", "asleep")
		if l.registry.Snapshot().Ready() {
			t.Error("ready although all sleep")
		}
		state("one", 1, 1)
		want("awake", "ready", "one/0")
		state("two")
		want("no report any more", "ready", "one/0", "two/0", "two/1")
		state("two", 0, 0)
		want("asleep again", "ready", "one/0")
		h := l.health
		h.LoadInterval = 0
		l.poller.Configure(h)
		time.Sleep(2 * time.Second)
		want("no polls", "ready", "one/0", "two/0", "two/1")
	})
}

func (l *lab) pool(t *testing.T) *engine.Pool {
	t.Helper()
	for _, model := range l.registry.Snapshot().Models() {
		p, _ := l.registry.Snapshot().Pool(model)
		return p
	}
	t.Fatal("no model")
	return nil
}
