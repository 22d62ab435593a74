package coordinator_test

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/state/mediacache"
)

// TestMedia: a policy that needs media learns how many of a request's media each target was lately
// sent. Only the target that computes the prompt is sent media.
func TestMedia(t *testing.T) {
	w := newWorld(t, "p0 prefill two 2", "d0 decode", "b0 both one")
	p0, b0 := w.Target(t, "p0", 1), w.Target(t, "b0", 0)
	seen := map[uint32]string{}
	stub := placetest.Stub{Wants: abi.NeedMedia, OnPlace: func(f *abi.PlaceFacts) (d abi.PlaceDecision, policy string, ok bool) {
		clear(seen)
		d.Prefill = -1
		for i := range f.Candidates {
			c := &f.Candidates[i]
			seen[c.Instance<<8|uint32(c.Rank)] = string([]byte{'0' + c.MediaSent, '/', '0' + c.Media})
			switch {
			case f.Flow == abi.FlowAggregated, c.Roles == abi.RoleDecode:
				d.Decode = int32(i)
			case c.Instance == p0.ID && c.Rank == 1:
				d.Prefill = int32(i)
			}
		}
		return d, "stub", true
	}}
	for _, tt := range []struct {
		name  string
		needs abi.Needs
		whole bool // aggregated
		media []mediacache.Hash
		want  map[string]string // by engine and rank
	}{
		{"nothing is known", abi.NeedMedia, false, []mediacache.Hash{1, 2}, map[string]string{"p00": "0/2", "p01": "0/2", "d00": "0/2"}},
		{"one of two", abi.NeedMedia, false, []mediacache.Hash{2, 3}, map[string]string{"p00": "0/2", "p01": "1/2", "d00": "0/2"}},
		{"all", abi.NeedMedia, false, []mediacache.Hash{1, 2, 3}, map[string]string{"p00": "0/3", "p01": "3/3", "d00": "0/3"}},
		{"none", abi.NeedMedia, false, nil, map[string]string{"p00": "0/0", "p01": "0/0", "d00": "0/0"}},
		{"without the need", 0, false, []mediacache.Hash{1}, map[string]string{"p00": "0/0", "p01": "0/0", "d00": "0/0"}},
		{"aggregated", abi.NeedMedia, true, []mediacache.Hash{1}, map[string]string{"b00": "0/1"}},
		{"aggregated again", abi.NeedMedia, true, []mediacache.Hash{1, 2}, map[string]string{"b00": "1/2"}},
	} {
		stub.Wants = tt.needs
		w.SetDecider(stub)
		a := placetest.NewPlacementRequest()
		a.Key.Media, a.Request.PairBroken = tt.media, tt.whole
		p := w.Must(t, a)
		p.Lease.Release()
		if p.Prefill.Instance != nil && p.Prefill != p0 || tt.whole && p.Decode != b0 {
			t.Fatalf("%s: placed on %v and %v", tt.name, p.Prefill, p.Decode)
		}
		for _, target := range []string{"p00", "p01", "d00", "b00"} {
			i := w.Target(t, target[:2], int(target[2]-'0'))
			if got := seen[i.ID<<8|uint32(i.Rank)]; got != tt.want[target] {
				t.Errorf("%s: %s has %q of the media, want %q", tt.name, target, got, tt.want[target])
			}
		}
	}
	w.Idle(t)
}

// TestMediaOfTheFallback: the target that the native rule chooses is sent the media, too.
func TestMediaOfTheFallback(t *testing.T) {
	w := newWorld(t, "p0 prefill", "d0 decode")
	w.SetDecider(placetest.Stub{Wants: abi.NeedMedia, OnPlace: func(*abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
		return abi.PlaceDecision{}, coordinator.ReasonTrap, false
	}})
	a := placetest.NewPlacementRequest()
	a.Key.Media = []mediacache.Hash{1}
	p := w.Must(t, a)
	p.Lease.Release()
	if n := p.Prefill.Media[0].Count(a.Key.Media); n != 1 {
		t.Errorf("%d media", n)
	}
}
