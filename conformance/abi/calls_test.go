package abi

import (
	"compress/zlib"
	"context"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// Calls to upstreams: which calls are rejected, and one answer for each of the
// others (row 13).
func TestHTTPCalls(t *testing.T) {
	const get = "{:method=GET,:path=/get,:authority=somewhere}"
	side := startSide(t)
	upstreams := func(c *config.Config) {
		c.Upstreams = []config.Upstream{{Name: "side", URL: side.URL}, {Name: "secret", URL: side.URL}, {Name: "closed", URL: "http://127.0.0.1:1"}}
	}
	parallel := strings.Repeat(`request_headers: call proxy_http_call "side" `+get+" null {} 5000 out\n", 10)
	p := scripted(t, "calls", ticking+`
http_call_response: say orphan headers $id body $size
[refused]
request_headers: call proxy_http_call "nobody" `+get+` null {} 5000 out
request_headers: call proxy_http_call "secret" `+get+` null {} 5000 out
request_headers: call proxy_http_call "side" {:path=/,:authority=a} null {} 5000 out
request_headers: call proxy_http_call "side" {:method=GET,:authority=a} null {} 5000 out
request_headers: call proxy_http_call "side" {:method=GET,:path=/} null {} 5000 out
request_headers: call proxy_http_call "side" {} null {} 5000 out
request_headers: call proxy_http_call "side" `+get+` null {} -1 out
http_call_response: say answered
delete: say gone
[get]
request_headers: call proxy_http_call "side" {:method=GET,:path=/get?x=1,:authority=somewhere,x-mine=1} null {} 5000 out
request_headers: return 1
http_call_response: say headers $id body $size
http_call_response: call proxy_get_header_map_value 6 ":status" ret
http_call_response: call proxy_get_header_map_value 6 "x-side" ret
http_call_response: call proxy_get_buffer_bytes 4 5 3 ret
http_call_response: call proxy_get_buffer_bytes 4 0 1000 ret
http_call_response: call proxy_set_buffer_bytes 4 0 1 "x"
http_call_response: quiet proxy_set_effective_context $caller
http_call_response: call proxy_get_header_map_value 0 "x-script" ret
http_call_response: call proxy_continue_stream 0
log: call proxy_get_buffer_bytes 4 0 1000 ret
delete: say gone
[post]
request_headers: call proxy_http_call "side" {:method=POST,:path=/post,:authority=a,content-length=999,transfer-encoding=chunked} "some body" {} 5000 out
request_headers: return 1
http_call_response: quiet proxy_set_effective_context $caller
http_call_response: call proxy_continue_stream 0
delete: say gone
[timeout]
request_headers: call proxy_http_call "side" {:method=GET,:path=/hang,:authority=a} null {} 50 out
request_headers: return 1
http_call_response: say headers $id body $size
http_call_response: call proxy_get_status out ret
http_call_response: quiet proxy_set_effective_context $caller
http_call_response: call proxy_continue_stream 0
delete: say gone
[reset]
request_headers: call proxy_http_call "side" {:method=GET,:path=/reset,:authority=a} null {} 5000 out
request_headers: return 1
http_call_response: say headers $id body $size
http_call_response: quiet proxy_set_effective_context $caller
http_call_response: call proxy_continue_stream 0
delete: say gone
[closed]
request_headers: call proxy_http_call "closed" `+get+` null {} 5000 out
request_headers: return 1
http_call_response: say headers $id body $size
http_call_response: quiet proxy_set_effective_context $caller
http_call_response: call proxy_continue_stream 0
delete: say gone
[ten]
`+parallel+`
http_call_response: say headers $id body $size
delete: say gone
[nested]
request_headers: call proxy_http_call "side" {:method=GET,:path=/nested1,:authority=a} null {} 5000 out
request_headers: return 1
http_call_response: quiet proxy_set_effective_context $caller
http_call_response: call proxy_continue_stream 0
http_call_response: quiet proxy_http_call "closed" {:method=GET,:path=/nested2,:authority=a} null {} 5000 out
delete: say gone
[tick]
request_headers: park proxy_http_call "side" {:method=GET,:path=/from-tick,:authority=a} null {} 5000 out
delete: say gone
[gone]
request_headers: call proxy_http_call "side" {:method=GET,:path=/held,:authority=a} null {} 20000 out
http_call_response: say answered
delete: say gone
`)
	p.Upstreams = []string{"side", "closed"}
	n := start(t, options{plugins: []config.Plugin{p}, config: upstreams})

	t.Run("refused", func(t *testing.T) {
		n := n.with(t)
		n.fine(n.post("refused"))
		got := with(n.deleted("refused"), "request_headers proxy_http_call=")
		for i, s := range got {
			if strings.HasPrefix(s, "0") {
				t.Errorf("call %d was accepted", i)
			}
		}
		if len(got) != 7 || side.count() != 0 || len(with(n.book.said("refused"), "http_call_response")) != 0 {
			t.Errorf("%v, %d calls", got, side.count())
		}
	})
	t.Run("get", func(t *testing.T) {
		n := n.with(t)
		n.fine(n.post("get"))
		said := n.deleted("get")
		has(t, said, "request_headers proxy_http_call=0 "+token(said), "http_call_response headers "+answerHeaders(said)+" body 13",
			`http_call_response proxy_get_header_map_value=0 "200"`, `http_call_response proxy_get_header_map_value=0 "1"`,
			`http_call_response proxy_get_buffer_bytes=0 "the"`, `http_call_response proxy_get_buffer_bytes=0 "from the side"`,
			"http_call_response proxy_set_buffer_bytes=2", `http_call_response proxy_get_header_map_value=0 "get"`, "http_call_response proxy_continue_stream=0")
		for _, s := range with(said, "log proxy_get_buffer_bytes=") {
			if strings.HasPrefix(s, "0 \"f") {
				t.Errorf("the answer was still there: %s", s)
			}
		}
		c := side.last()
		if c.method != "GET" || c.path != "/get?x=1" || c.header.Get("X-Mine") != "1" {
			t.Errorf("the upstream got %+v", c)
		}
	})
	t.Run("post", func(t *testing.T) {
		n := n.with(t)
		n.fine(n.post("post"))
		if c := side.last(); c.method != "POST" || c.body != "some body" {
			t.Errorf("the upstream got %+v", c)
		}
	})
	side.script(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/hang":
			<-r.Context().Done()
		case "/reset":
			panic(http.ErrAbortHandler)
		}
	})
	for _, section := range []string{"timeout", "reset", "closed"} {
		t.Run(section, func(t *testing.T) {
			n := n.with(t)
			n.fine(n.post(section))
			said := n.deleted(section)
			if got := with(said, "http_call_response headers "); !slices.Equal(got, []string{"0 body 0"}) {
				t.Errorf("answers %v", got)
			}
		})
	}
	side.script(nil)
	t.Run("ten at once", func(t *testing.T) {
		n := n.with(t)
		n.fine(n.post("ten"))
		// An answer may arrive after the end of the stream. The guest then
		// handles it in main.
		n.logged("all are answered once", func() bool {
			return len(with(n.book.said("ten"), "http_call_response headers "))+len(with(n.book.said("main"), "http_call_response orphan ")) == 10
		})
		tokens := with(n.deletedSoon("ten"), "request_headers proxy_http_call=0 ")
		slices.Sort(tokens)
		if len(slices.Compact(tokens)) != 10 {
			t.Errorf("tokens %v", tokens)
		}
	})
	t.Run("nested", func(t *testing.T) {
		n := n.with(t)
		before := len(with(n.book.said("main"), "http_call_response orphan "))
		n.fine(n.post("nested"))
		n.deletedSoon("nested")
		n.logged("the second call is answered", func() bool {
			return len(with(n.book.said("main"), "http_call_response orphan ")) == before+1
		})
	})
	t.Run("from a tick", func(t *testing.T) {
		n := n.with(t)
		before := side.count()
		side.script(nil)
		n.engine.Script(func(w http.ResponseWriter, r testbed.Leg) {
			n.eventually("the call came", func() bool { return side.count() > before })
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, engineAnswer)
		})
		n.fine(n.post("tick"))
		n.engine.Script(answers)
		if c := side.last(); c.path != "/from-tick" {
			t.Errorf("the upstream got %+v", c)
		}
	})
	t.Run("answered after the stream", func(t *testing.T) {
		n := n.with(t)
		before := len(with(n.book.said("main"), "http_call_response orphan "))
		release := make(chan struct{})
		side.script(func(w http.ResponseWriter, r *http.Request) { <-release; io.WriteString(w, "late") })
		n.fine(n.post("gone"))
		n.deletedSoon("gone")
		close(release)
		n.logged("the root context has the answer", func() bool {
			got := with(n.book.said("main"), "http_call_response orphan ")
			return len(got) == before+1 && strings.HasSuffix(got[before], "body 4")
		})
	})
	t.Run("client leaves", func(t *testing.T) {
		n := n.with(t)
		release := make(chan struct{})
		entered := make(chan struct{})
		side.script(func(w http.ResponseWriter, r *http.Request) { close(entered); <-release })
		ctx, leave := context.WithCancel(context.Background())
		defer leave()
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, n.url+"/v1/completions", strings.NewReader(unary))
		req.Header.Set("X-Script", "get")
		done := make(chan struct{})
		gone := len(with(n.book.said("get"), "delete "))
		go func() { do(n.client, req); close(done) }()
		<-entered
		leave()
		<-done
		n.logged("it is deleted", func() bool { return len(with(n.book.said("get"), "delete ")) > gone })
		close(release)
		side.script(nil)
		n.fine(n.post("get"))
	})
}

// deletedSoon waits for the deletion of a section whose last line may not be
// its own.
func (n *node) deletedSoon(section string) []string {
	n.t.Helper()
	n.logged("the stream of "+section+" is deleted", func() bool { return slices.Contains(n.book.said(section), "delete gone") })
	return n.book.said(section)
}

func token(said []string) string {
	return strings.Join(with(said, "request_headers proxy_http_call=0 "), "")
}

func answerHeaders(said []string) string {
	for _, s := range with(said, "http_call_response headers ") {
		n, _, _ := strings.Cut(s, " ")
		return n
	}
	return "?"
}

func (s *side) last() seen {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.calls) == 0 {
		return seen{}
	}
	return s.calls[len(s.calls)-1]
}

// Ticks arrive while the guest wants them, and no longer (row 14).
func TestTicks(t *testing.T) {
	n := start(t, options{plugins: []config.Plugin{
		scripted(t, "three", `
configure: call proxy_set_tick_period_milliseconds 1
tick: say ticked $nth
tick: 3 call proxy_set_tick_period_milliseconds 0
`), scripted(t, "on", `
configure: quiet proxy_set_tick_period_milliseconds 1
tick: 1 quiet proxy_set_tick_period_milliseconds 3
tick: 40 call proxy_define_metric 0 "forty" out
tick: 40 call proxy_increment_metric $last 1
tick: 40 quiet proxy_set_tick_period_milliseconds 0
`)}})
	n.eventually("the other plugin has ticked forty times", func() bool { return n.metric("pdproxy_plugin_forty") > 0 })
	ticks := map[string]int{}
	for _, s := range with(n.book.said("main"), "tick ticked ") {
		ticks[s]++
	}
	if ticks["1"] == 0 || ticks["1"] != ticks["2"] || ticks["2"] != ticks["3"] || len(ticks) != 3 {
		t.Errorf("ticks %v", ticks)
	}
}

// All instances and plugins of a vm_id share data, and other vm_ids do not see
// it. Compare and swap loses no increment (row 15).
func TestSharedData(t *testing.T) {
	mine := scripted(t, "mine", `
[cas]
request_headers: call proxy_get_shared_data "nothing" ret out
request_headers: call proxy_set_shared_data "k" "v1" 0
request_headers: call proxy_get_shared_data "k" ret out
request_headers: call proxy_set_shared_data "k" "v2" $last
request_headers: call proxy_set_shared_data "k" "v3" $last
request_headers: call proxy_set_shared_data "k" "v4" 4000000000
request_headers: call proxy_get_shared_data "k" ret out
request_headers: call proxy_set_shared_data "k" "v5" 0
request_headers: call proxy_get_shared_data "k" ret out
request_headers: call proxy_set_shared_data "new" "v" 77
request_headers: call proxy_set_shared_data "null" null 0
request_headers: call proxy_get_shared_data "null" ret out
delete: say gone
[count]
request_headers: incr number
[read]
request_headers: call proxy_get_shared_data "number" ret out
delete: say gone
`)
	mine.VMID = "one"
	also := scripted(t, "also", `
[also]
request_headers: call proxy_get_shared_data "k" ret out
delete: say gone
`)
	also.VMID = "one"
	other := scripted(t, "other", `
[also]
response_headers: call proxy_get_shared_data "k" ret out
`)
	other.VMID = "two"
	n := start(t, options{plugins: []config.Plugin{mine, also, other}})
	n.fine(n.post("cas"))
	said := n.deleted("cas")
	want := []string{`get_shared_data=1 "" 0`, "set_shared_data=0", `get_shared_data=0 "v1" `, "set_shared_data=0", "set_shared_data=8", "set_shared_data=8",
		`get_shared_data=0 "v2" `, "set_shared_data=0", `get_shared_data=0 "v5" `, "set_shared_data=0", "set_shared_data=0", `get_shared_data=0 "" `}
	got := with(said, "request_headers proxy_")
	for i, w := range want {
		if i >= len(got) || !strings.HasPrefix(got[i], w) {
			t.Fatalf("step %d: got %q, want %q", i, got, w)
		}
	}
	seenCAS := map[string]bool{}
	for _, s := range got {
		if f := strings.Fields(s); strings.HasPrefix(s, "get_shared_data=0") {
			if cas := f[len(f)-1]; cas == "0" || seenCAS[cas] {
				t.Errorf("got cas %s, want one above 0 that is new: %v", cas, got)
			} else {
				seenCAS[cas] = true
			}
		}
	}
	n.fine(n.post("also"))
	said = n.deleted("also")
	has(t, said, "request_headers "+strings.Replace(got[8], "get", "proxy_get", 1))
	if r := with(said, "response_headers proxy_get_shared_data="); !slices.Equal(r, []string{`1 "" 0`}) {
		t.Errorf("values of another vm_id: %v", r)
	}

	n.fine(n.post("count")) // makes the entry
	const requests = 200
	work := make(chan struct{}, requests)
	done := make(chan reply, requests)
	for range requests {
		work <- struct{}{}
	}
	close(work)
	for range 16 {
		go func() {
			for range work {
				done <- n.post("count")
			}
		}()
	}
	for range requests {
		n.fine(<-done)
	}
	n.fine(n.post("read"))
	if r := with(n.deleted("read"), "request_headers proxy_get_shared_data=0 "); len(r) != 1 || !strings.HasPrefix(r[0], strconv.Quote(strconv.Itoa(requests+1))) {
		t.Errorf("the sum is %v, want %d", r, requests+1)
	}
}

// Queues are identified by vm_id and name, and keep the order and the data of
// items (row 16).
func TestQueues(t *testing.T) {
	reader := scripted(t, "reader", `
vm_start: say start
configure: call proxy_register_shared_queue "jobs" out
queue_ready: say ready $id
queue_ready: call proxy_dequeue_shared_queue $id ret
[alone]
request_headers: call proxy_register_shared_queue "own" out
request_headers: call proxy_dequeue_shared_queue $last ret
request_headers: call proxy_enqueue_shared_queue $last "a"
request_headers: call proxy_enqueue_shared_queue $last "b"
request_headers: call proxy_enqueue_shared_queue $last null
request_headers: call proxy_register_shared_queue "own" out
request_headers: call proxy_dequeue_shared_queue $last ret
request_headers: call proxy_dequeue_shared_queue $last ret
request_headers: call proxy_dequeue_shared_queue $last ret
request_headers: call proxy_dequeue_shared_queue $last ret
request_headers: call proxy_enqueue_shared_queue 999999 "x"
request_headers: call proxy_dequeue_shared_queue 999999 ret
request_headers: call proxy_resolve_shared_queue "" "own" out
request_headers: call proxy_resolve_shared_queue "" "never" out
request_headers: call proxy_resolve_shared_queue "nobody" "jobs" out
delete: say gone
`)
	reader.VMID = "reading"
	writer := scripted(t, "writer", `
[write]
request_headers: call proxy_resolve_shared_queue "" "jobs" out
request_headers: call proxy_resolve_shared_queue "reading" "jobs" out
request_headers: call proxy_enqueue_shared_queue $last "job 1"
delete: say gone
`)
	writer.VMID = "writing"
	n := start(t, options{plugins: []config.Plugin{reader, writer}})
	n.fine(n.post("alone"))
	got := with(n.deleted("alone"), "request_headers proxy_")
	id := strings.TrimPrefix(got[0], "register_shared_queue=0 ")
	want := []string{"register_shared_queue=0 " + id, `dequeue_shared_queue=7 ""`, "enqueue_shared_queue=0", "enqueue_shared_queue=0", "enqueue_shared_queue=0",
		"register_shared_queue=0 " + id, `dequeue_shared_queue=0 "a"`, `dequeue_shared_queue=0 "b"`, `dequeue_shared_queue=0 ""`, `dequeue_shared_queue=7 ""`,
		"enqueue_shared_queue=1", `dequeue_shared_queue=1 ""`, "resolve_shared_queue=0 " + id, "resolve_shared_queue=1 0", "resolve_shared_queue=1 0"}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	n.fine(n.post("write"))
	w := with(n.deleted("write"), "request_headers proxy_resolve_shared_queue=")
	if len(w) == 0 || w[0] != "1 0" {
		t.Errorf("the other plugin's queue under its own vm_id: %v", w)
	}
	n.logged("the reader has the job", func() bool {
		return slices.Contains(n.book.said("main"), `queue_ready proxy_dequeue_shared_queue=0 "job 1"`)
	})
}

// Metrics of a guest are metrics of the proxy (row 17).
func TestMetrics(t *testing.T) {
	n := start(t, options{plugins: []config.Plugin{scripted(t, "meter", `
[use]
request_headers: call proxy_define_metric 0 "my.counter" out
request_headers: call proxy_increment_metric $last 5
request_headers: call proxy_increment_metric $last -1
request_headers: call proxy_record_metric $last 9
request_headers: call proxy_get_metric $last out8
request_headers: call proxy_define_metric 0 "my.counter" out
request_headers: call proxy_define_metric 1 "my_gauge" out
request_headers: call proxy_record_metric $last 7
request_headers: call proxy_increment_metric $last -2
request_headers: call proxy_get_metric $last out8
request_headers: call proxy_define_metric 2 "my_histogram" out
request_headers: call proxy_record_metric $last 3
request_headers: call proxy_increment_metric $last 1
request_headers: call proxy_get_metric $last out8
request_headers: call proxy_increment_metric 999999 1
request_headers: call proxy_record_metric 999999 1
request_headers: call proxy_get_metric 999999 out8
request_headers: call proxy_define_metric 1 "my.counter" out
request_headers: call proxy_define_metric 0 "" out
request_headers: call proxy_define_metric 0 "odd name \xff\"}\n" out
delete: say gone
`)}})
	n.fine(n.post("use"))
	got := with(n.deleted("use"), "request_headers proxy_")
	if len(got) != 20 {
		t.Fatal(got)
	}
	if got[0] != got[5] {
		t.Errorf("defined twice: %s, then %s", got[0], got[5])
	}
	for i, want := range map[int]string{1: "increment_metric=0", 2: "increment_metric=2", 7: "record_metric=0", 8: "increment_metric=0", 9: "get_metric=0 5",
		11: "record_metric=0", 12: "increment_metric=2", 14: "increment_metric=1", 15: "record_metric=1", 16: "get_metric=1 0"} {
		if got[i] != want {
			t.Errorf("step %d: %s, want %s", i, got[i], want)
		}
	}
	if strings.HasPrefix(got[13], "get_metric=0") {
		t.Errorf("a histogram has a value: %s", got[13])
	}
	if strings.HasPrefix(got[17], "define_metric=0") {
		t.Logf("a counter was defined again as a gauge: %s", got[17])
	}
	if v := n.metric("pdproxy_plugin_my_gauge", `plugin="meter"`); v != 5 {
		t.Errorf("the gauge is %v", v)
	}
	if v := n.metric("pdproxy_plugin_my_counter", `plugin="meter"`) + n.metric("pdproxy_plugin_my_counter_total", `plugin="meter"`); v < 5 {
		t.Errorf("the counter is %v", v)
	}
	if v := n.metric("pdproxy_plugin_my_histogram_count", `plugin="meter"`); v != 1 {
		t.Errorf("the histogram has %v values", v)
	}
}

// Foreign functions: unknown ones, results that the guest does not want,
// Envoy's compress and uncompress (row 18).
func TestForeignFunctions(t *testing.T) {
	n := start(t, options{plugins: []config.Plugin{scripted(t, "foreign", `
[call]
request_headers: call proxy_call_foreign_function "no such thing" "x" ret
request_headers: call proxy_call_foreign_function "" "x" ret
request_headers: call proxy_call_foreign_function "compress" "abcabcabcabc" ret
request_headers: call proxy_call_foreign_function "compress" "abcabcabcabc" 0 0
request_headers: call proxy_call_foreign_function "uncompress" "not zlib" ret
delete: say gone
`)}})
	n.fine(n.post("call"))
	got := with(n.deleted("call"), "request_headers proxy_call_foreign_function=")
	if len(got) != 5 || got[0] != `1 ""` || got[1] != `1 ""` || got[3] != "0" || strings.HasPrefix(got[4], "0 ") {
		t.Fatalf("got %v", got)
	}
	packed, err := strconv.Unquote(strings.TrimPrefix(got[2], "0 "))
	if err != nil {
		t.Fatal(got[2], err)
	}
	z, err := zlib.NewReader(strings.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	if plain, err := io.ReadAll(z); err != nil || string(plain) != "abcabcabcabc" {
		t.Errorf("compress made %q, %v", plain, err)
	}
}

// A guest that is not done keeps its context until it calls proxy_done (row 19).
func TestDone(t *testing.T) {
	n := start(t, options{plugins: []config.Plugin{scripted(t, "done", ticking+`
[later]
request_headers: call proxy_done
done: say done
done: park proxy_done
done: return 0
log: say log
delete: say gone
[plain]
request_headers: call proxy_done
done: say done
log: say log
delete: say gone
`)}})
	n.fine(n.post("plain"))
	n.deleted("plain")
	if got := n.book.said("plain"); !slices.Equal(got, []string{"request_headers proxy_done=1", "done done", "log log", "delete gone"}) {
		t.Errorf("got %v", got)
	}
	n.fine(n.post("later"))
	n.deleted("later")
	if got := n.book.said("later"); !slices.Equal(got, []string{"request_headers proxy_done=1", "done done", "tick proxy_done=0", "log log", "delete gone"}) {
		t.Errorf("got %v", got)
	}
}
