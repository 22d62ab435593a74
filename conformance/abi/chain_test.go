package abi

import (
	"io"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// Filters see a request in file order and its answer in reverse order. A filter
// that holds or answers a request keeps it from the next filter.
func TestChainOrder(t *testing.T) {
	const common = ticking + `
[order]
request_headers: call proxy_add_header_map_value 0 "x-order" "NAME"
request_body: eos call proxy_set_buffer_bytes 0 0xffffffff 0 "PAD"
response_headers: call proxy_add_header_map_value 2 "x-order" "NAME"
response_body: eos call proxy_set_buffer_bytes 1 0xffffffff 0 "NAME"
response_body: !eos return 1
request_body: !eos return 1
`
	script := func(name, pad, more string) string {
		return strings.NewReplacer("NAME", name, "PAD", pad).Replace(common) + more
	}
	n := start(t, options{plugins: []config.Plugin{
		scripted(t, "a", script("a", " ", `
[hold]
request_headers: say a holds
request_headers: park proxy_continue_stream 0
request_headers: return 1
delete: say gone
[reply]
request_headers: say a saw it
response_headers: call proxy_add_header_map_value 2 "x-a" "saw the reply"
`)),
		scripted(t, "b", script("b", "\\t", `
[hold]
request_headers: say b
[reply]
request_headers: call proxy_send_local_response 403 null "b says no" {} -1
response_headers: call proxy_add_header_map_value 2 "x-b" "1"
`)),
		scripted(t, "c", script("c", "\\n", `
[hold]
request_headers: say c
[reply]
request_headers: say c saw it
response_headers: call proxy_add_header_map_value 2 "x-c" "1"
`)),
	}})
	for _, protocol := range []string{"h1", "h2"} {
		t.Run("order "+protocol, func(t *testing.T) {
			n := n.with(t)
			client := n.client
			if protocol == "h2" {
				client = h2Client()
				defer client.CloseIdleConnections()
			}
			r := n.send(client, "order", unary)
			if r.status != 200 || r.body != engineAnswer+"cba" || !slices.Equal(r.header["X-Order"], []string{"c", "b", "a"}) {
				t.Errorf("got %d %q %v", r.status, r.body, r.header["X-Order"])
			}
			e := n.last()
			if !slices.Equal(e.Header["X-Order"], []string{"a", "b", "c"}) {
				t.Errorf("the engine got %v", e.Header["X-Order"])
			}
			if tail, ok := strings.CutPrefix(e.Text, unary); !ok || tail != " \t\n" && tail != "" {
				t.Errorf("the engine got %q", e.Text)
			}
		})
	}
	t.Run("hold", func(t *testing.T) {
		n := n.with(t)
		n.fine(n.post("hold"))
		has(t, n.deletedSoon("hold"), "request_headers a holds", "tick proxy_continue_stream=0", "request_headers b", "request_headers c")
	})
	t.Run("reply", func(t *testing.T) {
		n := n.with(t)
		r := n.post("reply")
		if r.status != 403 || r.body != "b says no" || r.header.Get("X-C") != "" {
			t.Errorf("got %d %q %v", r.status, r.body, r.header)
		}
		if got := with(n.book.said("reply"), "request_headers c saw"); len(got) > 0 {
			t.Error("a filter after the reply got the request")
		}
	})
}

// A thousand simultaneous streams run through one or two instances. Each stream
// is complete, and each context is deleted.
func TestManyStreams(t *testing.T) {
	streams := 1000
	if testing.Short() {
		streams = 200
	}
	old := runtime.GOMAXPROCS(2) // two instances of each guest
	defer runtime.GOMAXPROCS(old)
	n := start(t, options{plugins: []config.Plugin{
		scripted(t, "many", "[many]\nrequest_headers: call proxy_add_header_map_value 0 \"x-seen\" \"1\"\n[live]\nrequest_headers: say $live\n"),
	}})
	var waiting atomic.Int64
	release := make(chan struct{})
	n.engine.Script(func(w http.ResponseWriter, r testbed.Leg) {
		if r.Header.Get("X-Script") != "many" {
			io.WriteString(w, engineAnswer)
			return
		}
		events(w, 3, func(i int) {
			if i == 1 {
				waiting.Add(1)
				select {
				case <-release:
				case <-r.Context().Done():
				}
			}
		})
	})
	var wg sync.WaitGroup
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: streams}}
	defer client.CloseIdleConnections()
	body := strings.Replace(unary, "{", `{"stream":true,`, 1)
	want := event(0) + event(1) + event(2) + "data: [DONE]\n\n"
	var wrong atomic.Int64
	for range streams {
		wg.Go(func() {
			if r := n.send(client, "many", body); r.err != nil || r.body != want {
				if wrong.Add(1) == 1 {
					t.Errorf("got %d %v %q", r.status, r.err, r.body)
				}
			}
		})
	}
	n.eventually("all are open at once", func() bool { return waiting.Load() == int64(streams) || wrong.Load() > 0 })
	close(release)
	wg.Wait()
	if wrong.Load() > 0 {
		t.Errorf("%d of %d streams are wrong", wrong.Load(), streams)
	}
	n.eventually("no context is left", func() bool {
		before := len(n.book.said("live"))
		for range 4 {
			n.post("live")
		}
		return !slices.ContainsFunc(n.book.said("live")[before:], func(s string) bool { return s != "request_headers 1" })
	})
}

// versioned marks request and answer with its version.
func versioned(version string) []byte {
	return newModule().
		function("proxy_on_request_headers", "iii:i", "", `i32 0 "x-version" "`+version+`" call proxy_add_header_map_value drop i32 0`).
		function("proxy_on_response_headers", "iii:i", "", `i32 2 "x-version" "`+version+`" call proxy_add_header_map_value drop i32 0`).
		bytes()
}

// A filter is reloaded a hundred times under load. No request fails, none sees
// two versions, and nothing of the old versions remains.
func TestReloadUnderLoad(t *testing.T) {
	reloads := 100
	if testing.Short() {
		reloads = 20
	}
	file := writeModule(t, newModule())
	replaceFile(t, file, versioned("v0"))
	n := start(t, options{plugins: []config.Plugin{filter("f", file, "")}})
	n.engine.Script(func(w http.ResponseWriter, r testbed.Leg) {
		w.Header().Set("X-Asked", strings.Join(r.Header["X-Version"], ","))
		events(w, 3, func(int) { runtime.Gosched() })
	})
	var stop atomic.Bool
	var requests, bad atomic.Int64
	var wg sync.WaitGroup
	body := strings.Replace(unary, "{", `{"stream":true,`, 1)
	for range 8 {
		wg.Go(func() {
			for !stop.Load() {
				r := n.send(n.client, "", body)
				requests.Add(1)
				version := strings.Join(r.header["X-Version"], ",")
				if asked := r.header.Get("X-Asked"); r.err != nil || r.status != 200 || len(version) != 2 || asked != "" && asked != version || !strings.HasSuffix(r.body, "[DONE]\n\n") {
					if bad.Add(1) == 1 {
						t.Errorf("got %d %v; version at the request %s, version of the answer %s: %q", r.status, r.err, asked, version, r.body)
					}
				}
			}
		})
	}
	var settled usage
	for i := range reloads {
		version := "v" + string(rune('0'+(i+1)%2))
		replaceFile(t, file, versioned(version))
		if status, why := n.reloadPlugin("f"); status != 200 {
			t.Fatalf("reload %d: %d %s", i, status, why)
		}
		if i == reloads/2 {
			settled = measure()
		}
	}
	after := requests.Load()
	n.eventually("requests go on", func() bool { return requests.Load() > after+20 })
	stop.Store(true)
	wg.Wait()
	if bad.Load() > 0 {
		t.Errorf("%d of %d requests failed", bad.Load(), requests.Load())
	}
	n.eventually("the resources of the process stay constant", func() bool {
		runtime.GC()
		now := measure()
		return now.goroutines <= settled.goroutines+5 && now.mappings <= settled.mappings+20 && now.heap <= settled.heap+16<<20
	})
	if t.Failed() {
		t.Logf("in the middle %+v, now %+v", settled, measure())
	}
	if got := n.post("").header.Get("X-Version"); got != "v"+string(rune('0'+reloads%2)) {
		t.Errorf("now %q serves", got)
	}
}

// usage holds the process's resources. Compiled code has mappings of its own.
type usage struct {
	goroutines, mappings int
	heap                 uint64
}

func measure() usage {
	runtime.GC()
	maps, _ := os.ReadFile("/proc/self/maps")
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return usage{runtime.NumGoroutine(), strings.Count(string(maps), "\n"), m.HeapAlloc}
}

// A SIGHUP reload changes the configuration of the whole chain: filters are
// added, removed and changed.
func TestReloadOfTheChain(t *testing.T) {
	text := func(v string) string {
		return "[main]\nresponse_headers: call proxy_add_header_map_value 2 \"x-text\" \"" + v + "\"\n"
	}
	n := start(t, options{plugins: []config.Plugin{scripted(t, "a", text("a1"))}})
	want := func(values ...string) {
		t.Helper()
		r := n.post("main")
		n.fine(r)
		if !slices.Equal(r.header["X-Text"], values) {
			t.Errorf("got %v, want %v", r.header["X-Text"], values)
		}
	}
	want("a1")
	change := func(plugins ...config.Plugin) {
		t.Helper()
		if err := n.reload(func(c *config.Config) { c.Plugins = plugins }); err != nil {
			t.Fatal(err)
		}
	}
	change(scripted(t, "a", text("a2")))
	want("a2")
	change(scripted(t, "a", text("a2")), scripted(t, "b", text("b")))
	want("b", "a2")
	change(scripted(t, "b", text("b")), scripted(t, "a", text("a2")))
	want("a2", "b")
	if err := n.reload(func(c *config.Config) {
		c.Plugins = []config.Plugin{scripted(t, "a", text("a3")), filter("x", "/nonexistent", "")}
	}); err == nil {
		t.Error("a configuration with a missing module was accepted")
	}
	want("a2", "b")
	change()
	want()
	if row := n.row("a"); row != nil {
		t.Errorf("the removed plugin is still listed: %v", row)
	}
}
