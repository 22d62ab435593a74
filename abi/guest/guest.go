// Package guest is what the author of a policy in Go imports. A module
// registers its policies in init functions, and the package exports the hooks:
//
//	package main
//
//	import (
//		"github.com/pdproxy/pdproxy/abi"
//		"github.com/pdproxy/pdproxy/abi/guest"
//	)
//
//	func init() {
//		guest.Place("first", func(f *abi.PlaceFacts) abi.PlaceDecision {
//			return abi.PlaceDecision{Prefill: 0, Decode: 1}
//		})
//	}
//
//	func main() {}
//
// It is built with
//
//	GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared -o first.wasm
//
// and compiles natively too, for tests. Facts and what they point to are good
// during the call only; nothing here allocates while a policy decides. The state
// of the module is in package variables, for a guest's exports are functions and
// its host calls one at a time.
//
// Marker, allocator and configuration callbacks of proxy-wasm are exported too.
// A module that has them from another SDK, because it is a filter as well, is
// built with -tags pdproxy_sdk and hands over its configuration with Configured.
package guest

import "github.com/pdproxy/pdproxy/abi"

// policies are those of one hook, in the order of their registration.
type policies[F any] struct {
	names []string
	funcs []F
}

func (p *policies[F]) add(name string, f F) {
	p.names = append(p.names, name)
	p.funcs = append(p.funcs, f)
}

var (
	plans    policies[func(*abi.PlanFacts) abi.PlanAnswer]
	places   policies[func(*abi.PlaceFacts) abi.PlaceDecision]
	mints    policies[func(*abi.MintFacts) uint64]
	legs     policies[func(*abi.LegFacts, *abi.Edits) abi.LegDecision]
	finishes policies[func(*abi.FinishFacts)]
	needs    abi.Needs
	config   string
	onConfig func(config string) bool
)

// Plan registers a plan policy. The proxy's configuration calls it plugin/name.
// That holds for the policies of the other hooks too; a name has no white space,
// and one may serve several hooks.
func Plan(name string, policy func(*abi.PlanFacts) abi.PlanAnswer) { plans.add(name, policy) }

// Place registers a place policy.
func Place(name string, policy func(*abi.PlaceFacts) abi.PlaceDecision) { places.add(name, policy) }

// Mint registers a mint policy. It answers 0 when it has no id to give.
func Mint(name string, policy func(*abi.MintFacts) uint64) { mints.add(name, policy) }

// Leg registers a leg policy. Its edits count when it answers abi.LegEdited.
func Leg(name string, policy func(*abi.LegFacts, *abi.Edits) abi.LegDecision) {
	legs.add(name, policy)
}

// Finish registers a finish policy.
func Finish(name string, policy func(*abi.FinishFacts)) { finishes.add(name, policy) }

// Need asks for facts beyond those that are always there.
func Need(n abi.Needs) { needs |= n }

// OnConfigure registers what is called with the plugin's configuration text at
// its start, before any policy; false refuses it, and the plugin is not used.
func OnConfigure(f func(config string) bool) { onConfig = f }

// Config returns the plugin's configuration text; "" before it is known.
func Config() string { return config }

// Configured hands over the configuration text. Only a module that is built with
// another SDK calls it.
func Configured(text string) (ok bool) {
	config = text
	return onConfig == nil || onConfig(text)
}

// list returns the policies of the module, one a line, as "place name".
func list() string {
	text := ""
	for h := abi.HookPlan; h <= abi.HookFinish; h++ {
		for _, name := range namesOf(h) {
			text += h.String() + " " + name + "\n"
		}
	}
	return text
}

func namesOf(h abi.Hook) []string {
	switch h {
	case abi.HookPlan:
		return plans.names
	case abi.HookPlace:
		return places.names
	case abi.HookMint:
		return mints.names
	case abi.HookLeg:
		return legs.names
	}
	return finishes.names
}
