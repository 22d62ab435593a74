package abi

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// breaking is a script with one section for each place in which a guest can
// fail; the guest does what at that place.
func breaking(what string) string {
	script := ""
	for _, callback := range phases {
		script += "[" + callback + "]\n"
		if callback == "http_call_response" {
			script += `request_headers: quiet proxy_http_call "side" {:method=GET,:path=/,:authority=a} null {} 5000 out` + "\nrequest_headers: return 1\n"
		}
		script += callback + ": " + what + "\n"
	}
	return script
}

// phases are the callbacks of a stream that a guest can fail in.
var phases = []string{"request_headers", "request_body", "http_call_response", "response_headers", "response_body", "done", "log", "delete"}

// A guest that traps in any callback fails its own request and no other. The
// next request gets a new instance (row 20).
func TestTraps(t *testing.T) {
	side := startSide(t)
	for _, mode := range []string{"closed", "open"} {
		t.Run(mode, func(t *testing.T) {
			p := scripted(t, "trap", breaking("trap"))
			p.Fail, p.CrashBudget = mode, 1000
			n := start(t, options{plugins: []config.Plugin{p}, config: func(c *config.Config) {
				c.Upstreams = []config.Upstream{{Name: "side", URL: side.URL}}
			}})
			for i, callback := range phases {
				t.Run(callback, func(t *testing.T) {
					n := n.with(t)
					r := n.post(callback)
					after := i >= slices.Index(phases, "done") // the client has its answer by then
					switch {
					case mode == "open" || after:
						n.fine(r)
					case callback == "response_body" && r.err != nil: // the head may have been sent: a visible cut
					case r.err != nil || r.status < 500:
						t.Errorf("got status %d, error %v, body %q; want an error", r.status, r.err, r.body)
					}
					n.eventually("the failure is counted", func() bool {
						return n.metric("pdproxy_policy_failures_total", `policy="trap"`) >= float64(i+1)
					})
					n.fine(n.post("main"))
				})
			}
			t.Run("stream", func(t *testing.T) { // after a head was sent, the stream never ends as if it were complete
				n := n.with(t)
				r := n.send(n.client, "response_body", strings.Replace(unary, "{", `{"stream":true,`, 1))
				whole := strings.HasSuffix(r.body, "data: [DONE]\n\n") && r.err == nil
				if mode == "open" && !whole || mode == "closed" && whole {
					t.Errorf("got %d %v %q", r.status, r.err, r.body)
				}
				if mode == "closed" && r.err == nil && r.status == 200 && !strings.Contains(r.body, "error") {
					t.Errorf("the stream ended like a complete one: %q", r.body)
				}
				n.fine(n.post("main"))
			})
		})
	}
}

// Root callbacks that trap affect only existing requests.
func TestRootTraps(t *testing.T) {
	for _, script := range []string{
		"configure: quiet proxy_set_tick_period_milliseconds 5\ntick: say alive\ntick: 2 trap\n",
		"configure: quiet proxy_register_shared_queue \"q\" out\nrequest_headers: quiet proxy_resolve_shared_queue \"\" \"q\" out\nrequest_headers: quiet proxy_enqueue_shared_queue $last \"x\"\nqueue_ready: say alive\nqueue_ready: trap\n",
	} {
		p := scripted(t, "root", script)
		p.Fail, p.CrashBudget = "open", 100000
		n := start(t, options{plugins: []config.Plugin{p}})
		n.fine(n.post("main"))
		n.eventually("it failed", func() bool { return n.metric("pdproxy_policy_failures_total", `policy="root"`) > 0 })
		for range 5 {
			n.fine(n.post("main"))
		}
	}
}

// More failures than the budget park a plugin. Then fail determines the effect,
// until a reload ends it (row 20).
func TestCrashBudget(t *testing.T) {
	for _, mode := range []string{"closed", "open"} {
		t.Run(mode, func(t *testing.T) {
			p := scripted(t, "crashy", "[trap]\nrequest_headers: trap\n[main]\nrequest_headers: call proxy_add_header_map_value 0 \"x-seen\" \"1\"\n")
			p.Fail, p.CrashBudget, p.CrashWindow = mode, 2, config.Duration(time.Hour)
			n := start(t, options{plugins: []config.Plugin{p}})
			for range 3 {
				n.fine(n.post("main"))
				r := n.post("trap")
				if mode == "open" {
					n.fine(r)
				} else if r.status < 500 {
					t.Errorf("got %d %q", r.status, r.body)
				}
			}
			n.eventually("it is parked", func() bool { return strings.Contains(text(n.row("crashy")), "parked") })
			failures := n.metric("pdproxy_policy_failures_total", `policy="crashy"`)
			for range 5 {
				r := n.post("main")
				if mode == "open" {
					n.fine(r)
					if e := n.last(); e.Header.Get("X-Seen") != "" {
						t.Error("the parked filter ran")
					}
				} else if r.status != http.StatusServiceUnavailable {
					t.Errorf("a parked filter that fails closed: %d %q", r.status, r.body)
				}
			}
			if now := n.metric("pdproxy_policy_failures_total", `policy="crashy"`); mode == "open" && now != failures {
				t.Errorf("failures changed from %v to %v while the policy was parked", failures, now)
			}
			if status, body := n.reloadPlugin("crashy"); status != 200 {
				t.Fatalf("reload: %d %s", status, body)
			}
			n.fine(n.post("main"))
			if e := n.last(); e.Header.Get("X-Seen") != "1" {
				t.Error("the filter is not back")
			}
		})
	}
}

// text is a row of /v1/policies as one text.
func text(row map[string]any) string {
	var b strings.Builder
	for k, v := range row {
		if s, ok := v.(string); ok {
			b.WriteString(k + "=" + s + " ")
		}
	}
	return b.String()
}

// Endless loops, unbounded memory, unlimited recursion and exits end. The
// streams that share the instance end as fail says (row 21).
func TestRunaways(t *testing.T) {
	for _, tt := range []struct{ name, what string }{
		{"loop", "loop"}, {"memory", "eat"}, {"recursion", "recurse"}, {"exit", "exit 0"}, {"exit with a code", "exit 7"},
	} {
		for _, mode := range []string{"closed", "open"} {
			t.Run(tt.name+" "+mode, func(t *testing.T) {
				p := scripted(t, "wild", "[wild]\nrequest_headers: "+tt.what+"\n[held]\nresponse_body: say chunk\n")
				p.Fail, p.CrashBudget, p.Memory = mode, 1000, 32<<20
				if tt.what == "loop" {
					p.Timeout = config.Duration(300 * time.Millisecond)
				}
				n := start(t, options{plugins: []config.Plugin{p}})
				// Streams are open on every instance when the guest fails.
				release := make(chan struct{})
				n.engine.Script(func(w http.ResponseWriter, r testbed.Leg) {
					if r.Header.Get("X-Script") != "held" {
						w.Header().Set("Content-Type", "application/json")
						io.WriteString(w, engineAnswer)
						return
					}
					events(w, 2, func(i int) {
						if i == 1 {
							select {
							case <-release:
							case <-r.Context().Done():
							}
						}
					})
				})
				const open = 8
				ends := make(chan reply, open)
				for range open {
					go func() { ends <- n.send(n.client, "held", strings.Replace(unary, "{", `{"stream":true,`, 1)) }()
				}
				n.logged("the streams are open", func() bool { return len(n.book.said("held")) >= open })
				r := n.post("wild")
				if mode == "open" {
					n.fine(r)
				} else if r.err != nil || r.status < 500 {
					t.Errorf("got %d %v %q", r.status, r.err, r.body)
				}
				close(release)
				var whole, cut int
				for range open {
					e := <-ends
					if e.err == nil && e.status == 200 && strings.HasSuffix(e.body, "data: [DONE]\n\n") && !strings.Contains(e.body, `"error"`) {
						whole++
					} else if e.err != nil || strings.Contains(e.body, "error") {
						cut++
					} else {
						t.Errorf("a stream ended like a complete one: %q", e.body)
					}
				}
				if mode == "open" && cut > 0 || mode == "closed" && whole+cut != open {
					t.Errorf("%d complete streams, %d aborted", whole, cut)
				}
				n.fine(n.post("main"))
			})
		}
	}
}

// Globals of a guest belong to one instance. Two plugins of one file, and two
// vm_ids, do not share data (row 22).
func TestIsolation(t *testing.T) {
	const script = "[main]\nrequest_headers: bump mine\nrequest_headers: call proxy_get_property \"plugin_name\" ret\nrequest_headers: call proxy_get_property \"plugin_root_id\" ret\nrequest_headers: call proxy_get_property \"plugin_vm_id\" ret\n"
	one, two := scripted(t, "one", script), scripted(t, "two", strings.ReplaceAll(script, "main", "main2")+"[main]\nrequest_headers: bump other\n")
	two.RootID, two.VMID = "root2", "vm2"
	n := start(t, options{plugins: []config.Plugin{one, two}})
	const requests = 20
	for range requests {
		n.fine(n.post("main"))
	}
	highest := map[string]int{}
	for _, s := range n.book.said("main") {
		for _, name := range []string{"mine", "other"} {
			if s, ok := strings.CutPrefix(s, "request_headers "+name+" "); ok {
				highest[name+" "+s]++
			}
		}
	}
	// Each instance counts from 1 on; together they count all.
	for _, name := range []string{"mine", "other"} {
		var total int
		for k, c := range highest {
			if strings.HasPrefix(k, name) {
				total += c
			}
		}
		if total != requests || highest[name+" 1"] == 0 {
			t.Errorf("%s: %v", name, highest)
		}
	}
	has(t, n.book.said("main"), `request_headers proxy_get_property=0 "one"`, `request_headers proxy_get_property=0 ""`, `request_headers proxy_get_property=0 ""`)
	n.fine(n.post("main2"))
	has(t, n.book.said("main2"), `request_headers proxy_get_property=0 "two"`, `request_headers proxy_get_property=0 "root2"`, `request_headers proxy_get_property=0 "vm2"`)
}

// Clocks are real, random numbers are random, the environment is empty
// (row 23).
func TestClockAndRandom(t *testing.T) {
	n := start(t, options{plugins: []config.Plugin{scripted(t, "world", `
configure: random 16
[world]
request_headers: clock 0
request_headers: clock 1
request_headers: clock 1
request_headers: call proxy_get_current_time_nanoseconds out8
request_headers: random 0
request_headers: random 16
request_headers: random 16
request_headers: random 65536
request_headers: random 65537
request_headers: environ
request_headers: call proxy_get_log_level out
delete: say gone
`)}})
	began := time.Now()
	n.fine(n.post("world"))
	got := with(n.deleted("world"), "request_headers ")
	if len(got) != 11 {
		t.Fatal(got)
	}
	near := func(s, prefix string) {
		t.Helper()
		ns, err := time.ParseDuration(strings.TrimPrefix(s, prefix) + "ns")
		if at := time.Unix(0, int64(ns)); err != nil || at.Before(began.Add(-time.Minute)) || at.After(time.Now().Add(time.Minute)) {
			t.Errorf("%s is not now (%v)", s, err)
		}
	}
	near(got[0], "clock=0 ")
	near(got[3], "proxy_get_current_time_nanoseconds=0 ")
	if !strings.HasPrefix(got[1], "clock=0 ") || got[1] == got[2] && got[1] == "clock=0 0" {
		t.Errorf("the monotonic clock does not advance: %v", got)
	}
	if got[5] == got[6] || !strings.HasPrefix(got[5], "random=0 ") || !strings.HasPrefix(got[4], "random=0") || !strings.HasPrefix(got[7], "random=0 ") {
		t.Errorf("random: %v", got[4:8])
	}
	if !strings.HasPrefix(got[8], "random=28") {
		t.Errorf("64 KiB and one byte: %s", got[8])
	}
	if got[9] != "environ=0 0" {
		t.Errorf("environment: %s", got[9])
	}
	configured := with(n.book.said("main"), "configure random=0 ")
	if len(configured) == 0 {
		t.Error("no random value was drawn at configure")
	}
	if slices.Sort(configured); len(slices.Compact(slices.Clone(configured))) != len(configured) {
		t.Errorf("two instances drew the same: %v", configured)
	}
}

// A guest of 0.1.0 gets the calls of that version (row 24).
func TestVersion010(t *testing.T) {
	p := filter("old", buildGuest(t, "filter", "abi010"), ticking+`
configure: say size $size
[old]
request_headers: call proxy_get_configuration ret
request_headers: call proxy_get_header_map_value 0 "x-never" ret
request_headers: call proxy_clear_route_cache
request_headers: park proxy_continue_request
request_headers: return 1
response_headers: park proxy_continue_response
response_headers: return 1
response_body: call proxy_set_buffer_bytes 1 0 1000000 "old"
response_body: !eos return 1
delete: say gone
`)
	n := start(t, options{plugins: []config.Plugin{p}})
	r := n.post("old")
	if r.status != 200 || r.body != "old" {
		t.Errorf("got %d %q", r.status, r.body)
	}
	said := n.deleted("old")
	has(t, said, `request_headers proxy_get_header_map_value=0 ""`)
	has(t, said, "tick proxy_continue_request=0", "tick proxy_continue_response=0")

	t.Run("wasi_unstable", func(t *testing.T) {
		m := newModule().function("proxy_on_request_headers", "ii:i", "",
			`i32 64 i32 8 call wasi_unstable.random_get
			i32 32 i32 36 call wasi_unstable.environ_sizes_get i32.add
			i32 200 i32.add i32 0 i32 0 i32 0 i32 0 i32 0 i32 0 i32 -1 call proxy_send_local_response drop i32 1`)
		m.exports = []string{"proxy_abi_version_0_1_0"}
		n := start(t, options{plugins: []config.Plugin{filter("older", writeModule(t, m), "")}})
		if r := n.post(""); r.status != 200 {
			t.Errorf("got %d %q", r.status, r.body)
		}
	})
}

// A plugin can be limited to a list of host functions and of upstreams.
func TestCapabilities(t *testing.T) {
	p := scripted(t, "tied", "[main]\nrequest_headers: call proxy_set_shared_data \"k\" \"v\" 0\nrequest_headers: call proxy_get_header_map_value 0 \":method\" ret\ndelete: say gone\n")
	p.HostFunctions = []string{"proxy_log", "proxy_get_header_map_value", "proxy_get_buffer_bytes", "random_get", "clock_time_get", "fd_write", "poll_oneoff", "sched_yield", "args_get", "args_sizes_get", "environ_get", "environ_sizes_get", "proc_exit"}
	n := start(t, options{plugins: []config.Plugin{p}})
	n.fine(n.post("main"))
	has(t, n.deleted("main"), "request_headers proxy_set_shared_data=10", `request_headers proxy_get_header_map_value=0 "POST"`)
}

// Guests that answer from any callback in any order leave no stream open.
// Clients leave at every point of a chain under load.
func TestClientsLeave(t *testing.T) {
	script := ticking
	for _, callback := range []string{"request_headers", "request_body", "response_headers", "response_body"} {
		kind := "0"
		if strings.HasPrefix(callback, "response") {
			kind = "1"
		}
		script += "[" + callback + "]\n" + callback + ": park proxy_continue_stream " + kind + "\n" + callback + ": return 1\n"
	}
	script += "[live]\nrequest_headers: say $live\n"
	n := start(t, options{plugins: []config.Plugin{scripted(t, "leaves", script)}})
	rounds := 40
	if testing.Short() {
		rounds = 8
	}
	for i := range rounds {
		for _, section := range []string{"request_headers", "request_body", "response_headers", "response_body", "main"} {
			ctx, leave := context.WithTimeout(context.Background(), time.Duration(i%12)*time.Millisecond)
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, n.url+"/v1/completions", strings.NewReader(strings.Replace(unary, "{", `{"stream":true,`, 1)))
			req.Header.Set("X-Script", section)
			do(n.client, req)
			leave()
		}
	}
	n.eventually("no stream is left in any instance", func() bool {
		before := len(n.book.said("live"))
		for range 8 {
			n.fine(n.post("live"))
		}
		for _, s := range n.book.said("live")[before:] {
			if s != "request_headers 1" {
				return false
			}
		}
		return true
	})
}
