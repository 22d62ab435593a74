package discovery

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// fakeRegistries answers for bootstrap registries by host:port.
type fakeRegistries struct {
	mu    sync.Mutex
	say   map[string]string // the body of an answer with status 200; "503" or similar: an answer with that status; "": unreachable
	asked []string
}

func (f *fakeRegistries) RoundTrip(r *http.Request) (*http.Response, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, r.URL.String())
	body, status := f.say[r.URL.Host], http.StatusOK
	switch body {
	case "":
		return nil, errors.New("connection refused")
	case "503", "400", "302":
		status = map[string]int{"503": 503, "400": 400, "302": 302}[body]
	}
	return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(body)), Header: http.Header{"Location": {"http://elsewhere/"}}, Request: r}, nil
}

func (f *fakeRegistries) set(host, say string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.say[host] = say
}

func registryAt(name, url string) config.Engine {
	e := config.DefaultEngine()
	e.Name, e.URL, e.Role, e.Connector = name, url, config.RolePrefill, config.ConnectorSGLang
	return e
}

const wholeTopology = `{"attn_tp_size":2,"attn_cp_size":1,"dp_size":4,"pp_size":1,"page_size":64,"kv_cache_dtype":"auto","follow_bootstrap_room":true,"prefill_http_port":30000,"target_tp_rank":null}`

// TestSGLangRegistries: the address of an engine comes from its registry. The engine
// appears when all of its ranks have registered. It stays while the registry is
// unreachable.
func TestSGLangRegistries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, l := newFakeRegistry(), &logs{}
		f := &fakeRegistries{say: map[string]string{"10.0.0.5:8998": "503", "[fd00::5]:9000": wholeTopology}}
		four, six := registryAt("four", "http://10.0.0.5"), registryAt("six", "https://[fd00::5]:9000/base")
		four.HeaderOverrides = true
		m, err := New(config.Discovery{SGLang: config.DiscoverySGLang{Interval: config.Duration(5 * time.Second), Engines: []config.Engine{four, six}}}, options(r, l))
		if err != nil {
			t.Fatal(err)
		}
		m.sources[0].(*sglangSource).http.Transport = f
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { m.Run(ctx) })
		defer running.Wait()
		defer cancel()
		next := func() string {
			time.Sleep(5 * time.Second)
			synctest.Wait()
			return l.take()
		}
		synctest.Wait()
		if got := r.names("sglang"); !slices.Equal(got, []string{"six"}) {
			t.Errorf("engines %v before the other's ranks have registered", got)
		}
		want := six
		want.URL, want.Ranks, want.BootstrapHost, want.BootstrapPort = "https://[fd00::5]:30000/base", 4, "fd00::5", 9000
		if got := r.spec(t, "sglang", "six"); got != want {
			t.Errorf("got  %+v\nwant %+v", got, want)
		}
		if log := l.take(); !strings.Contains(log, "not all ranks have registered") {
			t.Errorf("log %s", log)
		}
		f.set("10.0.0.5:8998", wholeTopology)
		next()
		want = four
		want.URL, want.Ranks, want.BootstrapHost, want.BootstrapPort = "http://10.0.0.5:30000", 4, "10.0.0.5", 8998
		if got := r.spec(t, "sglang", "four"); got != want {
			t.Errorf("got  %+v\nwant %+v", got, want)
		}
		for _, tt := range [...][2]string{ // repeated states cause only one log line
			{"", "connection refused"}, {`{"dp_size":1}`, "engine's address"}, {"503", "ranks"}, {"400", "too old"},
			{"302", "status 302"}, {`{"dp_size":1,"prefill_http_port":65536}`, "engine's address"}, {"x", "no topology"},
		} {
			say, why := tt[0], tt[1]
			f.set("10.0.0.5:8998", say)
			if log := next(); !strings.Contains(log, why) {
				t.Errorf("%q: the log is %s", say, log)
			}
			if got := r.names("sglang"); !slices.Equal(got, []string{"four", "six"}) {
				t.Errorf("%q: engines %v", say, got)
			}
		}
		f.set("10.0.0.5:8998", strings.Replace(strings.Replace(wholeTopology, "30000", "30001", 1), `"dp_size":4`, `"dp_size":2`, 1))
		next()
		if got := r.spec(t, "sglang", "four"); got.URL != "http://10.0.0.5:30001" || got.Ranks != 2 {
			t.Errorf("engine after a restart: %+v", got)
		}
		for _, url := range f.asked {
			if !strings.HasSuffix(url, "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1") {
				t.Errorf("request of %s", url)
			}
		}
	})
}
