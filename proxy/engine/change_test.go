package engine

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestChangesShareSnapshots: when many instances become ready at once, there are far fewer
// snapshots than instances, and each caller finds its instance in the snapshot.
func TestChangesShareSnapshots(t *testing.T) {
	const n = 2000
	f := newFleet(t)
	var specs []config.Engine
	for k := range n {
		specs = append(specs, config.Engine{Name: fmt.Sprint("e", k), URL: "http://e", Role: "both", Connector: "none", Model: "m", Ranks: 1})
	}
	if err := f.Apply(SourceStatic, specs, 0); err != nil {
		t.Fatal(err)
	}
	var (
		running   sync.WaitGroup
		mu        sync.Mutex
		snapshots = map[*Snapshot]bool{}
	)
	for _, i := range f.Snapshot().Instances {
		running.Go(func() {
			f.become(i, Ready)
			s := f.Snapshot()
			if p, ok := s.Pool("m"); !ok || !slices.ContainsFunc(p.Ready, func(r Row) bool { return r.Instance == i }) {
				t.Errorf("%s is not in the snapshot", i.Spec.Name)
			}
			mu.Lock()
			snapshots[s] = true
			mu.Unlock()
		})
	}
	running.Wait()
	if len(snapshots) > n/4 {
		t.Errorf("%d snapshots for %d instances", len(snapshots), n)
	}
	f.Settle()
	if p, _ := f.Snapshot().Pool("m"); len(p.Ready) != n {
		t.Errorf("%d of %d instances are in the snapshot", len(p.Ready), n)
	}
}

// slowProtocol makes each snapshot take a time.
type slowProtocol struct {
	fakeProtocol
	takes *time.Duration
}

func (s slowProtocol) BothPairs() bool {
	time.Sleep(*s.takes)
	return true
}

// TestChangeAfterLongSnapshot: a snapshot that took long delays the next change by a second at most. No
// request is sent to a failed engine for longer.
func TestChangeAfterLongSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, takes := newFleet(t), time.Duration(0)
		f.o.Protocols = func(string) (Protocol, bool) {
			return slowProtocol{fakeProtocol{flow: abi.FlowPrefillFirst, health: "/live"}, &takes}, true
		}
		f.must(t, f.Apply(SourceStatic, []config.Engine{{Name: "e", URL: "http://e", Role: "both", Connector: "slow", Model: "m", Ranks: 1}}, 0))
		takes = 3 * time.Second
		f.become(f.get(t, "e"), Ready)
		takes = 0
		began := time.Now()
		f.become(f.get(t, "e"), Unhealthy)
		if took := time.Since(began); took > time.Second {
			t.Errorf("the change took %v", took)
		}
	})
}

// TestProbesSpread: the probes of many instances that came together are not at the same time.
func TestProbesSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		var specs []config.Engine
		for k := range spreadFrom {
			specs = append(specs, f.spec(fmt.Sprint("e", k), "both", "none"))
		}
		f.must(t, f.Apply(SourceStatic, specs, 0))
		f.start(t)
		probes := func() (n int) {
			for k := range spreadFrom {
				n += f.engines.count(fmt.Sprintf("e%d:80/live", k))
			}
			return n
		}
		most, before := 0, probes()
		for range 40 { // two intervals
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
			now := probes()
			most, before = max(most, now-before), now
		}
		if most > spreadFrom/4 || before < 2*spreadFrom {
			t.Errorf("%d of %d probes are within 100 ms", most, before)
		}
	})
}
