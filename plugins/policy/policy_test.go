package policy

import (
	"context"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/budget"
	"github.com/pdproxy/pdproxy/plugins/policy/policytest"
)

func TestHooks(t *testing.T) {
	for _, guarded := range []bool{false, true} {
		name := "trusted"
		if guarded {
			name = "guarded"
		}
		t.Run(name, func(t *testing.T) {
			l := newLoading()
			l.Load.Guarded = guarded
			l.config = "leg=edit"
			v := l.load(t)
			if n := len(v.Policies()); n != 6 || v.Policies()[0].Label != "p" || v.Needs() != 0 {
				t.Errorf("%d policies, label %q, needs %d", n, v.Policies()[0].Label, v.Needs())
			}
			plan := hook(t, v, abi.HookPlan)
			for do, want := range map[string]abi.PlanAnswer{
				"":       {Decision: abi.PlanAggregate},
				"pass":   {},
				"reject": {Decision: abi.PlanReject, Status: 429},
				"hold":   {Decision: abi.PlanHold, LimitMillis: 700},
				"limit":  {Decision: abi.PlanDisaggregate, LimitMillis: 1500},
			} {
				if a, reason := plan.Plan(&abi.PlanFacts{Request: abi.RequestFacts{Model: "do:" + do}}); a != want || reason != "" {
					t.Errorf("plan %q: %+v, %q", do, a, reason)
				}
			}
			score := hook(t, v, abi.HookScore)
			for do, want := range map[string]string{"": "", "nonsense": Nonsense} {
				f := &abi.ScoreFacts{PlaceFacts: policytest.Pair(do), Phases: abi.RolePrefill, Prefill: -1, Open: []bool{true, true, false, false}}
				rows, units := make([]abi.RowScore, 4), make([]abi.Scale, 1)
				if reason := score.Score(f, []uint32{0}, rows, units); reason != want || want == "" && (rows[1] != abi.RowScore{Score: 0.5, Value: 1} || units[0] != abi.UnitBlocks) {
					t.Errorf("score %q: %q, %v in %v", do, reason, rows, units)
				}
			}
			place := hook(t, v, abi.HookPlace)
			if d, reason := place.Place(policytest.Pair("")); d != (abi.PlaceDecision{Prefill: 1, Decode: 3}) || reason != "" {
				t.Errorf("place: %+v, %q", d, reason)
			}
			f := policytest.Pair("score")
			if _, reason := place.Place(f); reason != "" || !f.Scored || f.Candidates[2].Score != 2.5 {
				t.Errorf("place with scores: %q, %+v", reason, f)
			}
			if d, reason := place.Place(policytest.Pair("scribble")); reason != "" || d.Decode != 3 {
				t.Errorf("place that scribbles: %+v, %q", d, reason)
			}
			if id, reason := hook(t, v, abi.HookMint).Mint(&abi.MintFacts{Counter: 9}); id != abi.MinDisaggID+9 || reason != "" {
				t.Errorf("mint: %d, %q", id, reason)
			}
			leg := hook(t, v, abi.HookLeg)
			d, list, reason := leg.Leg(&abi.LegFacts{Engine: "p0"}, []byte("before"))
			if d != abi.LegEdited || reason != "" || !strings.HasPrefix(string(list), "before") {
				t.Fatalf("leg: %v, %q", d, reason)
			}
			first, rest, ok := abi.NextEdit(list[len("before"):])
			second, rest, ok2 := abi.NextEdit(rest)
			if !ok || !ok2 || len(rest) > 0 || first != (abi.Edit{Op: abi.EditSetHeader, Name: "x-by", Value: "p0"}) ||
				second != (abi.Edit{Op: abi.EditSetField, Name: "seed", Value: "7"}) {
				t.Errorf("edits: %+v %+v", first, second)
			}
			many := &abi.LegFacts{Request: abi.RequestFacts{Model: "do:many"}}
			if _, list, reason := leg.Leg(many, nil); reason != Nonsense || len(list) > 0 {
				t.Errorf("more edits than may be: %d bytes, %q", len(list), reason)
			}
			again := &abi.LegFacts{Event: abi.LegFailed, Request: abi.RequestFacts{Model: "do:again"}}
			if d, _, reason := leg.Leg(again, nil); d != abi.LegPlaceAgain || reason != "" {
				t.Errorf("failed leg: %v, %q", d, reason)
			}
			if reason := hook(t, v, abi.HookFinish).Finish(&abi.FinishFacts{}); reason != "" {
				t.Errorf("finish: %q", reason)
			}
			if s := place.Summary(); s.Calls != 3 || s.MeanUS <= 0 || s.P99US < s.MeanUS {
				t.Errorf("summary %+v", s)
			}
		})
	}
}

func TestNames(t *testing.T) {
	l := newLoading()
	l.config = "names=yes"
	v := l.load(t)
	var labels []string
	for _, p := range v.Policies() {
		labels = append(labels, p.Hook.String()+" "+p.Label)
	}
	if got := strings.Join(labels, ", "); got != "plan p/gate, place p/last, place p/first" {
		t.Errorf("policies: %s", got)
	}
	if v.Needs() != abi.NeedPrompt|abi.NeedConversation {
		t.Errorf("needs %d", v.Needs())
	}
	if _, ok := v.Find(abi.HookMint, ""); ok {
		t.Error("Find returns an unnamed mint policy although the policies have names")
	}
	p, _ := v.Find(abi.HookPlace, "first")
	if d, reason := p.Place(policytest.Pair("")); d != (abi.PlaceDecision{Prefill: 0, Decode: 2}) || reason != "" {
		t.Errorf("the second place policy: %+v, %q", d, reason)
	}
}

// TestVersion2: a module that declares needs of version 2 gets those facts. The same
// module without them gets frames of version 1, so that it finds no zone.
func TestVersion2(t *testing.T) {
	l := newLoading()
	f := policytest.Pair("zone")
	f.Request.Tenant = 7
	for i := range f.Candidates {
		zone := "b"
		if i%2 == 0 {
			zone = "a"
		}
		f.Details = append(f.Details, abi.Detail{Zone: abi.LabelID(zone), Weight: float32(i) + 0.5})
	}
	if d, reason := hook(t, l.load(t), abi.HookPlace).Place(f); reason != Nonsense {
		t.Errorf("without needs: %+v, %q", d, reason)
	}
	l.config = "needs=version2"
	v := l.load(t)
	if d, reason := hook(t, v, abi.HookPlace).Place(f); d != (abi.PlaceDecision{Prefill: 0, Decode: 2}) || reason != "" {
		t.Errorf("with needs: %+v, %q", d, reason)
	}
	if !f.Scored || f.Candidates[3].Score != 3.5 {
		t.Errorf("scores %v %+v", f.Scored, f.Candidates)
	}
}

// TestHeaders: a policy gets the headers that its module declares, in the order of the
// declaration, if it needs headers. A module that declares a header with credentials, or
// that needs headers and declares none, does not load.
func TestHeaders(t *testing.T) {
	f := policytest.Pair("tier")
	f.Request.Headers = []abi.RequestHeader{
		{Name: "x-other", Value: "of another module", Present: true}, {Name: "x-empty", Present: true}, {Name: "x-tier", Value: "gold", Present: true},
	}
	first, last := abi.PlaceDecision{Prefill: 0, Decode: 2}, abi.PlaceDecision{Prefill: 1, Decode: 3}
	for config, want := range map[string]abi.PlaceDecision{
		"place=tier needs=headers headers=X-Tier,x-absent,x-empty": first,
		"place=tier needs=headers headers=x-tier":                  last,
		"place=tier headers=x-tier,x-absent,x-empty":               last, // declared and not needed
	} {
		l := newLoading()
		l.config = config
		if d, reason := hook(t, l.load(t), abi.HookPlace).Place(f); d != want || reason != "" {
			t.Errorf("%s: %+v, %q", config, d, reason)
		}
	}
	for config, want := range map[string]string{
		"needs=headers": "needs headers, but pdproxy_v1_headers declares none",
		"needs=headers headers=x-tier,Authorization":   `"authorization" carries credentials`,
		"headers=x-api-key":                            `"x-api-key" carries credentials`,
		"needs=headers headers=a,b,c,d,e,f,g,h,i":      "at most 8 headers",
		"needs=headers headers=x-tier,x-region,X-TIER": "declared twice",
	} {
		l := newLoading()
		l.config = config
		if _, err := l.try(t); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", config, err)
		}
	}
}

// TestVersion1: modules that were built for version 1 of the contract run as they
// did. testdata/v1 has them as they were built then; nothing rebuilds them.
func TestVersion1(t *testing.T) {
	for _, name := range []string{"c.wasm", "rust.wasm"} {
		t.Run(name, func(t *testing.T) {
			wasm, err := os.ReadFile("testdata/v1/" + name)
			if err != nil {
				t.Fatal(err)
			}
			l := newLoading()
			l.Wasm = wasm
			l.Load.CompileWorkers = 2
			v, err := Load(t.Context(), l.Options)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := v.Close(context.Background()); err != nil {
					t.Error(err)
				}
			}()
			f := policytest.Pair("")
			f.Candidates[0].Requests, f.Candidates[3].Requests = 5, 5
			f.Details = make([]abi.Detail, len(f.Candidates))
			p := v.Policies()[0]
			if d, reason := p.Place(f); p.Hook != abi.HookPlace || d != (abi.PlaceDecision{Prefill: 1, Decode: 2}) || reason != "" {
				t.Errorf("%s %+v, %q", p.Hook, d, reason)
			}
		})
	}
}

// TestFailures: after any failure of a guest, the call ends with the reason,
// and a new VM answers the next call.
func TestFailures(t *testing.T) {
	l := newLoading()
	l.Load.Guarded = true
	l.Load.MemoryPages = 256 // 16 MiB
	l.VMs = 1
	l.config = "mint=nonsense"
	v := l.load(t)
	place := hook(t, v, abi.HookPlace)
	for i, tt := range []struct{ do, want string }{{"trap", Trap}, {"grow", Trap}, {"nonsense", Nonsense}} {
		if _, reason := place.Place(policytest.Pair(tt.do)); reason != tt.want {
			t.Errorf("%s: place.Place(policytest.Pair(tt.do)) = %q, want %q", tt.do, reason, tt.want)
		}
		if d, reason := place.Place(policytest.Pair("")); reason != "" || d.Decode != 3 {
			t.Errorf("decision after %s: %+v, %q", tt.do, d, reason)
		}
		if n := place.Summary().Failures; n != uint64(i+1) {
			t.Errorf("%d failures after %d", n, i+1)
		}
	}
	if l.meter.failed(Trap) != 2 || l.meter.failed(Nonsense) != 1 {
		t.Errorf("metrics: %v", l.meter.fails)
	}
	if _, reason := hook(t, v, abi.HookPlan).Plan(&abi.PlanFacts{Request: abi.RequestFacts{Model: "do:nonsense"}}); reason != Nonsense {
		t.Errorf("plan: %q", reason)
	}
	if _, reason := hook(t, v, abi.HookMint).Mint(&abi.MintFacts{}); reason != Nonsense {
		t.Errorf("mint: %q", reason)
	}
	for _, do := range []string{"nonsense", "wrong"} {
		f := &abi.LegFacts{Request: abi.RequestFacts{Model: "do:" + do}}
		if d, list, reason := hook(t, v, abi.HookLeg).Leg(f, []byte("x")); d != abi.LegPass || string(list) != "x" || reason != Nonsense {
			t.Errorf("leg %s: %v, %d bytes, %q", do, d, len(list), reason)
		}
	}
}

func TestLate(t *testing.T) {
	for _, do := range []string{"loop", "sleep"} {
		t.Run(do, func(t *testing.T) { testLate(t, do) })
	}
}

func testLate(t *testing.T, do string) {
	l := newLoading()
	l.Load.Guarded = true
	l.Budget = 50 * time.Millisecond
	l.VMs = 1
	v := l.load(t)
	place := hook(t, v, abi.HookPlace)
	if _, reason := place.Place(policytest.Pair(do)); reason != Late {
		t.Fatalf("%s: %q", do, reason)
	}
	// Its VM is being replaced. A call that waits longer than the budget is
	// late too, but does not count as a failure of the guest.
	for deadline := time.Now().Add(time.Minute); ; {
		if time.Now().After(deadline) {
			t.Fatal("the VM is not replaced")
		}
		d, reason := place.Place(policytest.Pair(""))
		if reason == "" {
			if d.Decode != 3 {
				t.Errorf("decision %+v", d)
			}
			break
		}
		if reason != Late {
			t.Fatalf("reason after a %s: %q", do, reason)
		}
	}
}

func TestAbsent(t *testing.T) {
	l := newLoading()
	l.config = "mint=absent"
	p := hook(t, l.load(t), abi.HookMint)
	if _, reason := p.Mint(&abi.MintFacts{}); reason != Absent || p.Summary().Failures != 0 {
		t.Errorf("p.Mint = %q, %+v", reason, p.Summary())
	}
}

func TestParked(t *testing.T) {
	l := newLoading()
	l.Failures = budget.New(3, time.Hour, 0)
	v := l.load(t)
	place, plan := hook(t, v, abi.HookPlace), hook(t, v, abi.HookPlan)
	for range 4 {
		if _, reason := place.Place(policytest.Pair("nonsense")); reason != Nonsense {
			t.Fatal(reason)
		}
	}
	if !v.parked.Load() {
		t.Fatal("not parked after 4 failures, with a budget of 3")
	}
	if _, reason := place.Place(policytest.Pair("")); reason != Parked {
		t.Errorf("place: %q", reason)
	}
	if _, reason := plan.Plan(&abi.PlanFacts{}); reason != Parked {
		t.Errorf("plan of the same module: %q", reason)
	}
	if s := place.Summary(); s.Calls != 4 || s.Failures != 5 {
		t.Errorf("place.Summary() = %+v", s)
	}
}

// TestWaitsForAParkedVersion: a call that waits for a VM ends when the version is parked, because
// a parked version starts no VM.
func TestWaitsForAParkedVersion(t *testing.T) {
	l := newLoading()
	l.VMs, l.Failures = 1, budget.New(0, time.Hour, 0)
	v := l.load(t)
	place, m := hook(t, v, abi.HookPlace), v.pool.grab()
	reason := make(chan string)
	go func() {
		_, why := place.Place(policytest.Pair(""))
		reason <- why
	}()
	for v.pool.waiting.Load() == 0 {
		runtime.Gosched()
	}
	v.failed(0)
	if got := <-reason; got != Parked {
		t.Errorf("the call that waited: %q", got)
	}
	v.pool.put(m)
}

func TestLargeFrames(t *testing.T) {
	l := newLoading()
	v := l.load(t)
	f := policytest.Pair("")
	for range 4000 {
		f.Candidates = append(f.Candidates, abi.Candidate{Instance: 9, Roles: abi.RoleDecode, Group: 1})
	}
	if d, reason := hook(t, v, abi.HookPlace).Place(f); reason != "" || d.Decode != 4003 {
		t.Errorf("hook(v, abi.HookPlace).Place(f) = %+v, %q", d, reason)
	}
	l = newLoading()
	l.config = "scratch=refuse"
	p := hook(t, l.load(t), abi.HookPlace)
	if _, reason := p.Place(f); reason != Trap {
		t.Errorf("refused scratch: %q", reason)
	}
	if _, reason := p.Place(policytest.Pair("")); reason != "" {
		t.Errorf("reason for a small frame after a large one: %q", reason)
	}
}

func TestLoadFails(t *testing.T) {
	before := runtime.NumGoroutine()
	for config, want := range map[string]string{
		"configure=false": "proxy_on_configure answered false",
		"configure=trap":  "configure plugin",
	} {
		l := newLoading()
		l.config = config
		if _, err := l.try(t); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: l.try(t) = %v", config, err)
		}
	}
	l := newLoading()
	l.Load.MemoryPages = 10
	if _, err := l.try(t); err == nil || !strings.Contains(err.Error(), "memory") {
		t.Errorf("error with too little memory: %v", err)
	}
	l = newLoading()
	opts := l.Options
	opts.Wasm = []byte("\x00asm\x01\x00\x00\x00")
	if _, err := Load(t.Context(), opts); err == nil {
		t.Error("an empty module loads")
	}
	if after := runtime.NumGoroutine(); after > before {
		t.Errorf("%d goroutines before, %d after", before, after)
	}
}

// TestTrial: a version that fails on made-up requests reports it, and serves.
func TestTrial(t *testing.T) {
	for config, want := range map[string]string{
		"":               "",
		"plan=loop":      "hook plan: late",
		"place=trap":     "hook place: trap",
		"mint=nonsense":  "hook mint: nonsense",
		"leg=nonsense":   "hook leg: nonsense",
		"finish=trap":    "hook finish: trap",
		"place=nonsense": "hook place: nonsense",

		"needs=facts place=facts": "",
	} {
		t.Run(config, func(t *testing.T) {
			l := newLoading()
			l.Load.Guarded = true
			l.Budget = 50 * time.Millisecond
			l.config = config
			v := l.load(t)
			if err := v.Trial(); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("trial: %v", err)
			}
			for _, p := range v.Policies() {
				if p.Summary() != (Summary{}) {
					t.Errorf("the trial was counted: %+v", p.Summary())
				}
			}
		})
	}
}

// TestTrialOnBusyMachine: a trial reports the failure of the guest, also if the process
// had no processor time for a while. In this test the process pauses for 100 ms while the
// guest ends by a trap.
func TestTrialOnBusyMachine(t *testing.T) {
	l := newLoading()
	l.Load.Guarded = true
	l.Budget = 5 * time.Millisecond
	l.config = "finish=trap"
	calls := 0
	w := &world{config: l.config, level: func() {
		if calls++; calls == 2 { // the first call is for the log line of configure, the second for the text of the trap
			time.Sleep(100 * time.Millisecond)
		}
	}}
	l.NewEnv = func() host.Env { return w }
	v := l.load(t)
	if err := v.Trial(); err == nil || !strings.Contains(err.Error(), "hook finish: trap") {
		t.Errorf("trial: %v", err)
	}
	if calls < 2 {
		t.Errorf("the process did not pause: %d calls", calls)
	}
}

// TestHammerClose: calls during the end of a version get an answer or the
// reason Closed.
func TestHammerClose(t *testing.T) {
	l := newLoading()
	l.VMs = 3
	v := l.load(t)
	place := hook(t, v, abi.HookPlace)
	var wg sync.WaitGroup
	started := make(chan struct{}, 8)
	for i := range 8 {
		wg.Go(func() {
			for n := 0; ; n++ {
				if n == 20 {
					started <- struct{}{}
				}
				do := ""
				if i == 0 && n%10 == 9 {
					do = "trap"
				}
				switch d, reason := place.Place(policytest.Pair(do)); {
				case reason == Closed:
					return
				case reason == Trap && do == "trap":
				case reason != "" || d.Decode != 3:
					t.Errorf("%+v, %q", d, reason)
					return
				}
			}
		})
	}
	for range 8 {
		<-started
	}
	if err := v.Close(context.Background()); err != nil {
		t.Error(err)
	}
	wg.Wait()
	if err := v.Close(context.Background()); err != nil {
		t.Errorf("closed again: %v", err)
	}
}

// TestGrows: an unguarded module starts with two VMs, and gets another when a call finds none free,
// up to its limit. A guarded one has all from its start.
func TestGrows(t *testing.T) {
	l := newLoading()
	l.VMs = 3
	live := func(v *Version) int {
		v.mu.Lock()
		defer v.mu.Unlock()
		return v.live
	}
	v := l.load(t)
	place := hook(t, v, abi.HookPlace)
	if d, reason := place.Place(policytest.Pair("")); d.Decode != 3 || reason != "" || live(v) != firstVMs {
		t.Fatalf("%+v, %q, %d VMs", d, reason, live(v))
	}
	var taken []*vm
	for range l.VMs {
		if d, reason := place.Place(policytest.Pair("")); d.Decode != 3 || reason != "" {
			t.Errorf("%d VMs are in use: %+v, %q", len(taken), d, reason)
		}
		taken = append(taken, v.pool.grab())
	}
	if live(v) != l.VMs {
		t.Errorf("%d VMs, want %d", live(v), l.VMs)
	}
	v.grow()
	for _, m := range taken {
		v.pool.put(m)
	}
	if live(v) != l.VMs {
		t.Errorf("%d VMs after the limit", live(v))
	}
	v.Shrink()
	if d, reason := place.Place(policytest.Pair("")); live(v) != firstVMs || d.Decode != 3 || reason != "" {
		t.Errorf("%d VMs after Shrink: %+v, %q", live(v), d, reason)
	}
	l.Load.Guarded = true
	v = l.load(t)
	if v.Shrink(); live(v) != l.VMs {
		t.Errorf("a guarded module has %d VMs", live(v))
	}
}

// TestExtraVMDoesNotStart: the policy goes on with its first VMs and is not parked.
func TestExtraVMDoesNotStart(t *testing.T) {
	l := newLoading()
	l.VMs, l.Failures = 3, budget.New(1, time.Hour, 0)
	v := l.load(t)
	l.config = "configure=trap"
	for range 5 {
		v.grow()
		v.starts.Wait()
	}
	d, reason := hook(t, v, abi.HookPlace).Place(policytest.Pair(""))
	if v.live != firstVMs || v.growing || v.parked.Load() || d.Decode != 3 || reason != "" {
		t.Errorf("%d VMs, growing %v, parked %v, %+v, %q", v.live, v.growing, v.parked.Load(), d, reason)
	}
}

func TestDecisionsDoNotAllocate(t *testing.T) {
	for _, guarded := range []bool{false, true} {
		l := newLoading()
		l.Load.Guarded = guarded
		v := l.load(t)
		plan, place, mint := hook(t, v, abi.HookPlan), hook(t, v, abi.HookPlace), hook(t, v, abi.HookMint)
		a, b, c := &abi.PlanFacts{}, policytest.Pair(""), &abi.MintFacts{}
		all := func() { plan.Plan(a); place.Place(b); mint.Mint(c) }
		all()
		if n := testing.AllocsPerRun(200, all); n != 0 {
			t.Errorf("%v allocations in three decisions, guarded: %v", n, guarded)
		}
	}
}

func BenchmarkPlace(b *testing.B) {
	for _, guarded := range []bool{false, true} {
		name := "trusted"
		if guarded {
			name = "guarded"
		}
		b.Run(name, func(b *testing.B) {
			l := newLoading()
			l.Load.Guarded = guarded
			p, f := hook(b, l.load(b), abi.HookPlace), policytest.Pair("")
			b.ReportAllocs()
			for b.Loop() {
				p.Place(f)
			}
		})
	}
}

// A guest's notes belong only to the decision during which it left them.
func TestNotes(t *testing.T) {
	v := newLoading().load(t)
	place, plan, leg := hook(t, v, abi.HookPlace), hook(t, v, abi.HookPlan), hook(t, v, abi.HookLeg)
	want := []string{"p: first", "p: second"}
	for _, do := range []string{"note", "", "note"} {
		a, b, c := policytest.Pair(do), &abi.PlanFacts{Request: policytest.Pair(do).Request}, &abi.LegFacts{Request: policytest.Pair(do).Request}
		place.Place(a)
		plan.Plan(b)
		leg.Leg(c, nil)
		for hook, notes := range map[string][]string{"place": a.Notes, "plan": b.Notes, "leg": c.Notes} {
			if do == "" && len(notes) > 0 || do != "" && !slices.Equal(notes, want) {
				t.Errorf("hook %s, action %q: notes %q", hook, do, notes)
			}
		}
	}
}
