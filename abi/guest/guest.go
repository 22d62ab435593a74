// Package guest is for authors of policies in Go. A module registers its
// policies in init functions, and the package exports the hooks:
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
// and compiles natively too, for tests. The facts, and the memory that they
// point to, are valid only during the call. The package does not allocate while
// a policy decides. The state of the module is in package variables, because a
// guest's exports are functions and the host makes one call at a time.
//
// The package also exports marker, allocator and configuration callbacks of
// proxy-wasm. A module that gets them from another SDK, because it is a filter
// as well, is built with -tags pdproxy_sdk and passes its configuration to
// Configured.
//
// The decisions behind this package are in docs/design/plugins.md.
package guest

import (
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
)

// policies are the policies of one hook, in the order of their registration.
type policies[F any] struct {
	names []string
	funcs []F
	needs []abi.Needs
}

func (p *policies[F]) add(name string, f F, needs []abi.Needs) {
	var all abi.Needs
	for _, n := range needs {
		all |= n
	}
	p.names = append(p.names, name)
	p.funcs = append(p.funcs, f)
	p.needs = append(p.needs, all)
}

var (
	plans    policies[func(*abi.PlanFacts) abi.PlanAnswer]
	places   policies[func(*abi.PlaceFacts) abi.PlaceDecision]
	mints    policies[func(*abi.MintFacts) uint64]
	legs     policies[func(*abi.LegFacts, *abi.Edits) abi.LegDecision]
	finishes policies[func(*abi.FinishFacts)]
	retains  policies[func(*abi.RetainFacts) abi.RetainDecision]
	scorers  policies[func(*abi.ScoreFacts, *abi.Scores)]
	evicts   policies[func(*abi.EvictFacts) int32]
	needs    abi.Needs
	headers  []string
	config   string
	onConfig func(config string) bool
)

// Plan registers a plan policy. The proxy's configuration calls it plugin/name,
// as the policies of the other hooks. A name has no white space; policies of
// several hooks may share a name. The needs are additional facts that this
// policy uses: the proxy computes them while the policy is in use.
func Plan(name string, policy func(*abi.PlanFacts) abi.PlanAnswer, needs ...abi.Needs) {
	plans.add(name, policy, needs)
}

// Place registers a place policy.
func Place(name string, policy func(*abi.PlaceFacts) abi.PlaceDecision, needs ...abi.Needs) {
	places.add(name, policy, needs)
}

// PlaceNeeds replaces the needs of the place policies of that name, for a policy
// whose configuration decides about its needs. Only a function that OnConfigure
// registers may call it: the host reads the needs after that.
func PlaceNeeds(name string, needs abi.Needs) {
	for i := range places.names {
		if places.names[i] == name {
			places.needs[i] = needs
		}
	}
}

// Mint registers a mint policy. The policy returns 0 when it has no id to give.
func Mint(name string, policy func(*abi.MintFacts) uint64, needs ...abi.Needs) {
	mints.add(name, policy, needs)
}

// Leg registers a leg policy. Its edits count when it answers abi.LegEdited.
func Leg(name string, policy func(*abi.LegFacts, *abi.Edits) abi.LegDecision, needs ...abi.Needs) {
	legs.add(name, policy, needs)
}

// Finish registers a finish policy.
func Finish(name string, policy func(*abi.FinishFacts), needs ...abi.Needs) {
	finishes.add(name, policy, needs)
}

// Retain registers a retain policy.
func Retain(name string, policy func(*abi.RetainFacts) abi.RetainDecision, needs ...abi.Needs) {
	retains.add(name, policy, needs)
}

// Score registers a scorer for policy.place = "scores". It writes a score for each open candidate of
// the leg.
func Score(name string, scorer func(*abi.ScoreFacts, *abi.Scores), needs ...abi.Needs) {
	scorers.add(name, scorer, needs)
}

// Evict registers an evict policy. It returns a row of Running, or abi.EvictNone.
func Evict(name string, policy func(*abi.EvictFacts) int32, needs ...abi.Needs) {
	evicts.add(name, policy, needs)
}

// Need requests additional facts for all policies of the module.
func Need(n abi.Needs) { needs |= n }

// Headers declares the names of the request headers that the policies with abi.NeedHeaders
// get, at most abi.MaxHeaders for the module. RequestFacts.Header returns their values. The
// proxy refuses a module that declares a header with credentials.
func Headers(names ...string) {
	for _, name := range names {
		headers = append(headers, strings.ToLower(name))
	}
}

// OnConfigure registers a function that receives the plugin's configuration
// text at its start, before any policy runs. When f returns false, the start
// fails and the proxy does not use the plugin.
func OnConfigure(f func(config string) bool) { onConfig = f }

// Config returns the plugin's configuration text, or "" before the host has
// passed it.
func Config() string { return config }

// Configured passes the configuration text to the package. Only a module that
// is built with another SDK calls it.
func Configured(text string) (ok bool) {
	config = text
	return onConfig == nil || onConfig(text)
}

// list returns the policies of the module, one a line, as "place name".
func list() string {
	text := ""
	for h := abi.HookPlan; h <= abi.LastHook; h++ {
		names, _ := listed(h)
		for _, name := range names {
			text += h.String() + " " + name + "\n"
		}
	}
	return text
}

// listNeeds returns the policies that have needs of their own, one a line, as
// "place name 6".
func listNeeds() string {
	text := ""
	for h := abi.HookPlan; h <= abi.LastHook; h++ {
		names, needs := listed(h)
		for i, n := range needs {
			if n != 0 {
				text += h.String() + " " + names[i] + " " + strconv.FormatUint(uint64(n), 10) + "\n"
			}
		}
	}
	return text
}

// listed returns the names of a hook's policies and the needs of each.
func listed(h abi.Hook) ([]string, []abi.Needs) {
	switch h {
	case abi.HookPlan:
		return plans.names, plans.needs
	case abi.HookPlace:
		return places.names, places.needs
	case abi.HookMint:
		return mints.names, mints.needs
	case abi.HookLeg:
		return legs.names, legs.needs
	case abi.HookRetain:
		return retains.names, retains.needs
	case abi.HookScore:
		return scorers.names, scorers.needs
	case abi.HookEvict:
		return evicts.names, evicts.needs
	}
	return finishes.names, finishes.needs
}
