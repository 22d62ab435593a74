package abi

import (
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// startFleet runs a proxy with policies in front of simulated engines: two for
// prefill and two for decode. The test's end asserts that they hold nothing.
func startFleet(t *testing.T, connector string, o options) *node {
	t.Helper()
	n := &node{t: t, book: &logBook{}, done: make(chan error, 1), before: runtime.NumGoroutine()}
	n.cfg = baseConfig("")
	n.cfg.Server.ExposePlacement = true
	for _, role := range []string{enginesim.RolePrefill, enginesim.RoleDecode} {
		for i := range 2 {
			e, err := enginesim.New(enginesim.Config{Connector: connector, Role: role, Lease: time.Minute})
			if err != nil {
				t.Fatal(err)
			}
			if err := e.Start(); err != nil {
				t.Fatal(err)
			}
			n.sims = append(n.sims, e)
			spec := config.DefaultEngine()
			spec.Name, spec.URL, spec.Role, spec.Connector = fmt.Sprintf("%s%d", role[:1], i), e.URL(), role, connector
			n.cfg.Engines = append(n.cfg.Engines, spec)
		}
	}
	n.cfg.Plugins = o.plugins
	if o.config != nil {
		o.config(&n.cfg)
	}
	n.run()
	t.Cleanup(n.close)
	n.eventually("all engines are ready", func() bool { return n.metric("pdproxy_engine_load") >= 0 && n.ready() == len(n.sims) })
	return n
}

// ready returns the number of ready engines.
func (n *node) ready() (ready int) {
	var rows []struct{ State string }
	n.admin("/v1/engines", &rows)
	for _, r := range rows {
		if r.State == "ready" {
			ready++
		}
	}
	return ready
}

// settled asserts that the engines hold nothing.
func (n *node) settled() {
	n.t.Helper()
	for _, e := range n.sims {
		n.eventually("engine "+e.Addr()+" is empty", func() bool {
			s := e.State()
			return s.BlocksUsed == 0 && s.BlocksPinned == 0 && s.RequestsRunning == 0 && s.RequestsWaiting == 0
		})
		if s := e.State(); s.DuplicateIDs > 0 {
			n.t.Errorf("engine %s saw %d ids twice", e.Addr(), s.DuplicateIDs)
		}
	}
}

// policy is a [[plugin]] of the policy phase.
func policyPlugin(path string) config.Plugin {
	p := config.DefaultPlugin()
	p.Name, p.Path, p.Memory, p.CrashBudget = "p", path, 16<<20, 1_000_000
	return p
}

// rightPlace chooses the last row of each role. The frame's layout in
// abi/README.md is: facts after the header; at offset 72 of the facts offset,
// count and stride of the rows; at offset 12 of a row its roles. Local 2 is the
// facts, 3 the rows, 4 their count, 5 the stride, 6 the current row, 8 prefill,
// 9 decode.
const rightPlace = `
	get 0 get 0 i32 8 i32.add i32.load i32.add set 2
	get 0 get 2 i32 72 i32.add i32.load i32.add set 3
	get 2 i32 76 i32.add i32.load set 4
	get 2 i32 80 i32.add i32.load set 5
	i32 -1 set 8 i32 -1 set 9
	block loop
		get 6 get 4 i32.ge_u br_if 1
		get 3 get 6 get 5 i32.mul i32.add i32 12 i32.add i32.load8_u set 7
		get 7 i32 1 i32.and if get 6 set 8 end
		get 7 i32 2 i32.and if get 6 set 9 end
		get 6 i32 1 i32.add set 6
		br 0
	end end
	get 2 i32 68 i32.add i32.load tee 10 i32 -1 i32.ne if get 10 set 8 end
	get 2 i32 64 i32.add i32.load8_u i32 1 i32.eq if i32 -1 set 8 end
	get 9 i64.extend_i32_u get 8 i64.extend_i32_u i64 32 i64.shl i64.or`

// placing is a place policy with a separate body.
func placing(body string) []byte {
	return policyModule().function("pdproxy_v1_on_place", "ii:I", "iiiiiiiii", body).bytes()
}

// badPlaces are place policies that do not decide.
func badPlaces() map[string][]byte {
	scratch := func(body string) []byte {
		m := policyModule()
		m.functions = nil
		return m.function("pdproxy_v1_scratch", "i:i", "", body).function("pdproxy_v1_on_place", "ii:I", "iiiiiiiii", rightPlace).bytes()
	}
	return map[string][]byte{
		"trap":                placing(`unreachable`),
		"loop":                placing(`loop br 0 end i64 0`),
		"memory":              placing(`block loop i32 16 memory.grow i32 -1 i32.eq br_if 1 br 0 end end unreachable`),
		"recursion":           policyModule().inner("deep", "i:i", "", `get 0 i32 1 i32.add call deep i32 1 i32.add`).function("pdproxy_v1_on_place", "ii:I", "", `get 0 call deep i64.extend_i32_u`).bytes(),
		"rows that are not":   placing(`i64 0x0000270f0000270f`),
		"negative rows":       placing(`i64 -2`),
		"no rows":             placing(`i64 -1`),
		"one row twice":       placing(`i64 0`),
		"a stray read":        placing(`i32 -8 i64.load`),
		"slow":                placing(`block loop get 2 i32 1 i32.add tee 2 i32 2000000000 i32.eq br_if 1 br 0 end end i64 -1`),
		"scratch refused":     scratch(`i32 0`),
		"scratch outside":     scratch(`i32 0x7ffffff8`),
		"scratch at the end":  scratch(`memory.size i32 65536 i32.mul i32 8 i32.sub`),
		"scratch not aligned": scratch(`i32 65537`),
		"scratch traps":       scratch(`unreachable`),
	}
}

// usualPolicyTimeout limits policy calls to the default of timeouts.policy, until the
// returned function is called. All other tests give policies a minute, because a busy
// machine may delay any policy call by more than the default.
func (n *node) usualPolicyTimeout() (patient func()) {
	n.t.Helper()
	set := func(limit config.Duration) {
		n.t.Helper()
		if err := n.reload(func(c *config.Config) { c.Timeouts.Policy = limit }); err != nil {
			n.t.Fatal(err)
		}
	}
	set(config.Default().Timeouts.Policy)
	return func() { set(config.Duration(time.Minute)) }
}

// storm sends requests from several clients at once and asserts that each gets
// a good answer.
func (n *node) storm(requests int) {
	n.t.Helper()
	var wg sync.WaitGroup
	var left, bad atomic.Int64
	left.Store(int64(requests))
	for c := range 12 {
		wg.Go(func() {
			for i := 0; left.Add(-1) >= 0; i++ {
				body := fmt.Sprintf(`{"model":"sim","prompt":"client %d says thing %d to the engines","max_tokens":4,"ignore_eos":true,"stream":%t}`, c, i, i%2 == 1)
				r := n.send(n.client, "", body)
				if r.err != nil || r.status != 200 || strings.Contains(r.body, `"error"`) || i%2 == 1 && !strings.Contains(r.body, "[DONE]") {
					if bad.Add(1) == 1 {
						n.t.Errorf("got %d %v %s", r.status, r.err, r.body)
					}
				}
			}
		})
	}
	wg.Wait()
	if bad.Load() > 0 {
		n.t.Errorf("%d of %d requests failed", bad.Load(), requests)
	}
}

// A place policy that decides in time is called for every request, and no other rule
// decides, even if it overwrites its whole frame.
func TestPoliciesThatDecide(t *testing.T) {
	requests := 150
	if testing.Short() {
		requests = 40
	}
	for name, wasm := range map[string][]byte{"right": placing(rightPlace), "scribbles": scribblingModule()} {
		t.Run(name, func(t *testing.T) {
			file := writeModule(t, policyModule())
			replaceFile(t, file, wasm)
			n := startFleet(t, enginesim.ConnectorVLLMNixl, options{plugins: []config.Plugin{policyPlugin(file)}, config: func(c *config.Config) {
				c.Policy.Place = "p"
			}})
			n.storm(requests)
			fell, failed := n.metric("pdproxy_fallbacks_total", `what="place"`), n.metric("pdproxy_policy_failures_total", `policy="p"`)
			if fell != 0 || failed != 0 {
				t.Errorf("%v fallbacks, %v failures", fell, failed)
			}
			if asked := n.metric("pdproxy_policy_duration_seconds_count", `policy="p"`, `hook="place"`); asked < float64(requests) {
				t.Errorf("the policy was called %v times for %d requests", asked, requests)
			}
			n.settled()
		})
	}
}

// A place policy that traps, loops, exhausts its memory or returns an invalid
// answer fails no request. Every decision that it did not make is counted.
// Above its crash budget it is parked, and a reload ends that.
func TestBadPolicies(t *testing.T) {
	requests := 150
	if testing.Short() {
		requests = 40
	}
	file := writeModule(t, policyModule())
	right := placing(rightPlace)
	replaceFile(t, file, right)
	p := policyPlugin(file)
	n := startFleet(t, enginesim.ConnectorVLLMNixl, options{plugins: []config.Plugin{p}, config: func(c *config.Config) {
		c.Policy.Place = "p"
	}})
	fallbacks := func() float64 { return n.metric("pdproxy_fallbacks_total", `what="place"`) }
	failures := func() float64 { return n.metric("pdproxy_policy_failures_total", `policy="p"`) }
	load := func(t *testing.T, wasm []byte) {
		t.Helper()
		replaceFile(t, file, wasm)
		if status, why := n.reloadPlugin("p"); status != 200 {
			t.Fatalf("reload: %d %s", status, why)
		}
	}
	for name, wasm := range badPlaces() {
		t.Run(name, func(t *testing.T) {
			n := n.with(t)
			patient := n.usualPolicyTimeout()
			replaceFile(t, file, wasm)
			if status, why := n.reloadPlugin("p"); status != 200 {
				// The trial at load may already detect the fault. Then the loaded version
				// stays.
				if status != http.StatusConflict || !strings.HasPrefix(name, "scratch") {
					t.Fatalf("reload: %d %s", status, why)
				}
				replaceFile(t, file, right)
				patient()
				n.storm(10)
				return
			}
			fell, failed := fallbacks(), failures()
			n.storm(requests)
			if got := fallbacks() - fell; got < float64(requests) {
				t.Errorf("%v fallbacks for %d requests", got, requests)
			}
			if failures() == failed {
				t.Error("no failure was counted")
			}
			load(t, right)
			patient()
			fell = fallbacks()
			n.storm(20)
			if got := fallbacks() - fell; got != 0 {
				t.Errorf("%v fallbacks of the right policy", got)
			}
		})
	}
	n.settled()
	t.Run("parked", func(t *testing.T) {
		n := n.with(t)
		replaceFile(t, file, right) // replace the bad module of an earlier case
		if err := n.reload(func(c *config.Config) {
			c.Plugins[0].CrashBudget, c.Plugins[0].CrashWindow = 3, config.Duration(time.Hour)
		}); err != nil {
			t.Fatal(err)
		}
		load(t, placing(`unreachable`))
		before := fallbacks()
		n.storm(requests)
		if got := fallbacks() - before; got < float64(requests) {
			t.Errorf("%v fallbacks for %d requests", got, requests)
		}
		if row := text(n.row("p")); !strings.Contains(row, "parked") {
			t.Errorf("the policy is not parked: %s", row)
		}
		load(t, right)
		before = fallbacks()
		n.storm(requests)
		if got := fallbacks() - before; got != 0 {
			t.Errorf("%v fallbacks after the reload", got)
		}
		if row := text(n.row("p")); strings.Contains(row, "parked") {
			t.Errorf("still parked: %s", row)
		}
	})
}

// scribblingModule answers correctly, but first fills the whole frame with
// ones: the host must not trust any data that the guest can write.
func scribblingModule() []byte {
	return policyModule().function("pdproxy_v1_on_place", "ii:I", "iiiiiiiiiI", rightPlace+` set 11
	block loop get 1 i32.eqz br_if 1 get 0 get 1 i32.add i32 1 i32.sub i32 255 i32.store8 get 1 i32 1 i32.sub set 1 br 0 end end get 11`).bytes()
}

// The plan policy decides the number of legs and may reject a request.
func TestPlanPolicy(t *testing.T) {
	file := writeModule(t, policyModule())
	plan := func(answer string) []byte {
		return policyModule().function("pdproxy_v1_on_plan", "ii:I", "", answer).bytes()
	}
	replaceFile(t, file, plan(`i64 2`))
	n := startFleet(t, enginesim.ConnectorVLLMNixl, options{plugins: []config.Plugin{policyPlugin(file)}, config: func(c *config.Config) { c.Policy.Plan = "p" }})
	fallbacks := func() float64 { return n.metric("pdproxy_fallbacks_total", `what="plan"`) }
	for _, tt := range []struct {
		name, answer string
		status       int
		falls        bool
	}{
		{"disaggregate", `i64 2`, 200, false},
		{"pass", `i64 0`, 200, false},
		{"reject", `i64 3`, 503, false},
		{"reject with a status", `i64 0x01ad0003`, 429, false},
		{"limit", `i64 0x0000753000000002`, 200, false},
		{"unknown decision", `i64 77`, 200, true},
		{"odd status", `i64 0x00070003`, 200, true},
		{"undefined bits", `i64 0xff02`, 200, true},
		{"trap", `unreachable`, 200, true},
		{"loop", `loop br 0 end i64 0`, 200, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := n.with(t)
			if tt.falls {
				patient := n.usualPolicyTimeout()
				defer func() {
					replaceFile(t, file, plan(`i64 2`))
					patient()
				}()
			}
			replaceFile(t, file, plan(tt.answer))
			if status, why := n.reloadPlugin("p"); status != 200 {
				t.Fatalf("reload: %d %s", status, why)
			}
			before := fallbacks()
			for range 5 {
				if r := n.post(""); r.status != tt.status {
					t.Errorf("got %d %s", r.status, r.body)
				}
			}
			if got := fallbacks() - before; tt.falls && got < 5 || !tt.falls && got != 0 {
				t.Errorf("got %v fallbacks", got)
			}
		})
	}
}

// The mint policy issues ids; invalid ones are replaced.
func TestMintPolicy(t *testing.T) {
	file := writeModule(t, policyModule())
	mint := func(answer string) []byte {
		return policyModule().function("pdproxy_v1_on_mint", "ii:I", "", answer).bytes()
	}
	const counting = `get 0 i32 24 i32.add i64.load i64 1 i64 50 i64.shl i64.add`
	replaceFile(t, file, mint(counting))
	n := startFleet(t, enginesim.ConnectorTRTLLM, options{plugins: []config.Plugin{policyPlugin(file)}, config: func(c *config.Config) { c.Policy.Mint = "p" }})
	fallbacks := func() float64 { return n.metric("pdproxy_fallbacks_total", `what="mint"`) }
	for _, tt := range []struct {
		name, answer string
		falls        bool
	}{
		{"counts", counting, false},
		{"no answer", `i64 0`, false},
		{"too small", `i64 5`, true},
		{"negative", `i64 -1`, true},
		{"trap", `unreachable`, true},
		{"loop", `loop br 0 end i64 0`, true},
		{"always the same", `i64 0x7000000000000`, false}, // a duplicate only while another is in flight
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := n.with(t)
			if tt.falls {
				patient := n.usualPolicyTimeout()
				defer func() {
					replaceFile(t, file, mint(counting))
					patient()
				}()
			}
			replaceFile(t, file, mint(tt.answer))
			if status, why := n.reloadPlugin("p"); status != 200 {
				t.Fatalf("reload: %d %s", status, why)
			}
			before := fallbacks()
			const requests = 30
			if tt.name == "always the same" {
				for range 3 {
					if r := n.post(""); r.status != 200 {
						t.Errorf("got %d %s", r.status, r.body)
					}
				}
				return
			}
			n.storm(requests)
			if got := fallbacks() - before; tt.falls && got < requests || !tt.falls && got != 0 {
				t.Errorf("%v fallbacks for %d requests", got, requests)
			}
		})
	}
	n.settled()
}

// A policy is reloaded a hundred times under load. No request fails, and
// nothing of the old versions remains.
func TestPolicyReloadUnderLoad(t *testing.T) {
	reloads := 100
	if testing.Short() {
		reloads = 20
	}
	file := writeModule(t, policyModule())
	versions := [][]byte{placing(rightPlace), placing("nop " + rightPlace)}
	replaceFile(t, file, versions[0])
	n := startFleet(t, enginesim.ConnectorVLLMNixl, options{plugins: []config.Plugin{policyPlugin(file)}, config: func(c *config.Config) {
		c.Policy.Place, c.Timeouts.Policy = "p", config.Duration(time.Second) // a busy machine delays a guest longer than usual
	}})
	var stop atomic.Bool
	var requests, bad atomic.Int64
	var wg sync.WaitGroup
	for c := range 6 {
		wg.Go(func() {
			for i := 0; !stop.Load(); i++ {
				r := n.send(n.client, "", fmt.Sprintf(`{"model":"sim","prompt":"client %d of many says %d","max_tokens":3,"ignore_eos":true}`, c, i))
				requests.Add(1)
				if r.err != nil || r.status != 200 {
					if bad.Add(1) == 1 {
						t.Errorf("got %d %v %s", r.status, r.err, r.body)
					}
				}
			}
		})
	}
	var settled usage
	for i := range reloads {
		replaceFile(t, file, versions[(i+1)%2])
		if status, why := n.reloadPlugin("p"); status != 200 {
			t.Errorf("reload %d: %d %s", i, status, why)
			break
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
	if f := n.metric("pdproxy_fallbacks_total", `what="place"`); f != 0 {
		t.Errorf("got %v fallbacks", f)
	}
	n.eventually("the resources of the process stay constant", func() bool {
		now := measure()
		return now.goroutines <= settled.goroutines+10 && now.mappings <= settled.mappings+20 && now.heap <= settled.heap+16<<20
	})
	if t.Failed() {
		t.Logf("resources in the middle of the load %+v, now %+v", settled, measure())
	}
	n.settled()
}
