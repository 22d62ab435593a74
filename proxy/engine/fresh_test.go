package engine

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// TestClaimFresh: each new pair is claimed once, or again if it is still new later. A
// pair is never claimed while one of its engines has a request.
func TestClaimFresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		p := f.spec("p", "prefill", "fake")
		p.Ranks = 2
		f.must(t, f.Apply(SourceStatic, []config.Engine{
			p, f.spec("d", "decode", "fake"), f.spec("e", "decode", "fake"), f.spec("n", "both", "none"),
		}, 0))
		f.start(t)
		free := func(i *Instance) bool { return i.Free(time.Now()) }
		claim := func() string {
			model, pair := f.ClaimFresh(time.Now(), nil, free)
			if pair == nil {
				return ""
			}
			pair.Tried(false)
			return model + " " + pair.Prefill.Name() + string(rune('0'+pair.Prefill.Rank)) + pair.Decode.Name()
		}
		want := func(all ...string) {
			t.Helper()
			for _, w := range all {
				if got := claim(); got != w {
					t.Errorf("claimed %q, want %q", got, w)
				}
			}
		}
		hold := f.get(t, "d").Load[0].Hold(1)
		want("m p0e", "m p1e", "")
		hold.Drop()
		foreign := &f.get(t, "p").Load[1]
		foreign.Report(load.Report{At: time.Now(), Every: time.Second, Running: 1}, foreign.Mark())
		want("")
		foreign.Forget()
		want("m p0d", "m p1d", "")

		f.Pair(Target{Instance: f.get(t, "p")}, Target{Instance: f.get(t, "d")}).Success()
		f.Pair(Target{Instance: f.get(t, "p"), Rank: 1}, Target{Instance: f.get(t, "e")}).Begin()
		time.Sleep(warmAgain - time.Millisecond)
		want("")
		time.Sleep(time.Millisecond)
		want("m p0e", "m p1d", "")
		time.Sleep(warmAgain)
		want("")
		time.Sleep(warmAgain)
		want("m p0e", "m p1d", "")
	})
}

// TestClaimFreshAtHome: the sidecar of an engine warms up only the pairs of this engine.
func TestClaimFreshAtHome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Apply(SourceStatic, []config.Engine{
			f.spec("p", "prefill", "fake"), f.spec("q", "prefill", "fake"), f.spec("d", "decode", "fake"), f.spec("e", "decode", "fake"),
		}, 0))
		f.start(t)
		for _, want := range []string{"pe", "qe", ""} {
			_, pair := f.ClaimFresh(time.Now(), f.get(t, "e"), func(*Instance) bool { return true })
			got := ""
			if pair != nil {
				got = pair.Prefill.Name() + pair.Decode.Name()
			}
			if got != want {
				t.Errorf("claimed %q, want %q", got, want)
			}
		}
	})
}
