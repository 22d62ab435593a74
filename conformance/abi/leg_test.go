package abi

import (
	"context"
	"encoding/binary"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// edit is one edit of a leg in the encoding of abi/README.md: three words,
// name, value.
func edit(op uint32, name, value string) string {
	b := binary.LittleEndian.AppendUint32(nil, op)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(name)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(value)))
	return string(b) + name + value
}

// editing is a leg policy that edits every leg with the list after the frame,
// and returns failed for legs that failed.
func editing(list, failed string) []byte {
	return legs(`get 0 get 1 i32.add `+strconv.Quote(list)+` memory.copy
		get 0 i32 56 i32.add get 1 i32.store
		get 0 i32 60 i32.add i32 `+strconv.Itoa(len(list))+` i32.store
		i64 1`, failed)
}

// legs is a leg policy. send is its answer before a leg is sent, failed its
// answer after a leg failed. The event is the byte at offset 64 of the facts.
func legs(send, failed string) []byte {
	return policyModule().function("pdproxy_v1_on_leg", "ii:I", "",
		`get 0 i32 128 i32.add i32.load8_u if `+failed+` return end `+send).bytes()
}

// The leg policy can edit only the allowed parts of a leg, and decides what
// follows a failure.
func TestLegPolicy(t *testing.T) {
	file := writeModule(t, policyModule())
	replaceFile(t, file, legs(`i64 0`, `i64 0`))
	n := start(t, options{plugins: []config.Plugin{policyPlugin(file)}})
	fallbacks := func() float64 { return n.metric("pdproxy_fallbacks_total", `what="leg"`) }
	load := func(t *testing.T, wasm []byte) {
		t.Helper()
		replaceFile(t, file, wasm)
		if status, why := n.reloadPlugin("p"); status != 200 {
			t.Fatalf("reload: %d %s", status, why)
		}
	}
	good := edit(1, "x-policy", "set") + edit(2, "x-more", "a") + edit(2, "x-more", "b") + edit(3, "x-client", "") + edit(4, "priority", "7") + edit(5, "user", "")
	for _, tt := range []struct {
		name  string
		wasm  []byte
		edits bool
		falls bool
	}{
		{"as it is", legs(`i64 0`, `i64 0`), false, false},
		{"edits", editing(good, `i64 0`), true, false},
		{"no edits", editing("", `i64 0`), false, false},
		{"unknown edit", editing(edit(9, "x-policy", "set"), `i64 0`), false, true},
		{"cut off", editing(good[:len(good)-2], `i64 0`), false, true},
		{"framing", editing(good+edit(1, "content-length", "3"), `i64 0`), false, true},
		{"smuggling", editing(good+edit(1, "x-a", "b\r\nx-c: d"), `i64 0`), false, true},
		{"not JSON", editing(good+edit(4, "priority", `{"`), `i64 0`), false, true},
		{"the form of the answer", editing(good+edit(4, "stream", `true`), `i64 0`), false, true},
		{"inside the frame", legs(`get 0 i32 56 i32.add i32 8 i32.store get 0 i32 60 i32.add i32 100 i32.store i64 1`, `i64 0`), false, true},
		{"far outside", legs(`get 0 i32 56 i32.add i32 -16 i32.store get 0 i32 60 i32.add i32 -1 i32.store i64 1`, `i64 0`), false, true},
		{"unknown answer", legs(`i64 200`, `i64 0`), false, true},
		{"trap", legs(`unreachable`, `i64 0`), false, true},
		{"loop", legs(`loop br 0 end i64 0`, `i64 0`), false, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := n.with(t)
			if tt.falls {
				patient := n.usualPolicyTimeout()
				defer func() {
					replaceFile(t, file, legs(`i64 0`, `i64 0`))
					patient()
				}()
			}
			load(t, tt.wasm)
			before := fallbacks()
			body := strings.Replace(unary, "{", `{"user":"someone",`, 1)
			for range 3 {
				n.fine(n.send(n.client, "", body, "X-Client", "1"))
				e := n.last()
				edited := e.Header.Get("X-Policy") == "set" && len(e.Header["X-More"]) == 2 && e.Header.Get("X-Client") == "" &&
					strings.Contains(e.Text, `"priority":7`) && !strings.Contains(e.Text, "someone")
				untouched := e.Header.Get("X-Policy") == "" && e.Header.Get("X-More") == "" && e.Header.Get("X-Client") == "1" && e.Text == body
				if tt.edits && !edited || !tt.edits && !untouched {
					t.Errorf("the engine got %v %s", e.Header, e.Text)
				}
			}
			if got := fallbacks() - before; tt.falls && got < 3 || !tt.falls && got != 0 {
				t.Errorf("got %v fallbacks", got)
			}
		})
	}
	for _, tt := range []struct {
		name, failed string
		attempts     int64 // that reach the engine if the first one fails
	}{
		{"the built-in rule", `i64 0`, 2},
		{"the same again", `i64 1`, 2},
		{"give up", `i64 3`, 1},
		{"trap after a failure", `unreachable`, 2},
		{"unknown answer after a failure", `i64 9`, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := n.with(t)
			load(t, legs(`i64 0`, tt.failed))
			var attempts atomic.Int64
			n.engine.Script(func(w http.ResponseWriter, _ testbed.Leg) {
				w.Header().Set("Content-Type", "application/json")
				if attempts.Add(1) == 1 {
					w.WriteHeader(500)
					io.WriteString(w, `{"error":{"message":"no"}}`)
					return
				}
				io.WriteString(w, engineAnswer)
			})
			r := n.post("")
			n.engine.Script(answers)
			if attempts.Load() != tt.attempts || tt.attempts > 1 && r.status != 200 || tt.attempts == 1 && r.status < 500 {
				t.Errorf("%d attempts, got %d %s", attempts.Load(), r.status, r.body)
			}
		})
	}
}

// The finish policy is called once for every exchange, after any end, and affects no
// exchange.
func TestFinishPolicy(t *testing.T) {
	file := writeModule(t, policyModule())
	finishing := func(body string) []byte {
		m := policyModule().
			function("proxy_on_memory_allocate", "i:i", "", "i32 16384").
			function("proxy_on_configure", "ii:i", "", `i32 0 "finished" i32 8 call proxy_define_metric drop i32 8 i32.load gset 0 i32 1`).
			function("pdproxy_v1_on_finish", "ii:", "", body)
		m.exports = []string{"proxy_abi_version_0_2_1"}
		return m.bytes()
	}
	replaceFile(t, file, finishing(`gget 0 i64 1 call proxy_increment_metric drop`))
	n := start(t, options{plugins: []config.Plugin{policyPlugin(file)}})
	finished := func() float64 {
		return n.metric("pdproxy_plugin_finished", `plugin="p"`) + n.metric("pdproxy_plugin_finished_total", `plugin="p"`)
	}
	for range 10 {
		n.fine(n.post(""))
	}
	if r := n.send(n.client, "", `{"model":"nobody","prompt":"x"}`); r.status != 404 {
		t.Errorf("got %d", r.status)
	}
	held := make(chan struct{}, 1)
	n.engine.Script(func(w http.ResponseWriter, r testbed.Leg) { held <- struct{}{}; <-r.Context().Done() })
	ctx, leave := context.WithCancel(context.Background())
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, n.url+"/v1/completions", strings.NewReader(unary))
	done := make(chan struct{})
	go func() { do(n.client, req); close(done) }()
	<-held
	leave()
	<-done
	n.engine.Script(answers)
	n.eventually("each exchange was finished once", func() bool { return finished() >= 11 })
	for range 5 {
		n.fine(n.post(""))
	}
	n.eventually("each exchange was finished once", func() bool { return finished() >= 16 })
	if got := finished(); got > 17 { // the contract does not say whether a rejected exchange counts
		t.Errorf("17 exchanges were finished %v times", got)
	}
	n.usualPolicyTimeout()
	for _, body := range []string{`unreachable`, `loop br 0 end`} {
		replaceFile(t, file, finishing(body))
		if status, why := n.reloadPlugin("p"); status != 200 {
			t.Fatalf("reload: %d %s", status, why)
		}
		before := n.metric("pdproxy_policy_failures_total", `policy="p"`)
		for range 5 {
			n.fine(n.post(""))
		}
		n.eventually("the failures are counted", func() bool { return n.metric("pdproxy_policy_failures_total", `policy="p"`) > before })
	}
}

// For a module with several policies the configuration names one as
// plugin/name, and frames contain its index.
func TestNamedPolicies(t *testing.T) {
	const names = "place first\nplace last\nplan two\n"
	file := writeModule(t, policyModule())
	m := policyModule().
		function("pdproxy_v1_policies", ":I", "II", strconv.Quote(names)+` i64.extend_i32_u set 0 i64.extend_i32_u i64 32 i64.shl get 0 i64.or`).
		function("pdproxy_v1_on_plan", "ii:I", "", `i64 2`).
		function("pdproxy_v1_on_place", "ii:I", "iiiiiiiii", `get 0 i32 16 i32.add i32.load i32.eqz if unreachable end `+rightPlace)
	replaceFile(t, file, m.bytes())
	p := policyPlugin(file)
	n := startFleet(t, enginesim.ConnectorVLLMNixl, options{plugins: []config.Plugin{p}, config: func(c *config.Config) {
		c.Policy.Place, c.Policy.Plan = "p/last", "p/two"
	}})
	n.storm(20)
	if f := n.metric("pdproxy_fallbacks_total"); f != 0 {
		t.Errorf("got %v fallbacks", f)
	}
	if err := n.reload(func(c *config.Config) { c.Policy.Place = "p/first" }); err != nil {
		t.Fatal(err)
	}
	n.storm(20)
	if f := n.metric("pdproxy_fallbacks_total", `what="place"`); f < 20 {
		t.Errorf("%v fallbacks of the first policy, which traps", f)
	}
	if err := n.reload(func(c *config.Config) { c.Policy.Place = "p/nobody" }); err == nil {
		t.Error("a policy that the module does not have was accepted")
	}
	n.settled()
}
