package engine

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
)

func (f *fleet) names() string {
	var s []string
	for _, i := range f.Snapshot().Instances {
		s = append(s, fmt.Sprintf("%s:%s", i.Spec.Name, i.State()))
	}
	return strings.Join(s, " ")
}

// TestApplyReload: unchanged instances keep their identity, load and health. Changed and
// removed instances drain.
func TestApplyReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		a, b, c := f.spec("a", "prefill", "fake"), f.spec("b", "decode", "fake"), f.spec("c", "decode", "fake")
		f.must(t, f.Apply(SourceStatic, []config.Engine{a, b, c}, time.Minute))
		f.start(t)
		oldA, oldB, oldC := f.get(t, "a"), f.get(t, "b"), f.get(t, "c")
		holdA, holdB := oldA.Load[0].Hold(10), oldB.Load[0].Hold(10)
		f.said()

		b.Ranks = 2
		f.must(t, f.Apply(SourceStatic, []config.Engine{a, b, f.spec("d", "decode", "fake")}, time.Minute))
		if f.get(t, "a") != oldA || oldA.State() != Ready || oldA.Load[0].Requests() != 1 {
			t.Error("the unchanged instance was touched")
		}
		newB := f.get(t, "b")
		if newB == oldB || newB.ID <= oldC.ID || len(newB.Load) != 2 {
			t.Error("the changed instance must be a new one")
		}
		synctest.Wait()
		if got, want := f.names(), "a:ready b:draining b:ready d:ready"; got != want {
			t.Errorf("instances %q, want %q", got, want)
		}
		if oldC.Client.(*fakeClient).closes() != 1 || !oldC.gone.Load() {
			t.Error("an idle removed instance has not left at once, or its client is open")
		}
		if oldB.Client.(*fakeClient).closes() != 0 {
			t.Error("a client was closed under a request")
		}
		time.Sleep(30 * time.Second)
		holdB.Drop()
		time.Sleep(drainPoll)
		synctest.Wait()
		if got, want := f.names(), "a:ready b:ready d:ready"; got != want {
			t.Errorf("instances %q, want %q", got, want)
		}
		if oldB.Client.(*fakeClient).closes() != 1 {
			t.Error("the client of a drained instance is closed")
		}
		for _, want := range []string{"b draining", "b gone", "c draining", "c gone", "d ready"} {
			f.mu.Lock()
			if !strings.Contains(strings.Join(f.heard, ", "), want) {
				t.Errorf("the hooks did not get %q: %q", want, f.heard)
			}
			f.mu.Unlock()
		}
		holdA.Drop()
	})
}

// TestSourceMoves: if the configuration begins to name a found engine, a new instance
// replaces it, and the proxy trusts the hosts in its answers. If the configuration no
// longer names the engine, discovery may find it again; the new instance is not trusted.
func TestSourceMoves(t *testing.T) {
	f := newFleet(t)
	list := []config.Engine{f.spec("a", "both", "fake")}
	owns := func(source string, want bool) {
		t.Helper()
		i := f.get(t, "a")
		if i.Source != source || i.Owns("10.9.9.9", nil) != want {
			t.Errorf("source %s, trusted %v; want %s, %v", i.Source, i.Owns("10.9.9.9", nil), source, want)
		}
	}
	f.must(t, f.Apply("etcd", list, 0))
	owns("etcd", false)
	first := f.get(t, "a")
	f.must(t, f.Apply(SourceStatic, list, 0))
	owns(SourceStatic, true)
	if first.State() != Draining || first.Owns("10.9.9.9", nil) {
		t.Errorf("the instance that was found is %v, trusted %v", first.State(), first.Owns("10.9.9.9", nil))
	}
	if err := f.Apply("etcd", list, 0); err == nil {
		t.Error("Apply of etcd replaced an engine of the configuration")
	}
	f.must(t, f.Apply("etcd", nil, 0)) // the finder's list is empty now
	owns(SourceStatic, true)
	f.must(t, f.Apply(SourceStatic, nil, 0))
	f.must(t, f.Apply("etcd", list, 0))
	owns("etcd", false)
	f.must(t, f.Apply(SourceStatic, list, 0))
	list[0].KVHosts = "10.0.0.0/16"
	f.must(t, f.Apply(SourceStatic, list, 0))
	owns(SourceStatic, false) // with KVHosts the proxy trusts only the configured hosts
}

// TestApplyKeepsOthersSources: the list of a source changes only the instances of this
// source.
func TestApplyKeepsOthersSources(t *testing.T) {
	f := newFleet(t)
	f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake")}, 0))
	f.must(t, f.Apply("etcd", []config.Engine{f.spec("b", "both", "fake")}, 0))
	f.must(t, f.Add(f.spec("c", "both", "fake")))
	if err := f.Apply("etcd", []config.Engine{f.spec("a", "both", "fake")}, 0); err == nil {
		t.Error("Apply of etcd replaced an engine of another source")
	}
	f.must(t, f.Apply(SourceStatic, nil, 0))
	if got, want := f.names(), "a:draining b:down c:down"; got != want {
		t.Errorf("instances %q, want %q", got, want)
	}
	// The name of a draining instance is free.
	f.must(t, f.Apply("etcd", []config.Engine{f.spec("a", "both", "fake"), f.spec("b", "both", "fake")}, 0))
	if got := f.get(t, "a").Source; got != "etcd" {
		t.Errorf("source %q", got)
	}
	if got := f.get(t, "c").Source; got != SourceAdmin {
		t.Errorf("source %q", got)
	}
}

// TestApplyRefuses: a list with any error changes nothing.
func TestApplyRefuses(t *testing.T) {
	edit := func(change func(*config.Engine)) func(*config.Engine) { return change }
	for _, tt := range []struct {
		name string
		edit func(*config.Engine)
		want string
	}{
		{"url", edit(func(e *config.Engine) { e.URL = "::" }), "url"},
		{"url without host", edit(func(e *config.Engine) { e.URL = "/x" }), "url"},
		{"role", edit(func(e *config.Engine) { e.Role = "boss" }), `unknown role "boss"`},
		{"connector", edit(func(e *config.Engine) { e.Connector = "x" }), `unknown connector "x"`},
		{"retired connector", edit(func(e *config.Engine) { e.Connector = "vllm-p2p-nccl" }), `"vllm-p2p-nccl" is retired`},
		{"ranks", edit(func(e *config.Engine) { e.Ranks = 0 }), "rank"},
		{"no name", edit(func(e *config.Engine) { e.Name = "" }), "name"},
		{"key", edit(func(e *config.Engine) { e.APIKeyFile = "missing" }), "no such file"},
		{"client", edit(func(e *config.Engine) { e.URL = "http://noclient" }), "no client"},
		{"probe", edit(func(e *config.Engine) { e.URL = "http://noprobe" }), "no probe"},
		{"KV address", edit(func(e *config.Engine) { e.KVAddress = "10.0.0.5" }), "kv_address"},
		{"no KV address", edit(func(e *config.Engine) { e.Connector, e.Role = "vllm-moriio", "prefill" }), "kv_address"},
		{"twice", edit(func(e *config.Engine) { e.Name = "new" }), "twice"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFleet(t)
			f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake")}, 0))
			before := f.Snapshot()
			bad := f.spec("bad", "both", "fake")
			tt.edit(&bad)
			err := f.Apply(SourceStatic, []config.Engine{f.spec("new", "both", "fake"), bad}, 0)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got error %v, want the text %q", err, tt.want)
			}
			if f.Snapshot() != before {
				t.Error("a refused list changed the registry")
			}
			if tt.name == "twice" {
				return
			}
			if err := f.Add(bad); err == nil {
				t.Error("Add accepted an invalid engine")
			}
		})
	}
	f := newFleet(t)
	f.must(t, f.Add(f.spec("a", "both", "fake")))
	if err := f.Add(f.spec("a", "both", "fake")); err == nil {
		t.Error("Add accepted a name twice")
	}
}

// The registered facts of an instance are among its facts, before and after the registry
// requests further facts. A change of the registered address creates a new instance.
func TestPublishedFacts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		spec := f.spec("p", "prefill", "fake")
		spec.Connector, spec.KVAddress, spec.TPSize = "vllm-moriio", "host:10.0.0.5,handshake:6301,notify:61005", 8
		check := func(handshake int) *Instance {
			t.Helper()
			var i *Instance
			for _, o := range f.Snapshot().Instances {
				if o.State() != Draining {
					i = o
				}
			}
			want := config.KVAddress{Host: "10.0.0.5", Handshake: handshake, Notify: 61005}
			if got := i.Facts(); got.KVAddress != want || got.TPSize != 8 {
				t.Errorf("i.Facts() = %+v", got)
			}
			return i
		}
		f.must(t, f.Apply(SourceZMQ, []config.Engine{spec}, 0))
		first := check(6301)
		f.start(t)
		synctest.Wait()
		if check(6301); first.State() != Ready || len(first.Facts().Models) == 0 {
			t.Errorf("state %v, facts %+v", first.State(), first.Facts())
		}
		f.must(t, f.Apply(SourceZMQ, []config.Engine{spec}, 0))
		if check(6301) != first {
			t.Error("the same again is another instance")
		}
		spec.KVAddress = "host:10.0.0.5,handshake:6302,notify:61005"
		f.must(t, f.Apply(SourceZMQ, []config.Engine{spec}, 0))
		if check(6302) == first {
			t.Error("an engine with another address is the same instance")
		}
	})
}

func TestRemove(t *testing.T) {
	for _, tt := range []struct {
		name  string
		drain time.Duration
		hold  time.Duration // duration of a request
		gone  time.Duration // time at which the instance has left
	}{
		{"idle", time.Minute, 0, 0},
		{"waits for the last request", time.Minute, 10*time.Second + time.Millisecond, 10*time.Second + drainPoll},
		{"not longer than it may", 5 * time.Second, 10 * time.Second, 5 * time.Second},
		{"no time at all", 0, 10 * time.Second, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet(t)
				f.must(t, f.Add(f.spec("a", "both", "fake")))
				f.start(t)
				a := f.get(t, "a")
				if tt.hold > 0 {
					h := a.Load[0].Hold(1)
					time.AfterFunc(tt.hold, h.Drop)
				}
				f.must(t, f.Remove("a", tt.drain))
				if a.State() != Draining || f.Snapshot().Ready() {
					t.Error("a draining instance still gets requests")
				}
				if err := f.Remove("a", 0); !errors.Is(err, ErrUnknown) {
					t.Errorf("second Remove: %v", err)
				}
				if tt.gone > 0 {
					time.Sleep(tt.gone - time.Millisecond)
					synctest.Wait()
					if a.gone.Load() {
						t.Error("the instance left too early")
					}
					time.Sleep(time.Millisecond)
				}
				synctest.Wait()
				if !a.gone.Load() || len(f.Snapshot().Instances) != 0 {
					t.Error("the instance has not left")
				}
				if got := f.said(); got != "a ready, a draining, a gone" {
					t.Errorf("hook calls %q", got)
				}
				time.Sleep(15 * time.Second)
			})
		})
	}
	if err := newFleet(t).Remove("x", 0); !errors.Is(err, ErrUnknown) {
		t.Errorf("got %v", err)
	}
}

// TestDrainingStays: a successful probe does not make a draining instance ready.
func TestDrainingStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Add(f.spec("a", "both", "fake")))
		f.engines.delay["a:80"] = 500 * time.Millisecond
		f.start(t)
		a := f.get(t, "a")
		h := a.Load[0].Hold(1)
		time.Sleep(700 * time.Millisecond) // after the health answer and before the facts
		f.must(t, f.Remove("a", time.Minute))
		time.Sleep(20 * time.Second)
		if a.State() != Draining {
			t.Errorf("state %v", a.State())
		}
		f.become(a, Ready)
		if a.State() != Draining {
			t.Errorf("state %v", a.State())
		}
		h.Drop()
	})
}

// TestDrainingIsFetchedFrom: an instance stays as long as an engine may fetch KV from it,
// even without load.
func TestDrainingIsFetchedFrom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Add(f.spec("a", "prefill", "fake")))
		f.start(t)
		a := f.get(t, "a")
		a.Pin()
		f.must(t, f.Remove("a", time.Minute))
		time.Sleep(20 * time.Second)
		if a.Gone() {
			t.Error("the instance left before decode has its KV")
		}
		a.Unpin()
		time.Sleep(time.Second)
		if !a.Gone() {
			t.Error("the instance stays although no decode needs its KV")
		}
	})
}

// TestRunWaits: Run returns after all its probers have returned, also while an instance
// drains. Run may be called again.
func TestRunWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake"), f.spec("b", "both", "fake")}, 0))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); f.Run(ctx) }()
		synctest.Wait()
		h := f.get(t, "a").Load[0].Hold(1)
		defer h.Drop()
		f.must(t, f.Remove("a", time.Hour))
		time.Sleep(time.Second)
		cancel()
		<-done
		n := f.engines.count("b:80/live")
		time.Sleep(time.Minute)
		if f.engines.count("b:80/live") != n {
			t.Error("a prober outlived Run")
		}
		f.Close()
		if f.get(t, "b").Client.(*fakeClient).closes() != 1 {
			t.Error("Close left a client open")
		}
	})
}

// TestRegistryHammer: many simultaneous reloads, while load changes.
func TestRegistryHammer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.start(t)
		var wg sync.WaitGroup
		for g := range 4 {
			wg.Go(func() {
				source := fmt.Sprint("s", g)
				for n := range 40 {
					var specs []config.Engine
					for k := range n % 4 {
						spec := f.spec(fmt.Sprintf("e%d-%d", g, k), []string{"prefill", "decode", "both"}[k%3], "fake")
						spec.Ranks = 1 + n%2
						specs = append(specs, spec)
					}
					if err := f.Apply(source, specs, 0); err != nil {
						t.Error(err)
					}
					for _, i := range f.Snapshot().Instances {
						h := i.Load[0].Hold(1)
						f.Pair(Target{Instance: i}, Target{Instance: i}).Failure("x")
						h.Drop()
					}
				}
				if err := f.Apply(source, nil, 0); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		time.Sleep(drainPoll)
		synctest.Wait()
		if got := f.names(); got != "" {
			t.Errorf("instances remain: %s", got)
		}
		if n := len(f.Pairs()); n != 0 {
			t.Errorf("%d pairs of instances that have left remain", n)
		}
	})
}

func TestSmallTexts(t *testing.T) {
	for s, want := range map[State]string{Down: "down", Ready: "ready", Unhealthy: "unhealthy", Draining: "draining"} {
		if s.String() != want {
			t.Errorf("%d is %q", s, s)
		}
	}
	var none Target
	if !none.IsZero() || none.Name() != "" {
		t.Error("the zero Target is a target")
	}
	some := Target{Instance: &Instance{Spec: config.Engine{Name: "a"}, Role: abi.RoleBoth}}
	if some.IsZero() || some.Name() != "a" || some.Facts() == nil {
		t.Error("got an empty target")
	}
}

// TestApplyBoundsRanks: the ranks of all instances together are bounded. Each has memory here and
// a slot in the KV index, a mirror refuses a registry with more, and a record in a store of
// engines may name any number.
func TestApplyBoundsRanks(t *testing.T) {
	f := newFleet(t)
	huge := f.spec("huge", "decode", "fake")
	for _, huge.Ranks = range []int{maxRanks + 1, 1 << 40, math.MaxInt} {
		var refused *SpecError
		if err := f.Apply(SourceStatic, []config.Engine{f.spec("a", "decode", "fake"), huge}, 0); !errors.As(err, &refused) || refused.Name != "huge" {
			t.Errorf("%d ranks: %v", huge.Ranks, err)
		}
	}
	half, more, rest := f.spec("half", "decode", "fake"), f.spec("more", "decode", "fake"), f.spec("rest", "decode", "fake")
	half.Ranks, more.Ranks, rest.Ranks = maxRanks/2, maxRanks/2+1, maxRanks/2
	var refused *SpecError
	if err := f.Apply("etcd", []config.Engine{half, more}, 0); !errors.As(err, &refused) || refused.Name != "more" {
		t.Errorf("more ranks than a mirror takes: %v", err)
	}
	f.must(t, f.Apply("etcd", []config.Engine{half, rest}, 0))
	if err := f.Add(f.spec("added", "decode", "fake")); err == nil {
		t.Error("one engine more was added")
	}
	var h hearing
	imports(t, mirrorOf(f, &h), f.Registry)
}
