package abi

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// has asserts that the guest logged these texts in this order, perhaps with
// others between them.
func has(t *testing.T, said []string, want ...string) {
	t.Helper()
	i := 0
	for _, s := range said {
		if i < len(want) && s == want[i] {
			i++
		}
	}
	if i < len(want) {
		t.Errorf("the log lacks %q (after %d expected lines):\n%s", want[i], i, strings.Join(said, "\n"))
	}
}

// with returns the texts with a prefix, and removes the prefix.
func with(said []string, prefix string) (rest []string) {
	for _, s := range said {
		if r, ok := strings.CutPrefix(s, prefix); ok {
			rest = append(rest, r)
		}
	}
	return rest
}

const request = ":method=POST,:path=/v1/completions,:authority=a,:scheme=http,content-type=application/json"

// Serialized header maps work in both directions. Invalid ones count as empty
// and have no other effect (row 5).
func TestPairs(t *testing.T) {
	n := start(t, options{plugins: []config.Plugin{scripted(t, "pairs", `
[good]
request_headers: call proxy_set_header_map_pairs 0 {`+request+`,x-one=1,x-two=a,x-two=b,x-empty=}
request_headers: call proxy_get_header_map_pairs 0 ret
request_headers: call proxy_get_header_map_value 0 "x-empty" ret
request_headers: call proxy_get_header_map_size 0 out
delete: say gone
[none]
request_headers: call proxy_set_header_map_pairs 0 {}
request_headers: call proxy_get_header_map_pairs 0 ret
request_headers: call proxy_get_header_map_size 0 out
request_headers: call proxy_set_header_map_pairs 0 {`+request+`}
delete: say gone
[many]
request_headers: call proxy_set_header_map_pairs 0 pairs:1024
request_headers: call proxy_get_header_map_value 0 "x-pair-1023" ret
request_headers: call proxy_set_header_map_pairs 0 {`+request+`,x-ok=1}
delete: say gone
[bad]
response_headers: call proxy_add_header_map_value 2 "x-there" "1"
response_headers: call proxy_set_header_map_pairs 2 pairs:1025
response_headers: call proxy_set_header_map_pairs 2 fill:1048577
response_headers: call proxy_set_header_map_pairs 2 "\xff\xff\xff\xff"
response_headers: call proxy_set_header_map_pairs 2 "\x01\x00\x00"
response_headers: call proxy_set_header_map_pairs 2 "\x01\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00a\x01b\x00"
response_headers: call proxy_set_header_map_pairs 2 "\x01\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00a\x00b\x00c"
response_headers: call proxy_set_header_map_pairs 2 "\x01\x00\x00\x00\xff\xff\xff\xff\x01\x00\x00\x00a\x00b\x00"
response_headers: call proxy_get_header_map_value 2 ":status" ret
response_headers: call proxy_set_header_map_pairs 2 {:status=200,content-type=application/json,x-after=1}
delete: say gone
`)}})
	t.Run("round trip", func(t *testing.T) {
		n.fine(n.post("good"))
		said := n.deleted("good")
		has(t, said, "request_headers proxy_set_header_map_pairs=0", `request_headers proxy_get_header_map_value=0 ""`)
		text, err := strconv.Unquote(strings.Join(with(said, "request_headers proxy_get_header_map_pairs=0 "), ""))
		if err != nil {
			t.Fatal(err)
		}
		for _, pair := range []string{":method\x00POST\x00", "x-one\x001\x00", "x-two\x00a\x00x-two\x00b\x00", "x-empty\x00\x00"} {
			if !strings.Contains(text, pair) {
				t.Errorf("%q is not in %q", pair, text)
			}
		}
		if size := with(said, "request_headers proxy_get_header_map_size=0 "); len(size) != 1 || size[0] == "0" {
			t.Errorf("the size is %v", size)
		}
		e := n.last()
		if e.Header.Get("X-One") != "1" || !slices.Equal(e.Header["X-Two"], []string{"a", "b"}) || e.Header.Get("X-Script") != "" {
			t.Errorf("the engine got %v", e.Header)
		}
	})
	t.Run("none", func(t *testing.T) {
		n.fine(n.post("none"))
		has(t, n.deleted("none"), "request_headers proxy_set_header_map_pairs=0", `request_headers proxy_get_header_map_pairs=0 ""`)
	})
	t.Run("many", func(t *testing.T) {
		n.fine(n.post("many"))
		has(t, n.deleted("many"), `request_headers proxy_get_header_map_value=0 "1023"`)
		if e := n.last(); e.Header.Get("X-Ok") != "1" {
			t.Errorf("the engine got %v", e.Header)
		}
	})
	t.Run("bad", func(t *testing.T) {
		r := n.post("bad")
		n.fine(r)
		if r.header.Get("X-After") != "1" {
			t.Errorf("got %v", r.header)
		}
		said := n.deleted("bad")
		if got := with(said, "response_headers proxy_set_header_map_pairs="); len(got) != 8 || got[7] != "0" {
			t.Errorf("statuses %v", got)
		}
		has(t, said, `response_headers proxy_get_header_map_value=1 ""`) // each invalid map counts as an empty map
	})
}

// Header lines are read and changed by name in every phase (row 8).
func TestHeaders(t *testing.T) {
	n := start(t, options{plugins: []config.Plugin{scripted(t, "headers", `
[edit]
request_headers: call proxy_add_header_map_value 0 "X-Add" "1"
request_headers: call proxy_add_header_map_value 0 "x-add" "2"
request_headers: call proxy_get_header_map_value 0 "X-ADD" ret
request_headers: call proxy_replace_header_map_value 0 "x-CLIENT" "new"
request_headers: call proxy_replace_header_map_value 0 "x-fresh" "f"
request_headers: call proxy_remove_header_map_value 0 "x-gone"
request_headers: call proxy_remove_header_map_value 0 "x-never"
request_headers: call proxy_get_header_map_value 0 "x-never" ret
request_headers: call proxy_get_header_map_value 0 ":method" ret
request_headers: call proxy_get_header_map_value 0 ":path" ret
request_headers: call proxy_get_header_map_value 0 ":scheme" ret
request_headers: call proxy_get_header_map_value 0 ":authority" ret
response_headers: call proxy_get_header_map_value 2 ":status" ret
response_headers: call proxy_replace_header_map_value 2 ":status" "202"
response_headers: call proxy_add_header_map_value 2 "x-answer" "a"
response_headers: call proxy_add_header_map_value 2 "x-answer" "b"
response_headers: call proxy_replace_header_map_value 2 "content-type" "text/plain"
response_headers: call proxy_get_header_map_value 0 "x-fresh" ret
response_body: call proxy_add_header_map_value 2 "x-late" "1"
log: call proxy_get_header_map_value 0 "x-fresh" ret
log: call proxy_get_header_map_value 2 ":status" ret
log: call proxy_get_header_map_value 0 "x-never" ret
log: call proxy_add_header_map_value 2 "x-later" "1"
delete: say gone
[newline]
request_headers: call proxy_add_header_map_value 0 "x-in" "a\r\nx-smuggled: 1"
request_headers: call proxy_add_header_map_value 0 "x in" "1"
request_headers: call proxy_replace_header_map_value 0 ":path" "/v1/completions HTTP/1.1\r\nx-smuggled: 1"
response_headers: call proxy_add_header_map_value 2 "x-out" "a\r\nx-smuggled: 1"
response_headers: call proxy_add_header_map_value 2 "x-out\r\nx-smuggled" "a"
delete: say gone
[status]
response_headers: call proxy_replace_header_map_value 2 ":status" "abc"
delete: say gone
[path]
request_headers: call proxy_replace_header_map_value 0 ":path" "/v1/chat/completions?x=1"
delete: say gone
`)}})
	t.Run("edit", func(t *testing.T) {
		r := n.post("edit", "X-Client", "old", "X-Client", "older", "X-Gone", "1")
		if r.status != 202 || r.body != engineAnswer || !slices.Equal(r.header["X-Answer"], []string{"a", "b"}) || r.header.Get("Content-Type") != "text/plain" ||
			r.header.Get("X-Late") != "" || r.header.Get("X-Later") != "" {
			t.Errorf("got %d %v %s", r.status, r.header, r.body)
		}
		e := n.last()
		if !slices.Equal(e.Header["X-Add"], []string{"1", "2"}) || !slices.Equal(e.Header["X-Client"], []string{"new"}) || e.Header.Get("X-Fresh") != "f" || e.Header.Get("X-Gone") != "" {
			t.Errorf("the engine got %v", e.Header)
		}
		has(t, n.deleted("edit"),
			`request_headers proxy_get_header_map_value=0 "1"`,
			"request_headers proxy_remove_header_map_value=0",
			"request_headers proxy_remove_header_map_value=0",
			`request_headers proxy_get_header_map_value=1 ""`,
			`request_headers proxy_get_header_map_value=0 "POST"`,
			`request_headers proxy_get_header_map_value=0 "/v1/completions"`,
			`request_headers proxy_get_header_map_value=0 "http"`,
			`request_headers proxy_get_header_map_value=0 "`+strings.TrimPrefix(n.url, "http://")+`"`,
			`response_headers proxy_get_header_map_value=0 "200"`,
			`log proxy_get_header_map_value=0 "f"`,
			`log proxy_get_header_map_value=0 "202"`,
			`log proxy_get_header_map_value=1 ""`)
		// As in Envoy, released data is not visible until the log callback.
		if got := with(n.book.said("edit"), "response_headers proxy_get_header_map_value="); slices.Contains(got, `0 "f"`) {
			t.Errorf("old request headers were shown: %v", got)
		}
	})
	t.Run("nothing is smuggled", func(t *testing.T) {
		r := n.post("newline")
		e := n.last()
		if r.status != 200 || r.header.Get("X-Smuggled") != "" || e.Header.Get("X-Smuggled") != "" {
			t.Errorf("got %d %v, the engine %v", r.status, r.header, e.Header)
		}
	})
	t.Run("no status", func(t *testing.T) {
		if r := n.post("status"); r.err != nil || r.status != 200 && r.status < 500 {
			t.Errorf("got %d %v", r.status, r.err)
		}
	})
	t.Run("path", func(t *testing.T) {
		body := strings.Replace(unary, `"prompt":"hello there"`, `"messages":[{"role":"user","content":"x"}]`, 1)
		if r := n.send(n.client, "path", body); r.status != 200 {
			t.Errorf("got %d %s", r.status, r.body)
		}
		if e := n.last(); !strings.HasPrefix(e.URL.Path, "/v1/chat/completions") {
			t.Errorf("path of the engine's request = %s", e.URL.Path)
		}
	})
}

// Unknown numbers are bad arguments (row 7). A map or a buffer that is not
// available now is not found or a bad argument; the guest never gets old data.
func TestUnknownNumbers(t *testing.T) {
	n := start(t, options{plugins: []config.Plugin{scripted(t, "numbers", `
[unknown]
request_headers: call proxy_get_buffer_bytes 99 0 10 ret
request_headers: call proxy_set_buffer_bytes 99 0 10 "x"
request_headers: call proxy_get_buffer_status 99 out out
request_headers: call proxy_get_header_map_size 99 out
request_headers: call proxy_get_header_map_pairs 99 ret
request_headers: call proxy_set_header_map_pairs 99 {a=b}
request_headers: call proxy_get_header_map_value 99 "a" ret
request_headers: call proxy_add_header_map_value 99 "a" "b"
request_headers: call proxy_replace_header_map_value 99 "a" "b"
request_headers: call proxy_remove_header_map_value 99 "a"
request_headers: call proxy_continue_stream 99
request_headers: call proxy_close_stream 99
request_headers: call proxy_define_metric 99 "m" out
request_headers: call proxy_log 99 "m"
request_headers: call proxy_set_effective_context 4000000
delete: say gone
[absent]
request_headers: call proxy_get_header_map_value 2 ":status" ret
request_headers: call proxy_get_header_map_value 6 ":status" ret
request_headers: call proxy_get_header_map_value 4 "a" ret
request_headers: call proxy_get_buffer_bytes 1 0 10 ret
request_headers: call proxy_get_buffer_bytes 2 0 10 ret
request_headers: call proxy_get_buffer_bytes 3 0 10 ret
request_headers: call proxy_get_buffer_bytes 4 0 10 ret
request_headers: call proxy_get_buffer_bytes 8 0 10 ret
request_headers: call proxy_set_buffer_bytes 7 0 10 "x"
delete: say gone
`)}})
	n.fine(n.post("unknown"))
	for _, s := range with(n.deleted("unknown"), "request_headers proxy_") {
		if !strings.Contains(s, "=2") {
			t.Errorf("want BAD_ARGUMENT: proxy_%s", s)
		}
	}
	n.fine(n.post("absent"))
	for _, s := range with(n.deleted("absent"), "request_headers proxy_") {
		_, status, _ := strings.Cut(s, "=")
		status, value, _ := strings.Cut(status, " ")
		if status != "1" && status != "2" || value != "" && value != `""` {
			t.Errorf("want NOT_FOUND or BAD_ARGUMENT: proxy_%s", s)
		}
	}
}

// Every host function rejects every pointer and size outside guest memory,
// without another effect (row 6).
func TestBadPointers(t *testing.T) {
	sweeps := []string{
		`proxy_log 2 "m"`, `proxy_get_log_level out`, `proxy_get_current_time_nanoseconds out8`,
		`proxy_get_buffer_bytes 7 0 10 ret`, `proxy_set_buffer_bytes 0 0 0 "x"`, `proxy_get_buffer_status 7 out out`,
		`proxy_get_header_map_size 0 out`, `proxy_get_header_map_pairs 0 ret`, `proxy_set_header_map_pairs 0 {a=b}`,
		`proxy_get_header_map_value 0 ":path" ret`, `proxy_add_header_map_value 0 "x-a" "b"`,
		`proxy_replace_header_map_value 0 "x-a" "b"`, `proxy_remove_header_map_value 0 "x-a"`,
		`proxy_send_local_response 200 "d" "b" {a=b} -1`,
		`proxy_http_call "side" {:method=GET,:path=/,:authority=a} "b" {t=1} 1000 out`,
		`proxy_grpc_call "side" "s" "m" {a=b} "x" 1000 out`, `proxy_grpc_stream "side" "s" "m" {a=b} out`, `proxy_grpc_send 1 "x" 1`,
		`proxy_get_status out ret`, `proxy_set_shared_data "k" "v" 0`, `proxy_get_shared_data "there" ret out`,
		`proxy_register_shared_queue "q" out`, `proxy_resolve_shared_queue "" "queue" out`, `proxy_resolve_shared_queue "vm" "queue" out`,
		`proxy_enqueue_shared_queue $last "x"`, `proxy_define_metric 0 "m" out`, `proxy_get_metric 1 out8`,
		`proxy_get_property "plugin_name" ret`, `proxy_set_property "p" "v"`, `proxy_call_foreign_function "compress" "abc" ret`,
	}
	script := "[sweep]\nrequest_body: quiet proxy_set_shared_data \"there\" \"v\" 0\nrequest_body: quiet proxy_define_metric 0 \"mm\" out\nrequest_body: quiet proxy_register_shared_queue \"queue\" out\n"
	for _, s := range sweeps {
		if strings.Contains(s, "header_map") { // maps are available in their own callbacks
			script += "request_headers: sweep " + s + "\n"
		} else {
			script += "request_body: eos sweep " + s + "\n"
		}
	}
	script += "delete: say gone\n"
	p := scripted(t, "sweep", script)
	p.VMID = "vm"
	side := startSide(t)
	n := start(t, options{plugins: []config.Plugin{p}, config: func(c *config.Config) {
		c.Upstreams = []config.Upstream{{Name: "side", URL: side.URL}}
	}})
	n.fine(n.post("sweep"))
	swept := map[string]int{}
	for _, s := range n.deleted("sweep") {
		_, s, _ = strings.Cut(s, " ")
		name, status, ok := strings.Cut(s, "=")
		if !ok {
			continue
		}
		status, argument, _ := strings.Cut(status, " ")
		swept[name]++
		switch {
		case status == "6":
		case strings.HasPrefix(name, "proxy_grpc_") && status == "12": // not offered at all
		default:
			t.Errorf("%s answered %s for a bad %s", name, status, argument)
		}
	}
	for _, s := range sweeps {
		if name, _, _ := strings.Cut(s, " "); swept[name] == 0 {
			t.Errorf("%s was never tried", name)
		}
	}
	if side.count() != 0 {
		t.Errorf("%d calls reached the upstream", side.count())
	}
	n.fine(n.post("main")) // the host and the guest still work
}
