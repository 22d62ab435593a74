package engine

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// TestSleepMode: one caller changes the sleep mode of an instance at a time. Reports from before the
// end of a change do not count. The blocks of an engine that fell asleep leave the index, and its
// kept KV counts as lost.
func TestSleepMode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		index := kvindex.New(kvindex.Options{})
		f.o.Index = index
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("a", "both", "fake")}, 0))
		f.start(t)
		i := f.get(t, "a")
		index.Store(i.KV[0], kvindex.GPU, kvindex.AppendTokens(nil, kvindex.Seed("m", "", ""), []uint32{1, 2}, 2))
		report := func(asleep bool, asked time.Time) {
			f.ReportSleep(i, SleepReport{Known: true, Ranks: []bool{asleep}}, asked)
		}
		want := func(when, shown string, blocks int, ready bool) {
			t.Helper()
			if n := index.Stats().Entries; i.Shown() != shown || n != blocks || f.Snapshot().Ready() != ready {
				t.Errorf("%s: %s with %d blocks, ready %t; want %s with %d blocks, ready %t", when, i.Shown(), n, f.Snapshot().Ready(), shown, blocks, ready)
			}
		}
		since := i.Since()
		time.Sleep(time.Second)
		if f.BeginWake(i) {
			t.Error("an engine that is awake is woken")
		}
		asked := time.Now()
		if !f.BeginSleep(i) || f.BeginSleep(i) || f.BeginWake(i) {
			t.Error("the sleep mode is changed twice at once")
		}
		want("before it falls asleep", "asleep", 1, false)
		report(false, time.Now())
		want("a report meanwhile", "asleep", 1, false)
		time.Sleep(time.Second)
		f.EndSleep(i, true)
		want("asleep", "asleep", 0, false)
		if i.Since().Equal(since) {
			t.Error("KV that the engine kept counts as valid")
		}
		report(false, asked)
		want("a report from before", "asleep", 0, false)
		f.SetWakes(true)
		want("requests wake engines", "asleep", 0, true)
		if !f.BeginWake(i) || f.BeginWake(i) || f.BeginSleep(i) {
			t.Error("the sleep mode is changed twice at once")
		}
		want("it wakes", "waking", 0, true)
		f.EndWake(i, false)
		want("it did not wake", "asleep", 0, true)
		f.BeginWake(i)
		f.EndWake(i, true)
		want("awake", "ready", 0, true)
		f.BeginSleep(i)
		f.EndSleep(i, false)
		want("it did not fall asleep", "ready", 0, true)
		time.Sleep(time.Second)
		report(true, time.Now())
		want("somebody put it to sleep", "asleep", 0, true)
		f.BeginWake(i)
		f.restarted(i)
		f.EndWake(i, false)
		want("restarted in the middle of the change", "ready", 0, true)
	})
}
