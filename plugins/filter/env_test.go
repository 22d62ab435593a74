package filter

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/budget"
)

// u64 returns a number in the encoding for guests, as a Go string literal
// without its quotes.
func u64(n uint64) string {
	return fmt.Sprintf("%q", binary.LittleEndian.AppendUint64(nil, n))
}

func TestProperties(t *testing.T) {
	w := newWorld(t)
	tests := []struct{ when, path, want string }{
		{"configure", "plugin_name", `0 "f"`},
		{"configure", "plugin_root_id", `0 ""`}, // it exists and is empty
		{"configure", "plugin_vm_id", `0 "vm"`},
		{"configure", `request\x00path`, `1 ""`},
		{"request_headers", `request\x00path`, `0 "/v1/x?q=1"`},
		{"request_headers", `request\x00url_path`, `0 "/v1/x"`},
		{"request_headers", `request\x00query`, `0 "q=1"`},
		{"request_headers", `request\x00method`, `0 "POST"`},
		{"request_headers", `request\x00scheme`, `0 "http"`},
		{"request_headers", `request\x00protocol`, `0 "HTTP/1.1"`},
		{"request_headers", `request\x00size`, "0 " + u64(5)},
		{"request_headers", `request\x00headers\x00x-script`, `0 "s"`},
		{"request_headers", `request\x00headers\x00x-none`, `1 ""`},
		{"request_headers", `request\x00useragent`, `0 "Go-http-client/1.1"`},
		{"request_headers", `request\x00duration`, `1 ""`},
		{"request_headers", `response\x00code`, `1 ""`},
		{"request_headers", `connection\x00mtls`, `0 "\x00"`},
		{"request_headers", `connection\x00tls_version`, `1 ""`},
		{"request_headers", `node\x00id`, `0 "node-1"`},
		{"request_headers", `node\x00metadata\x00rack`, `0 "7"`},
		{"request_headers", `xds\x00cluster_name`, `0 "pdproxy"`},
		{"request_headers", "cluster_name", `0 "pdproxy"`},
		{"request_headers", "listener_direction", "0 " + u64(1)},
		{"request_headers", `upstream\x00address`, `1 ""`},
		{"request_headers", `pdproxy\x00decode\x00engine`, `1 ""`},
		{"request_headers", `own`, `1 ""`},
		{"request_headers", `no\x00such\x00thing`, `1 ""`},
		{"response_headers", `response\x00code`, "0 " + u64(200)},
		{"response_headers", `response\x00code_details`, `0 "via_upstream"`},
		{"response_headers", `response\x00headers\x00content-type`, `0 "text/plain"`},
		{"response_headers", `upstream\x00address`, `0 "10.0.0.7:8000"`},
		{"response_headers", `upstream\x00port`, "0 " + u64(8000)},
		{"response_headers", `pdproxy\x00decode\x00engine`, `0 "d1"`},
		{"response_headers", `pdproxy\x00decode\x00rank`, "0 " + u64(2)},
		{"response_headers", `pdproxy\x00prefill\x00engine`, `0 "p0"`},
		{"response_headers", `pdproxy\x00flow`, `0 "prefill_first"`},
		{"response_headers", `pdproxy\x00disagg_id`, "0 " + u64(1<<41)},
		{"response_headers", `pdproxy\x00model`, `0 "m"`},
		{"request_headers", `pdproxy\x00tenant`, `1 ""`},
		{"response_headers", `pdproxy\x00tenant`, `0 "team-a"`},
		{"log", `response\x00size`, "0 " + u64(5)},
		{"log", `request\x00id`, `0 "r-1"`},
	}
	var script strings.Builder
	section := ""
	for _, tt := range tests {
		if want := map[bool]string{true: "main", false: "s"}[tt.when == "configure"]; want != section {
			section = want
			fmt.Fprintf(&script, "[%s]\n", section)
		}
		fmt.Fprintf(&script, "%s: say %s\n%s: call proxy_get_property \"%s\" ret\n", tt.when, strings.ReplaceAll(tt.path, `\x00`, "."), tt.when, tt.path)
	}
	s := spec("f", script.String())
	s.VMID = "vm"
	w.start(s)
	srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
		abi.StreamInfoFrom(r.Context()).Update(func(f *abi.StreamFacts) {
			f.RequestID, f.Tenant, f.Model, f.Flow, f.DisaggID = "r-1", "team-a", "m", abi.FlowPrefillFirst, 1<<41
			f.Prefill = abi.StreamTarget{Engine: "p0", Address: "10.0.0.6:8000"}
			f.Decode = abi.StreamTarget{Engine: "d1", Address: "10.0.0.7:8000", Rank: 2}
		})
		echo(rw, r)
	})
	do(t, srv, "s", "hello")
	w.waitIdle(0)
	got := w.callbacks("f")
	for i, tt := range tests {
		at := fmt.Sprintf("%s proxy_get_property=%s", tt.when, tt.want)
		if j := slices.Index(got, tt.when+" "+strings.ReplaceAll(tt.path, `\x00`, ".")); j < 0 || j+1 >= len(got) || got[j+1] != at {
			t.Errorf("%d %s: want %s, got %q", i, tt.path, at, got[min(j+1, len(got)-1)])
		}
	}
}

func TestPropertiesOfATLSClient(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", `[main]
request_headers: call proxy_get_property "request\x00protocol" ret
request_headers: call proxy_get_property "request\x00scheme" ret
request_headers: call proxy_get_property "connection\x00tls_version" ret
request_headers: call proxy_get_property "connection\x00mtls" ret
request_headers: call proxy_get_header_map_value 0 ":authority" ret`))
	srv := httptest.NewUnstartedServer(w.chain.Wrap(http.HandlerFunc(echo)))
	srv.EnableHTTP2 = true
	srv.StartTLS()
	defer srv.Close()
	resp, body := do(t, srv, "main", "hello")
	if resp.ProtoMajor != 2 || body != "hello" {
		t.Fatalf("got %s %q", resp.Proto, body)
	}
	want := []string{`"HTTP/2"`, `"https"`, `"TLSv1.3"`, `"\x00"`, fmt.Sprintf("%q", resp.Request.URL.Host)}
	for i, got := range w.callbacks("f") {
		if !strings.HasSuffix(got, "=0 "+want[i]) {
			t.Errorf("got %s, want %s", got, want[i])
		}
	}
}

func TestSetProperty(t *testing.T) {
	w := newWorld(t)
	w.start(spec("one", `[main]
configure: call proxy_set_property "k" "v"
[s]
request_headers: call proxy_set_property "own\x00key" "value"
request_headers: call proxy_set_property "big" fill:1048577
request_headers: call proxy_call_foreign_function "set_envoy_filter_state" "\x0a\x01p\x12\x02vv\x18\x01" ret`))
	w.start(spec("two", `[s]
request_headers: call proxy_get_property "own\x00key" ret
request_headers: call proxy_get_property "filter_state\x00p" ret
[t]
request_headers: call proxy_get_property "own\x00key" ret`))
	srv := w.serve(echo)
	do(t, srv, "s", "")
	do(t, srv, "t", "")
	if got := w.callbacks("one"); !slices.Equal(got, []string{"configure proxy_set_property=1", "request_headers proxy_set_property=0", "request_headers proxy_set_property=10", `request_headers proxy_call_foreign_function=0 ""`}) {
		t.Errorf("got %q", got)
	}
	if got := w.callbacks("two"); !slices.Equal(got, []string{`request_headers proxy_get_property=0 "value"`, `request_headers proxy_get_property=0 "vv"`, `request_headers proxy_get_property=1 ""`}) {
		t.Errorf("got %q", got)
	}
}

func TestForeignFunctions(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", `[main]
configure: call proxy_call_foreign_function "nope" null ret
configure: call proxy_call_foreign_function "clear_route_cache" null ret
configure: call proxy_call_foreign_function "get_log_level" null ret
configure: call proxy_call_foreign_function "pdproxy.v1.explain_note" "no stream" ret
configure: call proxy_call_foreign_function "set_envoy_filter_state" "\x0a\x01p" ret
configure: call proxy_call_foreign_function "uncompress" "no zlib" ret
configure: call proxy_call_foreign_function "pdproxy.v1.counter" "\x03\x00\x00\x00\x00\x00\x00\x00turns" ret
configure: call proxy_call_foreign_function "pdproxy.v1.counter" "\x02\x00\x00\x00\x00\x00\x00\x00turns" ret
configure: call proxy_call_foreign_function "pdproxy.v1.counter" "short" ret
[s]
request_headers: call proxy_call_foreign_function "pdproxy.v1.explain_note" "chosen" ret`))
	var notes []string
	srv := w.serve(func(_ http.ResponseWriter, r *http.Request) { notes = abi.StreamInfoFrom(r.Context()).Notes() })
	do(t, srv, "s", "")
	want := []string{
		`configure proxy_call_foreign_function=1 ""`, `configure proxy_call_foreign_function=0 ""`, `configure proxy_call_foreign_function=0 "\x02\x00\x00\x00"`,
		`configure proxy_call_foreign_function=2 ""`, `configure proxy_call_foreign_function=1 ""`, `configure proxy_call_foreign_function=3 ""`,
		`configure proxy_call_foreign_function=0 "\x03\x00\x00\x00\x00\x00\x00\x00"`,
		`configure proxy_call_foreign_function=0 "\x05\x00\x00\x00\x00\x00\x00\x00"`, `configure proxy_call_foreign_function=2 ""`,
		`request_headers proxy_call_foreign_function=0 ""`,
	}
	if got := w.callbacks("f"); !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	if !slices.Equal(notes, []string{"f: chosen"}) {
		t.Errorf("notes %q", notes)
	}
}

func TestCompress(t *testing.T) {
	data := []byte(strings.Repeat("prefill and decode ", 1000))
	p := &Plugin{deps: Deps{Host: budget.NewHost(1<<30, nil)}}
	running := func() bool { return false }
	packed, status := p.compress(data, running)
	r, err := zlib.NewReader(bytes.NewReader(packed))
	if status != host.OK || err != nil {
		t.Fatal(status, err)
	}
	if got, _ := io.ReadAll(r); !bytes.Equal(got, data) || len(packed) > len(data)/10 {
		t.Errorf("%d bytes packed into %d", len(data), len(packed))
	}
	if got, status := p.uncompress(packed, running); status != host.OK || !bytes.Equal(got, data) {
		t.Errorf("got %d bytes, status %d", len(got), status)
	}
	// The fastest level suffices for a bomb: only its content is large.
	var bombed bytes.Buffer
	fast, _ := zlib.NewWriterLevel(&bombed, zlib.BestSpeed)
	fast.Write(make([]byte, maxInflated+1))
	fast.Close()
	bomb := bombed.Bytes()
	if _, status := p.uncompress(bomb, running); status != host.SerializationFailure {
		t.Errorf("bomb: %d", status)
	}
	if _, status := p.uncompress(packed[:len(packed)-3], running); status != host.SerializationFailure {
		t.Errorf("cut short: %d", status)
	}
	if held := p.deps.Host.Held(); held != 0 {
		t.Errorf("%d bytes are still held", held)
	}
	p.deps.Host.SetLimit(1 << 20)
	if _, status := p.uncompress(bomb, running); status != host.InternalFailure {
		t.Errorf("over the budget: %d", status)
	}
	if _, status := p.compress(data, running); status != host.InternalFailure {
		t.Errorf("over the budget: %d", status)
	}
	if held := p.deps.Host.Held(); held != 0 {
		t.Errorf("%d bytes are still held", held)
	}
}

// TestCompressIsInterrupted: a long operation ends in the middle when the call is interrupted.
func TestCompressIsInterrupted(t *testing.T) {
	data := make([]byte, 8<<20)
	p := &Plugin{deps: Deps{Host: budget.NewHost(1<<30, nil)}}
	packed, status := p.compress(data, func() bool { return false })
	if status != host.OK {
		t.Fatal(status)
	}
	looks := 0
	soon := func() bool { looks++; return looks == 3 }
	if _, status := p.compress(data, soon); status != host.InternalFailure || looks != 3 {
		t.Errorf("compress: status %d after %d looks", status, looks)
	}
	looks = 0
	if _, status := p.uncompress(packed, soon); status != host.InternalFailure || looks != 3 {
		t.Errorf("uncompress: status %d after %d looks", status, looks)
	}
	if held := p.deps.Host.Held(); held != 0 {
		t.Errorf("%d bytes are still held", held)
	}
}

func FuzzParseFilterState(f *testing.F) {
	f.Add([]byte("\x0a\x01p\x12\x02vv\x18\x01"))
	f.Add([]byte("\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"))
	f.Add([]byte{0x0d, 1, 2, 3, 4})
	f.Fuzz(func(t *testing.T, b []byte) {
		path, value, err := parseFilterState(b)
		if err == nil && len(path)+len(value) > len(b) {
			t.Errorf("%q %q from %q", path, value, b)
		}
	})
}

func TestMetrics(t *testing.T) {
	w := newWorld(t)
	s := spec("f", `[main]
configure: call proxy_define_metric 0 "c" out
configure: call proxy_define_metric 0 "c" out
configure: call proxy_define_metric 1 "c" out
configure: call proxy_define_metric 1 "g" out
configure: call proxy_define_metric 2 "h" out
configure: call proxy_increment_metric 1 5
configure: call proxy_increment_metric 1 -1
configure: call proxy_record_metric 1 2
configure: call proxy_get_metric 1 out8
configure: call proxy_record_metric 2 10
configure: call proxy_increment_metric 2 -3
configure: call proxy_get_metric 2 out8
configure: call proxy_record_metric 3 8
configure: call proxy_increment_metric 3 1
configure: call proxy_get_metric 3 out8
configure: call proxy_get_metric 9 out8
configure: call proxy_record_metric 0 1
configure: call proxy_increment_metric 9 1`)
	w.start(s)
	want := []string{
		"proxy_define_metric=0 1", "proxy_define_metric=0 1", "proxy_define_metric=2 0", "proxy_define_metric=0 2", "proxy_define_metric=0 3",
		"proxy_increment_metric=0", "proxy_increment_metric=2", "proxy_record_metric=0", "proxy_get_metric=0 7",
		"proxy_record_metric=0", "proxy_increment_metric=0", "proxy_get_metric=0 7",
		"proxy_record_metric=0", "proxy_increment_metric=2", "proxy_get_metric=2 0",
		"proxy_get_metric=1 0", "proxy_record_metric=1", "proxy_increment_metric=1",
	}
	for i, got := range w.callbacks("f") {
		if got != "configure "+want[i] {
			t.Errorf("%d: got %s, want %s", i, got, want[i])
		}
	}
	if h, ok := w.metrics.Find(host.Histogram, "h"); !ok || h.Value() != 8 || h.Records() != 1 {
		t.Errorf("observed %+v", h)
	}
}

func TestQueueBetweenTwoPlugins(t *testing.T) {
	w := newWorld(t)
	receiver := spec("receiver", `[main]
configure: call proxy_register_shared_queue "jobs" out
queue_ready: call proxy_dequeue_shared_queue $id ret
queue_ready: call proxy_enqueue_shared_queue 99 "x"`)
	receiver.VMID = "r"
	p := w.start(receiver)
	sender := spec("sender", `[main]
configure: call proxy_resolve_shared_queue "" "jobs" out
configure: call proxy_resolve_shared_queue "r" "nope" out
configure: call proxy_resolve_shared_queue "r" "jobs" out
[s]
request_headers: call proxy_enqueue_shared_queue 1 "one"
request_headers: call proxy_enqueue_shared_queue 1 "two"
[trap]
request_headers: trap`)
	sender.VMID = "s"
	w.start(sender)
	srv := w.serve(echo)
	do(t, srv, "s", "")
	w.log.wait(t, 1, `receiver: main|queue_ready|1|proxy_dequeue_shared_queue=0 "one"`)
	w.log.wait(t, 1, `receiver: main|queue_ready|1|proxy_dequeue_shared_queue=0 "two"`)
	w.log.wait(t, 1, `proxy_enqueue_shared_queue=1`)
	if got := w.callbacks("sender")[:3]; !slices.Equal(got, []string{"configure proxy_resolve_shared_queue=1 0", "configure proxy_resolve_shared_queue=1 0", "configure proxy_resolve_shared_queue=0 1"}) {
		t.Errorf("got %q", got)
	}
	// A new VM takes over the registration of the VM that it replaces.
	p.mu.Lock()
	v := p.live[0]
	p.mu.Unlock()
	v.lock <- struct{}{}
	v.lose(host.OnTick, "test", 0)
	v.exit()
	w.log.wait(t, 2, "proxy_register_shared_queue=0 1")
	do(t, srv, "s", "")
	w.log.wait(t, 2, `proxy_dequeue_shared_queue=0 "two"`)
}

func TestSharedDataOverVMs(t *testing.T) {
	w := newWorld(t)
	s := spec("f", "[s]\nrequest_headers: incr n")
	s.VMs = 4
	w.start(s)
	other := spec("g", "[s]\nrequest_headers: incr n")
	other.VMID = "own"
	w.start(other)
	srv := w.serve(echo)
	const n = 40
	// A key that does not exist yet is always written, whatever other guests
	// do: proxy-wasm cannot write a key only if it is missing.
	do(t, srv, "s", "")
	done := make(chan bool)
	for range n - 1 {
		go func() {
			do(t, srv, "s", "")
			done <- true
		}()
	}
	for range n - 1 {
		<-done
	}
	w.log.wait(t, 1, fmt.Sprintf("f: s|request_headers|%d|incr %d", 2, 1))
	if len(w.log.find(fmt.Sprintf("|incr %d", n))) != 2 || len(w.log.find(fmt.Sprintf("|incr %d", n+1))) != 0 {
		t.Errorf("the sums are not %d", n)
	}
}

// TestTicks: the next tick is due one period after the last one has returned.
func TestTicks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		p := w.start(spec("f", `[main]
configure: call proxy_set_tick_period_milliseconds 100
tick: say $nth
tick: 3 call proxy_set_tick_period_milliseconds 1000
tick: 5 call proxy_set_tick_period_milliseconds 0`))
		began := time.Now()
		for _, tt := range []struct {
			at    int
			ticks int
		}{{99, 0}, {101, 1}, {299, 2}, {301, 3}, {1299, 3}, {1301, 4}, {2301, 5}, {60000, 5}} {
			time.Sleep(time.Duration(tt.at)*time.Millisecond - time.Since(began))
			synctest.Wait()
			ticks := 0
			for _, c := range w.callbacks("f") {
				if strings.HasPrefix(c, "tick ") && !strings.Contains(c, "=") {
					ticks++
				}
			}
			if ticks != tt.ticks {
				t.Errorf("after %d ms: %d ticks, want %d", tt.at, ticks, tt.ticks)
			}
		}
		if err := p.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// TestReadTimeout: a client does not send its body while a filter holds the
// request.
func TestReadTimeout(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", "[s]\nrequest_headers: return 1"))
	w.chain.Set(w.plugins, Limits{ReadTimeout: 50 * time.Millisecond})
	srv := w.serve(echo)
	body, answers := slowBody(t, srv, "s")
	defer body.Close()
	io.WriteString(body, "begin")
	if resp := <-answers; resp == nil || resp.StatusCode != 408 {
		t.Errorf("got %v", resp)
	} else {
		resp.Body.Close()
	}
}

// TestResponseController: the handler's calls of its ResponseController reach
// the connection.
func TestResponseController(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", ""))
	srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(rw)
		for name, err := range map[string]error{
			"write deadline": rc.SetWriteDeadline(time.Now().Add(time.Minute)),
			"read deadline":  rc.SetReadDeadline(time.Now().Add(time.Minute)),
			"full duplex":    rc.EnableFullDuplex(),
			"flush":          rc.Flush(),
		} {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		io.WriteString(rw, "duplex")
		rc.Flush()
		io.Copy(rw, r.Body)
	})
	body, answers := slowBody(t, srv, "s")
	resp := <-answers // before the body has ended
	io.WriteString(body, " works")
	body.Close()
	if got := readAll(t, resp); got != "duplex works" {
		t.Errorf("got %q", got)
	}
}
