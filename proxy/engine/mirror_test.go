package engine

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/internal/dev/usage"
	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/load"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// hearing records the calls of a mirror's hooks.
type hearing struct {
	mu    sync.Mutex
	heard []string // guarded by mu
}

func (h *hearing) hear(what string) func(*Instance) {
	return func(i *Instance) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.heard = append(h.heard, i.Spec.Name+" "+what)
	}
}

func (h *hearing) has(what string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Contains(h.heard, what)
}

// mirrorOf returns a mirror without a connection to a registry.
func mirrorOf(f *fleet, h *hearing) *Mirror {
	return NewMirror(Options{
		Log: slog.New(slog.DiscardHandler), Health: *f.health.Load(), Circuit: circuitOf3,
		Protocols: f.o.Protocols, OnRestart: h.hear("restarted"), OnGone: h.hear("gone"),
		NewClient: func(spec config.Engine) (upstream.Client, error) { return new(fakeClient), nil },
		NewProbe: func(config.Engine) (http.RoundTripper, error) {
			return http.NewFileTransport(nil), nil // a probe would panic
		},
	}, func() time.Duration { return time.Minute })
}

// observations decodes a report of a mirror.
func observations(t *testing.T, b []byte) *fleetpb.Observations {
	t.Helper()
	var m fleetpb.Report
	if err := fleetpb.Unmarshal(b, &m, maxRecords); err != nil {
		t.Fatal(err)
	}
	return m.Observations
}

// imports passes all parts of r to m.
func imports(t *testing.T, m *Mirror, r *Registry) {
	t.Helper()
	for part, b := range [...][]byte{Members: r.exportMembers(), Loads: r.appendLoads(nil, time.Now()), Pairs: r.exportPairs()} {
		if err := m.Import(Part(part), b); err != nil {
			t.Fatal(err)
		}
	}
}

// shape writes as text all of a registry's state on which placements depend, except
// the loads.
func shape(s *Snapshot, now time.Time) string {
	var b strings.Builder
	fmt.Fprintln(&b, s.Models(), s.Unlearned, s.Ready())
	for _, i := range s.Instances {
		fmt.Fprintln(&b, i.Spec, i.APIKey, i.Source, i.State(), i.Unresponsive(), i.Shown(), i.sleeping(), i.Since(), i.moveAt.Load(), *i.Facts(), i.facts.Load() == nil, i.BlockTokens(),
			i.Breaker.Circuit(now), i.Breaker.Failures(), i.Transfers.Fit())
		for r := range i.Load {
			fmt.Fprintln(&b, r, i.Load[r].View(now).PrefillMicros, i.Load[r].Output.Fit())
		}
	}
	for _, model := range s.models {
		p := s.pools[model]
		fmt.Fprintln(&b, p.Plan, p.Configured, p.Pairs, p.Groups, len(p.Asleep))
		for _, r := range slices.Concat(p.Ready, p.Paired, p.Both) {
			fmt.Fprintln(&b, r.Spec.Name, r.Rank, r.Facts.Group, r.Facts.Roles)
		}
	}
	return b.String()
}

// TestMirrorFollows: after any sequence of changes a mirror has the same shape as
// the registry. An instance that did not change in the registry is still the same
// Instance in the mirror.
func TestMirrorFollows(t *testing.T) {
	var restarted, gone int
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			f := newFleet(t)
			f.o.MoveAfter = func() time.Duration { return moveAfter }
			f.start(t)
			var heard hearing
			m := mirrorOf(f, &heard)
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { defer close(done); m.Registry().Run(ctx) }()
			defer func() { stop(); <-done }()
			here := make(map[*Instance]*Instance)
			const steps = 60
			for step := range steps {
				f.change(t, random)
				synctest.Wait()
				if random.IntN(3) == 0 && step < steps-1 {
					continue // the next import contains several changes
				}
				imports(t, m, f.Registry)
				time.Sleep(2 * drainPoll)
				synctest.Wait()
				imports(t, m, f.Registry)
				now := time.Now()
				want, got := shape(f.Snapshot(), now), shape(m.Registry().Snapshot(), now)
				if got != want {
					t.Fatalf("seed %d, step %d: the mirror shows\n%s\nof\n%s", seed, step, got, want)
				}
				for n, i := range f.Snapshot().Instances {
					j := m.Registry().Snapshot().Instances[n]
					if here[i] != nil && here[i] != j {
						t.Fatalf("seed %d, step %d: %s is another instance", seed, step, i.Spec.Name)
					}
					here[i] = j
					if number, _ := m.Number(j); number != i.ID || m.Instance(i.ID) != j {
						t.Fatalf("seed %d, step %d: %s has number %d, not %d", seed, step, i.Spec.Name, number, i.ID)
					}
				}
			}
			for i, j := range here {
				if i.Gone() != j.Gone() || j.Gone() && j.Client.(*fakeClient).closes() == 0 {
					t.Errorf("seed %d: %s has left the registry: %v, the mirror: %v", seed, i.Spec.Name, i.Gone(), j.Gone())
				}
			}
			for _, what := range heard.heard {
				if strings.HasSuffix(what, "restarted") {
					restarted++
				} else {
					gone++
				}
			}
		})
	}
	if restarted == 0 || gone == 0 {
		t.Errorf("%d instances restarted, %d left: too few changes for this test", restarted, gone)
	}
}

// change makes one random change to the fleet, or none.
func (f *fleet) change(t *testing.T, random *rand.Rand) {
	name := string(rune('a' + random.IntN(5)))
	i := f.Snapshot().Instance(name)
	switch n := random.IntN(11); {
	case i == nil:
		spec := f.spec(name, []string{"prefill", "decode", "both"}[random.IntN(3)], []string{"fake", "none"}[random.IntN(2)])
		spec.Ranks, spec.APIKeyFile = 1+random.IntN(2), []string{"", "key"}[random.IntN(2)]
		if spec.Connector == "none" {
			spec.Role = "both"
		}
		f.must(t, f.Add(spec))
	case n == 0:
		_ = f.Remove(name, time.Minute) // the instance may be draining already
	case n == 1: // the engine restarts as another process
		f.engines.set(func() {
			f.engines.facts[name+":80"] = fmt.Sprintf("model m\nepoch %d\npage %d\n", random.IntN(9), 16*random.IntN(2))
		})
		time.Sleep(relearnEvery * 2 * time.Second)
	case n == 2: // the engine goes down, or comes back
		f.engines.set(func() { f.engines.down[name+":80"] = !f.engines.down[name+":80"] })
		time.Sleep(8 * time.Second)
	case n == 3:
		n := random.IntN(3)
		i.SetBlockTokens(16 << n)
		ranks := make([]bool, len(i.Load))
		ranks[0], ranks[len(ranks)-1] = n == 1, n > 0 // no rank, all ranks, the last one
		f.ReportSleep(i, SleepReport{Known: true, Ranks: ranks}, time.Now())
	case n == 4:
		for range 1 + random.IntN(4) {
			i.Breaker.Failure()
		}
	case n == 5:
		i.Breaker.Success()
	case n == 6:
		i.Load[0].Prefill.Measure(100, time.Duration(1+random.IntN(9))*time.Millisecond)
		i.Load[0].Output.Measure(10, time.Duration(1+random.IntN(9))*time.Millisecond)
	case n == 7:
		i.Transfers.Measure(100, time.Duration(1+random.IntN(9))*time.Millisecond)
	case n == 8:
		f.engines.set(func() { f.engines.facts[name+":80"] = "model m\nmodel n\n" })
		time.Sleep(relearnEvery * 2 * time.Second)
	case n == 9:
		_ = f.Drain(name, random.IntN(2) == 0) // the instance may leave
	case n == 10:
		_ = f.Undrain(name)
	}
}

// TestMirrorFacts: a mirror receives every field of an instance's facts and of its
// configuration. The test fills each field by its type, so it covers new fields too.
func TestMirrorFacts(t *testing.T) {
	f := newFleet(t)
	spec := f.spec("a", "prefill", "fake")
	f.must(t, f.Add(spec))
	i := f.get(t, "a")
	var facts Facts
	fill(t, reflect.ValueOf(&facts).Elem(), new(int))
	i.facts.Store(&facts)
	var heard hearing
	m := mirrorOf(f, &heard)
	imports(t, m, f.Registry)
	if got := m.Registry().Snapshot().Instance("a").facts.Load(); !reflect.DeepEqual(*got, facts) {
		t.Errorf("facts %+v\nof %+v", *got, facts)
	}

	one := member{Number: 1}
	fill(t, reflect.ValueOf(&one).Elem(), new(int))
	one.State = Draining
	back, err := getMember(putMember(&one))
	if err != nil || !reflect.DeepEqual(back, one) {
		t.Errorf("%v: %+v\nof %+v", err, back, one)
	}
}

// fill sets every field of v to a different value.
func fill(t *testing.T, v reflect.Value, n *int) {
	*n++
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprint("text ", *n))
	case reflect.Float64:
		v.SetFloat(float64(*n))
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(*n))
	case reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem(), n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			fill(t, v.Index(i), n)
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[netip.Addr]() {
			v.Set(reflect.ValueOf(netip.AddrFrom4([4]byte{10, 0, 0, byte(*n)})))
			return
		}
		for i := range v.NumField() {
			if !v.Type().Field(i).IsExported() {
				t.Fatalf("%s.%s is not exported, so the mirror does not receive it", v.Type(), v.Type().Field(i).Name)
			}
			fill(t, v.Field(i), n)
		}
	default:
		t.Fatalf("no value for a %s", v.Type())
	}
}

// TestMirrorLoads: each process sees the sum of the loads of all processes. The
// loads of other processes fade while no update comes.
func TestMirrorLoads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Add(f.spec("a", "both", "fake")))
		home := &f.get(t, "a").Load[0]
		var heard hearing
		m := mirrorOf(f, &heard)
		imports(t, m, f.Registry)
		here := &m.Registry().Snapshot().Instance("a").Load[0]

		// The registry holds three requests. One of them belongs to this process.
		home.Hold(100)
		home.Hold(100)
		home.Hold(100)
		own := here.Hold(100)
		imports(t, m, f.Registry)
		if v := here.View(time.Now()); v.Requests != 3 || v.Tokens != 300 {
			t.Errorf("load %+v of three requests, one of them held here", v)
		}
		own.Drop()
		if v := here.View(time.Now()); v.Requests != 2 || v.Tokens != 200 {
			t.Errorf("%+v after the own one", v)
		}
		time.Sleep(2 * mirroredEvery)
		if v := here.View(time.Now()); v.Requests != 2 {
			t.Errorf("load %+v soon after the last update", v)
		}
		time.Sleep(4 * mirroredEvery)
		if v := here.View(time.Now()); v.Requests != 0 {
			t.Errorf("load %+v long after the last update", v)
		}
	})
}

// TestMirrorOtherHome: another registry takes over. An instance that is also in the new registry
// stays the same and gets a new number. The mirror reports the working pairs to the new registry.
// An instance that the new registry does not know drains, according to the loads of this process.
func TestMirrorOtherHome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := newFleet(t), newFleet(t)
		p, d, x := first.spec("p", "prefill", "fake"), first.spec("d", "decode", "fake"), first.spec("x", "decode", "fake")
		first.must(t, first.Apply(SourceStatic, []config.Engine{x, p, d}, 0))
		second.spec("p", "prefill", "fake")
		second.spec("d", "decode", "fake")
		second.must(t, second.Apply(SourceStatic, []config.Engine{p, d}, 0))
		first.start(t)
		second.start(t)
		first.Pair(Target{first.get(t, "p"), 0}, Target{first.get(t, "d"), 0}).Success()

		var heard hearing
		m := mirrorOf(first, &heard)
		r := m.Registry()
		ctx, stop := context.WithCancel(t.Context())
		reports := make(chan []byte, 10)
		ended := make(chan struct{}, 2)
		go func() { r.Run(ctx); ended <- struct{}{} }()
		go func() { m.Run(ctx, func(b []byte) { reports <- b }); ended <- struct{}{} }()
		defer func() { stop(); <-ended; <-ended }()
		imports(t, m, first.Registry)
		ip, id, ix := r.Snapshot().Instance("p"), r.Snapshot().Instance("d"), r.Snapshot().Instance("x")
		if s := r.PairState(Target{ip, 0}, Target{id, 0}); s != abi.PairReady {
			t.Errorf("the pair is %s here", s)
		}
		if fresh := r.Pair(Target{ip, 0}, Target{id, 0}).Begin(); fresh {
			t.Error("an attempt waits for a handshake that has been")
		}
		stale := first.appendLoads(nil, time.Now())
		hold := ix.Load[0].Hold(1)
		imports(t, m, second.Registry)
		time.Sleep(time.Second)
		s := r.Snapshot()
		if number, _ := m.Number(ip); s.Instance("p") != ip || s.Instance("d") != id || number != second.get(t, "p").ID {
			t.Error("an instance of both registries was replaced")
		}
		if _, known := m.Number(ix); ix.State() != Draining || ix.Gone() || known {
			t.Errorf("x is %s, left: %v", ix.State(), ix.Gone())
		}
		if err := m.Import(Loads, stale); err != nil {
			t.Errorf("loads of the first: %v", err)
		}
		second.must(t, second.Learn(1, observations(t, <-reports)))
		if got := second.PairState(Target{second.get(t, "p"), 0}, Target{second.get(t, "d"), 0}); got != abi.PairReady {
			t.Errorf("state of the pair in the second registry = %s", got)
		}
		hold.Drop()
		time.Sleep(2 * drainPoll)
		synctest.Wait()
		if !ix.Gone() || !heard.has("x gone") {
			t.Error("x has drained and is still there")
		}
	})
}

// TestMirrorReports: a mirror reports the worker's observations to its registry. An
// observation that changes the state of a circuit or a pair is reported before the
// observing goroutine goes on.
func TestMirrorReports(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("p", "prefill", "fake"), f.spec("d", "decode", "fake")}, 0))
		f.start(t)
		var heard hearing
		m := mirrorOf(f, &heard)
		imports(t, m, f.Registry)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			m.Run(ctx, func(b []byte) {
				if err := f.Learn(3, observations(t, b)); err != nil {
					t.Error(err)
				}
			})
		}()
		defer func() { stop(); <-ended }()
		r := m.Registry()
		p, d := Target{f.get(t, "p"), 0}, Target{f.get(t, "d"), 0}
		hp, hd := Target{r.Snapshot().Instance("p"), 0}, Target{r.Snapshot().Instance("d"), 0}

		synctest.Wait() // Run has begun
		for range 3 {
			hp.Breaker.Failure()
		}
		if c := p.Breaker.Circuit(time.Now()); c != circuit.Open {
			t.Errorf("circuit after three failures on a mirror = %v", c)
		}
		hp.Breaker.Success()
		if c := p.Breaker.Circuit(time.Now()); c != circuit.Closed {
			t.Errorf("circuit after a success on a mirror = %v", c)
		}
		hp.Breaker.Success() // this success changes nothing
		if n := len(r.reports.waiting); n != 0 {
			t.Errorf("%d reports of nothing", n)
		}

		r.NoRoom(hp)
		if !p.Load[0].Full(time.Now()) {
			t.Error("the refusal of a leg on a mirror is not known")
		}

		pair := r.Pair(hp, hd)
		pair.Begin()
		time.Sleep(reportEvery)
		synctest.Wait()
		if s := f.PairState(p, d); s != abi.PairWarming {
			t.Errorf("the pair is %s while an attempt waits elsewhere", s)
		}
		f.Unlearn(3)
		if s := f.PairState(p, d); s != abi.PairUnknown {
			t.Errorf("state of the pair after the end of the mirror = %s", s)
		}
		pair.Success()
		if s := f.PairState(p, d); s != abi.PairReady {
			t.Errorf("state of the pair after a transfer = %s", s)
		}
		pair.End()
		for range 3 {
			pair.Failure("kv_timeout")
		}
		rows := f.Pairs()
		if len(rows) != 1 || rows[0].State != "broken" || rows[0].Failures != 3 || rows[0].LastError != "kv_timeout" {
			t.Errorf("f.Pairs() = %+v", rows)
		}
		r.MeasurePair(hp, hd, 1000, 5*time.Millisecond)
		r.MeasureOutput(hd, 100, time.Second)
		time.Sleep(reportEvery)
		synctest.Wait()
		if got := p.Transfers.PerToken(); got != 5 {
			t.Errorf("transfers take %v µs a token", got)
		}
		if got := d.Load[0].Output.PerToken(); got != 10000 {
			t.Errorf("streams take %v µs a token", got)
		}
		f.must(t, New(f.o).Learn(3, &fleetpb.Observations{Mark: 1, List: []*fleetpb.Observation{{Tokens: -1}}}))
	})
}

// TestUnchangedLoadsStay: loads that do not change, and the report of an engine behind them, do
// not fade in a mirror.
func TestUnchangedLoadsStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Add(f.spec("a", "both", "fake")))
		m := mirrorOf(f, new(hearing))
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			f.Export(ctx, func(part Part, value []byte) {
				if err := m.Import(part, value); err != nil {
					t.Error(err)
				}
			})
		}()
		home := &f.get(t, "a").Load[0]
		home.Hold(100)
		home.Report(load.Report{At: time.Now(), Every: time.Hour, Running: 3, Waiting: 2, Queued: -1}, home.Mark())
		time.Sleep(time.Minute)
		synctest.Wait()
		here := &m.Registry().Snapshot().Instance("a").Load[0]
		if v := here.View(time.Now()); v.Requests != 5 {
			t.Errorf("load %+v, want five requests", v)
		}
		if waiting, _, ok := here.Waiting(time.Now()); waiting != 2 || !ok {
			t.Errorf("%d wait, %t", waiting, ok)
		}
		stop()
		<-ended
	})
}

// TestExport: an export sends every part first, and later only changed parts.
func TestExport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("p", "prefill", "fake"), f.spec("d", "decode", "fake")}, 0))
		f.start(t)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		got := make(map[Part]int)
		var heard hearing
		m := mirrorOf(f, &heard)
		go func() {
			defer close(ended)
			f.Export(ctx, func(part Part, b []byte) {
				got[part]++
				if err := m.Import(part, b); err != nil {
					t.Error(part, err)
				}
			})
		}()
		told := func(want map[Part]int) {
			t.Helper()
			time.Sleep(2 * exportEvery)
			synctest.Wait()
			if !reflect.DeepEqual(got, want) {
				t.Errorf("reports %v, want %v", got, want)
			}
			clear(got)
		}
		told(map[Part]int{Members: 1, Loads: 1, Pairs: 1})
		told(map[Part]int{})
		f.Pair(Target{f.get(t, "p"), 0}, Target{f.get(t, "d"), 0}).Success()
		told(map[Part]int{Pairs: 1})
		f.get(t, "d").Load[0].Hold(5)
		told(map[Part]int{Loads: 1})
		f.must(t, f.Remove("p", 0))
		synctest.Wait()
		if m.Registry().Snapshot().Instance("p").State() != Draining {
			t.Error("p does not drain in the mirror at once")
		}
		stop()
		<-ended
	})
}

// TestImportRefuses: an import refuses a malformed part as a whole.
func TestImportRefuses(t *testing.T) {
	f := newFleet(t)
	f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("p", "prefill", "fake")}, 0))
	var heard hearing
	m := mirrorOf(f, &heard)
	imports(t, m, f.Registry)
	before := m.Registry().Snapshot()
	of := func(list ...*fleetpb.Member) string {
		return string(fleetpb.Append(nil, &fleetpb.Members{Mark: f.mark, Instances: list}))
	}
	loads, pairs := f.appendLoads(nil, time.Now()), f.exportPairs()
	for name, tt := range map[string]struct {
		part Part
		b    string
	}{
		"no message":     {Members, "{"},
		"no number":      {Members, of(&fleetpb.Member{})},
		"a number twice": {Members, of(&fleetpb.Member{Number: 1}, &fleetpb.Member{Number: 1})},
		"no address":     {Members, of(&fleetpb.Member{Number: 1, Facts: &fleetpb.Facts{Addresses: []string{"x"}}})},
		"too many ranks": {Members, of(&fleetpb.Member{Number: 1, Spec: &fleetpb.Engine{Ranks: 65000}}, &fleetpb.Member{Number: 2, Spec: &fleetpb.Engine{Ranks: 65000}})},
		"cut loads":      {Loads, string(loads[:len(loads)-1])},
		"negative loads": {Loads, string(fleetpb.Append(nil, &fleetpb.Loads{Mark: f.mark, Instances: []*fleetpb.InstanceLoad{{Ranks: []*fleetpb.RankLoad{{Tokens: -1}}}}}))},
		"cut pairs":      {Pairs, string(pairs[:len(pairs)-1])},
		"no part":        {Part(9), ""},
	} {
		if err := m.Import(tt.part, []byte(tt.b)); err == nil {
			t.Errorf("%s: Import accepted the part", name)
		}
	}
	if m.Registry().Snapshot() != before {
		t.Error("a malformed part changed the mirror")
	}
}

// TestMirrorUnusable: an instance that this process cannot use does not affect the
// other instances.
func TestMirrorUnusable(t *testing.T) {
	f := newFleet(t)
	var heard hearing
	m := mirrorOf(f, &heard)
	if err := m.Import(Members, fleetpb.Append(nil, &fleetpb.Members{Mark: 1, Instances: []*fleetpb.Member{
		{Number: 1, Spec: &fleetpb.Engine{Name: "new", Url: "http://a", Role: "both", Connector: "of tomorrow", Ranks: 1}},
		{Number: 2, Spec: &fleetpb.Engine{Name: "old", Url: "http://b", Role: "both", Connector: "none", Ranks: 1}, State: uint32(Ready)},
		{Number: 3, Spec: &fleetpb.Engine{Name: "odd", Url: "http://c", Role: "both", Connector: "none", Ranks: 1}, State: 9},
	}})); err != nil {
		t.Fatal(err)
	}
	if s := m.Registry().Snapshot(); len(s.Instances) != 2 || s.Instance("old").State() != Ready || s.Instance("odd").State() != Down {
		t.Errorf("m.Registry().Snapshot() = %v", s.Instances)
	}
}

// BenchmarkMirrorLoads exports the loads of 64 instances of 8 ranks and imports them.
func BenchmarkMirrorLoads(b *testing.B) {
	f := newFleet(&testing.T{})
	for n := range 64 {
		if err := f.Add(config.Engine{Name: fmt.Sprint("e", n), URL: "http://e", Role: "both", Connector: "none", Ranks: 8}); err != nil {
			b.Fatal(err)
		}
	}
	var heard hearing
	m := mirrorOf(f, &heard)
	if err := m.Import(Members, f.exportMembers()); err != nil {
		b.Fatal(err)
	}
	var part []byte
	for b.Loop() {
		part = f.appendLoads(part[:0], time.Now())
		if err := m.Import(Loads, part); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(len(part)), "bytes")
}

// BenchmarkScaleMirror measures the state of a fleet that a coordinator sends to each worker, over
// the number of engines with one rank: the loads, four times a second, and the members, at each
// change. snapshot is the registry's work at a change. Times are CPU times of this process.
func BenchmarkScaleMirror(b *testing.B) {
	for _, n := range []int{4, 16, 64, 256, 1000, 2000, 4000, 10_000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			f := newFleet(&testing.T{})
			var specs []config.Engine
			for i := range n {
				specs = append(specs, config.Engine{Name: fmt.Sprint("e", i), URL: "http://e", Role: "both", Connector: "none", Ranks: 1})
			}
			if err := f.Apply(SourceStatic, specs, 0); err != nil {
				b.Fatal(err)
			}
			var heard hearing
			m := mirrorOf(f, &heard)
			members := f.exportMembers()
			if err := m.Import(Members, members); err != nil {
				b.Fatal(err)
			}
			var loads []byte
			timed := func(unit string, do func()) {
				const times = 40
				start := usage.ProcessTime()
				for range times {
					do()
				}
				b.ReportMetric((usage.ProcessTime()-start).Seconds()*1e6/times, unit)
			}
			timed("encode-µs", func() { loads = f.appendLoads(loads[:0], time.Now()) })
			timed("import-µs", func() {
				if err := m.Import(Loads, loads); err != nil {
					b.Fatal(err)
				}
			})
			timed("snapshot-µs", func() { newSnapshot(f.Snapshot().Instances, pairing{}) })
			b.ReportMetric(float64(len(loads))/1e3, "loads-kB")
			b.ReportMetric(float64(len(members))/1e3, "members-kB")
			b.ReportMetric(0, "ns/op") // the work has a fixed length
		})
	}
}

func FuzzImport(f *testing.F) {
	fleet := newFleet(&testing.T{})
	fleet.mark = 1 // every process that fuzzes needs the same mark
	_ = fleet.Add(config.Engine{Name: "p", URL: "http://p", Role: "prefill", Connector: "fake", Ranks: 2})
	_ = fleet.Add(config.Engine{Name: "d", URL: "http://d", Role: "decode", Connector: "fake", Ranks: 1})
	s := fleet.Snapshot()
	fleet.Pair(Target{s.Instance("p"), 1}, Target{s.Instance("d"), 0}).Failure("x")
	f.Add(uint8(Members), fleet.exportMembers())
	f.Add(uint8(Loads), fleet.appendLoads(nil, time.Now()))
	f.Add(uint8(Pairs), fleet.exportPairs())
	members := fleet.exportMembers()
	f.Fuzz(func(t *testing.T, part uint8, b []byte) {
		var heard hearing
		m := mirrorOf(fleet, &heard)
		if err := m.Import(Members, members); err != nil {
			t.Fatal(err)
		}
		if m.Import(Part(part), b) != nil {
			return
		}
		now := time.Now()
		for _, i := range m.Registry().Snapshot().Instances {
			for r := range i.Load {
				if v := i.Load[r].View(now); v.Requests < 0 || v.Tokens < 0 || v.Queued < 0 || v.Decode < 0 || !(v.PrefillMicros >= 0) {
					t.Errorf("load %+v", v)
				}
			}
			if i.Breaker.Failures() < 0 || i.BlockTokens() < 0 {
				t.Errorf("%d failures, blocks of %d", i.Breaker.Failures(), i.BlockTokens())
			}
		}
	})
}

func FuzzLearn(f *testing.F) {
	fleet := newFleet(&testing.T{})
	_ = fleet.Add(config.Engine{Name: "p", URL: "http://p", Role: "prefill", Connector: "fake", Ranks: 2})
	_ = fleet.Add(config.Engine{Name: "d", URL: "http://d", Role: "decode", Connector: "fake", Ranks: 1})
	var heard hearing
	m := mirrorOf(fleet, &heard)
	_ = m.Import(Members, fleet.exportMembers())
	s := m.Registry().Snapshot()
	p, d := Target{s.Instance("p"), 1}, Target{s.Instance("d"), 0}
	m.Registry().Pair(p, d).Begin()
	m.Registry().Pair(p, d).Failure("kv_timeout")
	m.Registry().MeasurePair(p, d, 10, time.Second)
	m.Registry().MeasureOutput(d, 10, time.Second)
	d.Breaker.Failure()
	d.Breaker.Success()
	f.Add(m.Registry().reports.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		var report fleetpb.Report
		if fleetpb.Unmarshal(b, &report, maxRecords) != nil || report.Observations == nil {
			return
		}
		report.Observations.Mark = fleet.mark
		_ = fleet.Learn(1, report.Observations)
		fleet.Unlearn(1)
		if len(fleet.Snapshot().Instances) != 2 || len(fleet.learned.warming) != 0 {
			t.Error("a report changed the instances, or remains stored")
		}
		for _, row := range fleet.Pairs() {
			if row.State == "warming" || !(row.TransferMicros >= 0) {
				t.Errorf("%+v", row)
			}
		}
	})
}
