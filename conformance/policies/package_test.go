package policies

import (
	"context"
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// TestGuestPackage runs a guest that uses all of abi/guest in the host: alone, and with the
// callbacks and the allocator of another SDK.
func TestGuestPackage(t *testing.T) {
	t.Run("alone", func(t *testing.T) { testGuestPackage(t, buildGo(t, "testdata/guest")) })
	t.Run("with another SDK", func(t *testing.T) { testGuestPackage(t, buildGo(t, "testdata/guest", "pdproxy_sdk")) })
}

func testGuestPackage(t *testing.T, wasm []byte) {
	w := &world{config: "some text"}
	var lines []string
	w.log = func(m string) { lines = append(lines, m) }
	g := start(t, wasm, w)
	if g.needs != abi.NeedPrompt || !slices.Equal(g.names[abi.HookPlace], []string{"scored"}) || len(g.names[abi.HookPlan]) != 0 {
		t.Errorf("needs %v, policies %v", g.needs.Names(), g.names)
	}

	f := busy(8)
	f.Request.Prompt = `"hello"`
	f.Pairs = []abi.Pair{{Prefill: 1}, {Decode: 3}}
	if d := g.place(&abi.Header{}, f); d != (abi.PlaceDecision{Prefill: -1, Decode: 2}) {
		t.Errorf("decision %+v", d)
	}
	if !f.Scored || f.Candidates[3].Score != float32(f.Candidates[3].Tokens)/2 {
		t.Errorf("scores %+v", f.Candidates)
	}
	if !slices.Equal(w.notes, []string{`"hello"`}) {
		t.Errorf("notes %q", w.notes)
	}

	view, ptr := g.scratch()
	frame := abi.AppendLeg(view, &abi.Header{}, &abi.LegFacts{Request: f.Request, Engine: "d0"})
	if d, ok := abi.UnpackLeg(g.call(abi.HookLeg, ptr, frame), abi.LegSend); d != abi.LegEdited || !ok {
		t.Fatalf("leg: %d", d)
	}
	view, _ = g.scratch()
	at, size := abi.EditsOf(view[:cap(view)])
	if at < len(frame) {
		t.Fatalf("edits at %d of a frame of %d bytes", at, len(frame))
	}
	var edits []abi.Edit
	for list := view[at : at+size]; len(list) > 0; {
		e, rest, ok := abi.NextEdit(list)
		if !ok {
			t.Fatalf("edits % x", list)
		}
		edits, list = append(edits, e), rest
	}
	if want := []abi.Edit{{Op: abi.EditSetField, Name: "priority", Value: "1"}, {Op: abi.EditRemoveHeader, Name: "x-engine"}}; !slices.Equal(edits, want) {
		t.Errorf("edits %+v", edits)
	}
	view, ptr = g.scratch()
	if d := g.call(abi.HookLeg, ptr, abi.AppendLeg(view, &abi.Header{}, &abi.LegFacts{Event: abi.LegFailed})); d != uint64(abi.LegPlaceAgain) {
		t.Errorf("leg that failed: %d", d)
	}
	view, ptr = g.scratch()
	g.call(abi.HookFinish, ptr, abi.AppendFinish(view, &abi.Header{}, &abi.FinishFacts{Reason: "timeout"}))
	if want := []string{"configured with some text", "finished: timeout"}; !slices.Equal(lines, want) {
		t.Errorf("log %q", lines)
	}
}

// TestGuestGrowsItsScratch: a frame larger than the scratch buffer gets a
// larger buffer, and the policies continue as before.
func TestGuestGrowsItsScratch(t *testing.T) {
	for _, e := range examples() {
		t.Run(e.language, func(t *testing.T) {
			g := run(t, e.prebuilt(t))
			for _, rows := range []int{64, 1600, 64} {
				f := busy(rows)
				view, ptr, err := g.vm.Scratch(context.Background(), uint32(f.FrameSize(&abi.Layout{})))
				if err != nil {
					t.Fatal(err)
				}
				v := g.call(abi.HookPlace, ptr, abi.AppendPlace(view[:0], &abi.Header{}, f))
				if d := abi.UnpackPlace(v); d.Prefill != 0 || int(d.Decode) < rows/2 {
					t.Errorf("%d rows: %+v", rows, d)
				}
			}
		})
	}
}
