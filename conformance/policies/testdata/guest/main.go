// Command guest uses all of abi/guest, for TestGuestPackage.
package main

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/guest"
)

func init() {
	guest.OnConfigure(func(config string) bool {
		guest.Log(guest.LogWarn, "configured with "+config)
		return config != "bad"
	})
	guest.Need(abi.NeedPrompt)
	guest.Place("scored", func(f *abi.PlaceFacts) abi.PlaceDecision {
		for i := range f.Candidates {
			f.Candidates[i].Score = float32(f.Candidates[i].Tokens) / 2
		}
		f.Scored = true
		guest.Foreign(abi.ForeignNote, []byte(f.Request.Prompt))
		if _, status := guest.Foreign("no.such.function", nil); status != guest.NotFound {
			panic("an unknown foreign function was found")
		}
		if text, status := guest.Foreign("test.echo", []byte(guest.Config())); status != guest.OK || string(text) != guest.Config() {
			panic("echo answered " + string(text))
		}
		return abi.PlaceDecision{Prefill: -1, Decode: int32(len(f.Pairs))}
	})
	guest.Leg("edits", func(f *abi.LegFacts, e *abi.Edits) abi.LegDecision {
		if f.Event == abi.LegFailed {
			return abi.LegPlaceAgain
		}
		e.SetField("priority", "1")
		e.RemoveHeader("x-" + "engine")
		return abi.LegEdited
	})
	guest.Finish("remembers", func(f *abi.FinishFacts) { guest.Log(guest.LogInfo, "finished: "+f.Reason) })
}

func main() {}
