package filter

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/plugins/budget"
)

// repeated returns a line of a script n times.
func repeated(n int, line string) string { return strings.Repeat(line+"\n", n) }

// startWithin starts a plugin with a budget of that many bytes.
func (w *world) startWithin(bytes int64, script string) (*Plugin, *budget.Host) {
	d := w.deps()
	d.Host = budget.NewHost(bytes, func(reason string) { w.meter.Fail(0, reason) })
	s := spec("f", script)
	s.Timeout = 20 * time.Second // the test copies much data, also under the race detector
	return w.startWith(s, d), d.Host
}

// statuses counts the statuses that a host function returned.
func (w *world) statuses(function string) map[string]int {
	counts := map[string]int{}
	for _, line := range w.log.find("|" + function + "=") {
		_, status, _ := strings.Cut(line, function+"=")
		status, _, _ = strings.Cut(status, " ")
		counts[status]++
	}
	return counts
}

// idle waits until the host holds no bytes for the plugin.
func (w *world) idle(h *budget.Host) {
	w.t.Helper()
	for range 20000 {
		if h.Held() == 0 {
			return
		}
		<-nap()
	}
	w.t.Errorf("%d bytes are still held", h.Held())
}

// TestWhatAStreamHolds: a guest that makes the host hold too much gets an error
// status. The stream continues, and its bytes are free when it is over.
func TestWhatAStreamHolds(t *testing.T) {
	for _, tt := range []struct {
		name, script, function string
		want                   map[string]int
	}{
		{"header lines", "request_headers: call proxy_add_header_map_value 0 \"x-a\" fill:60000", "proxy_add_header_map_value", map[string]int{"0": 4, "10": 6}},
		{"a header line, again and again", "request_headers: call proxy_replace_header_map_value 0 \"x-a\" fill:100000", "proxy_replace_header_map_value", map[string]int{"0": 10}},
		{"lines of an answer", "response_headers: call proxy_add_header_map_value 2 \"x-a\" fill:60000", "proxy_add_header_map_value", map[string]int{"0": 4, "10": 6}},
		{"a pseudo-header", "request_headers: call proxy_replace_header_map_value 0 \":path\" fill:300000", "proxy_replace_header_map_value", map[string]int{"10": 10}},
		{"a trailer", "request_body: eos call proxy_add_header_map_value 1 \"x-a\" fill:60000", "proxy_add_header_map_value", map[string]int{"0": 4, "10": 6}},
		{"body bytes", "request_body: eos call proxy_set_buffer_bytes 0 0 0 fill:60000", "proxy_set_buffer_bytes", map[string]int{"0": 4, "10": 6}},
		{"the body of an answer", "response_body: eos call proxy_set_buffer_bytes 1 0 0 fill:60000", "proxy_set_buffer_bytes", map[string]int{"0": 4, "10": 6}},
		{"a body that is replaced", "request_body: eos call proxy_set_buffer_bytes 0 0 0xffffffff fill:200000", "proxy_set_buffer_bytes", map[string]int{"0": 10}},
		{"a property", "request_headers: call proxy_set_property \"p\" fill:300000", "proxy_set_property", map[string]int{"10": 10}},
		{"an answer", "response_headers: call proxy_send_local_response 403 null fill:300000 {} -1", "proxy_send_local_response", map[string]int{"10": 10}},
		{"an answer's lines", "response_headers: call proxy_send_local_response 403 null null pairs:1024 -1\nresponse_headers: call proxy_add_header_map_value 2 \"x-a\" fill:256000", "proxy_send_local_response", map[string]int{"0": 1, "10": 9}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			_, held := w.startWithin(256<<10, "[s]\n"+repeated(10, tt.script)+"[plain]\nrequest_headers: say hello")
			srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				io.WriteString(rw, "answer")
			})
			if resp, _ := do(t, srv, "s", "body"); resp.StatusCode != 200 && resp.StatusCode != 403 {
				t.Errorf("got status %d", resp.StatusCode)
			}
			w.idle(held)
			if got := w.statuses(tt.function); fmt.Sprint(got) != fmt.Sprint(tt.want) {
				t.Errorf("statuses %v, want %v", got, tt.want)
			}
			if refused := slices.Contains(w.meter.all(), budget.RefusedMemory); refused != (tt.want["10"] > 0) {
				t.Errorf("counted %q", w.meter.all())
			}
			if resp, body := do(t, srv, "plain", "x"); resp.StatusCode != 200 || body != "answer" {
				t.Errorf("the next request: %d %q", resp.StatusCode, body)
			}
		})
	}
}

// TestLinesOfAMap: with any budget, a map has at most as many lines as the
// serialized form may have.
func TestLinesOfAMap(t *testing.T) {
	w := newWorld(t)
	w.startWithin(1<<30, `[s]
response_headers: call proxy_set_header_map_pairs 2 pairs:1024
response_headers: call proxy_add_header_map_value 2 "one" "more"
response_headers: call proxy_remove_header_map_value 2 "x-pair-7"
response_headers: call proxy_replace_header_map_value 2 ":status" "200"
response_headers: call proxy_add_header_map_value 2 "one" "more"
response_headers: call proxy_replace_header_map_value 2 "x-pair-8" "longer"`)
	srv := w.serve(echo)
	srv.Client().Transport.(*http.Transport).MaxResponseHeaderBytes = 1 << 20
	if resp, _ := do(t, srv, "s", "x"); resp.StatusCode != 200 || resp.Header.Get("X-Pair-8") != "longer" || resp.Header.Get("One") != "" {
		t.Errorf("got %d %d lines", resp.StatusCode, len(resp.Header))
	}
	want := []string{"proxy_set_header_map_pairs=0", "proxy_add_header_map_value=10", "proxy_remove_header_map_value=0",
		"proxy_replace_header_map_value=0", "proxy_add_header_map_value=10", "proxy_replace_header_map_value=0"}
	for i, got := range w.callbacks("f") {
		if got != "response_headers "+want[i] {
			t.Errorf("step %d: %s, want %s", i, got, want[i])
		}
	}
}

// TestLongStreamsGiveBack: data that a guest adds to the events of a long
// stream counts only until the client has received it.
func TestLongStreamsGiveBack(t *testing.T) {
	w := newWorld(t)
	_, held := w.startWithin(256<<10, "[s]\nresponse_body: !eos call proxy_set_buffer_bytes 1 0 0 fill:200000")
	srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
		for range 20 {
			io.WriteString(rw, "event")
			http.NewResponseController(rw).Flush()
		}
	})
	if _, body := do(t, srv, "s", ""); len(body) != 20*200005 {
		t.Errorf("the body has %d bytes", len(body))
	}
	if got := w.statuses("proxy_set_buffer_bytes"); got["0"] != 20 || len(got) != 1 {
		t.Errorf("statuses %v", got)
	}
	w.idle(held)
}

const bigCall = `call proxy_http_call "sink" {:method=POST,:path=/,:authority=x} fill:60000 {} `

// TestCallsAreHeldUntilTheyEnd: the bytes of calls to an upstream that does not
// answer count for the plugin until the calls time out.
func TestCallsAreHeldUntilTheyEnd(t *testing.T) {
	w := newWorld(t)
	release := make(chan struct{})
	w.upstream("sink", func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-release:
		case <-r.Context().Done():
		}
	})
	defer close(release)
	_, held := w.startWithin(256<<10, "[s]\n"+repeated(10, "request_headers: "+bigCall+"60000 out")+
		"[short]\n"+repeated(2, "request_headers: "+bigCall+"1 out")+"http_call_response: say over\n[main]\nhttp_call_response: say over")
	srv := w.serve(echo)
	do(t, srv, "s", "x")
	if got := w.statuses("proxy_http_call"); got["0"] < 1 || got["10"] < 1 || got["0"]+got["10"] != 10 {
		t.Errorf("statuses %v", got)
	}
	if n := held.Held(); n < 60000 || n > 256<<10 {
		t.Errorf("%d bytes are held", n)
	}
	if got := w.meter.all(); !slices.Contains(got, budget.RefusedMemory) {
		t.Errorf("counted %q", got)
	}
	held.SetLimit(1 << 20)
	before := held.Held()
	do(t, srv, "short", "x")
	w.log.wait(t, 2, "|http_call_response|1|over")
	for range 20000 {
		if held.Held() <= before {
			return
		}
		<-nap()
	}
	t.Errorf("%d bytes are held, %d before the calls that timed out", held.Held(), before)
}

// TestAnswersOfCallsCount: a call fails when the budget is too small for its
// answer.
func TestAnswersOfCallsCount(t *testing.T) {
	for _, tt := range []struct {
		name   string
		answer http.HandlerFunc
		want   string // number of header lines
	}{
		{"small", func(rw http.ResponseWriter, _ *http.Request) { rw.Write(make([]byte, 1000)) }, "1000"},
		{"large body", func(rw http.ResponseWriter, _ *http.Request) { rw.Write(make([]byte, 200<<10)) }, "0"},
		{"many lines", func(rw http.ResponseWriter, _ *http.Request) {
			for i := range 2000 {
				rw.Header()[fmt.Sprint("X-", i)] = []string{""}
			}
			rw.WriteHeader(200)
		}, "0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.upstream("side", tt.answer)
			_, held := w.startWithin(128<<10, `[s]
request_headers: call proxy_http_call "side" {:method=GET,:path=/,:authority=x} null {} 60000 out
http_call_response: say $size
[main]
http_call_response: say $size`)
			do(t, w.serve(echo), "s", "x")
			if got := w.log.wait(t, 1, "|http_call_response|1|"); !strings.HasSuffix(got[0], "|"+tt.want) {
				t.Errorf("got %q, want %s", got, tt.want)
			}
			w.idle(held)
		})
	}
}

// TestLogIsBounded: log lines above the plugin's rate are dropped and counted.
func TestLogIsBounded(t *testing.T) {
	w := newWorld(t)
	w.startWithin(0, "[s]\n"+repeated(200, "request_headers: quiet proxy_log 2 fill:65536"))
	do(t, w.serve(echo), "s", "x")
	if lines := w.log.find("xxxx"); len(lines) < 60 || len(lines) > 150 {
		t.Errorf("%d lines of 64 KiB were logged", len(lines))
	}
	if !slices.Contains(w.meter.all(), budget.RefusedLog) {
		t.Errorf("counted %q", w.meter.all())
	}
}
