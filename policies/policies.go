// Package policies provides the built-in policies to the proxy. They are
// written in plain Go, one folder each, and run as WebAssembly or, through
// Native, compiled in. They import nothing of the proxy except the contract.
// They are pure functions of their facts and parameters and do not allocate
// while they decide.
package policies

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/builtin"
	"github.com/pdproxy/pdproxy/policies/param"
)

// Planner is a plan policy.
type Planner func(*abi.PlanFacts) abi.PlanDecision

// Placer is a place policy.
type Placer func(*abi.PlaceFacts) abi.PlaceDecision

// Minter is a mint policy.
type Minter func(*abi.MintFacts) uint64

// Retainer is a retain policy.
type Retainer func(*abi.RetainFacts) abi.RetainDecision

// Evictor is an evict policy.
type Evictor func(*abi.EvictFacts) int32

// Params are the configured parameters by policy and name, as in the tables
// [policy.params.NAME] of the configuration. A parameter that is absent keeps
// its default.
type Params map[string]map[string]float64

// Text returns the parameters as the configuration text of the module in Wasm,
// one a line, in the order of their names.
func (p Params) Text() string {
	var b strings.Builder
	for _, policy := range slices.Sorted(maps.Keys(p)) {
		for _, name := range slices.Sorted(maps.Keys(p[policy])) {
			b.WriteString(policy + "." + name + "=" + param.Format(p[policy][name]) + "\n")
		}
	}
	return b.String()
}

// ScorerText returns the configuration text of the module in Wasm that adds these scorers, by their
// IDs of package scorers.
func ScorerText(ids []string) string {
	var b strings.Builder
	for _, id := range ids {
		b.WriteString(builtin.ScorerLine + id + "\n")
	}
	return b.String()
}

// Set holds the built-in policies with their parameters. It is safe for
// concurrent use.
type Set struct{ all *builtin.Policies }

// New returns the policies with these parameters. The error names an unknown
// policy or parameter, or a value out of its bounds.
func New(p Params) (*Set, error) {
	s := &Set{all: builtin.New()}
	for _, policy := range slices.Sorted(maps.Keys(p)) {
		if s.all.Table(policy) == nil {
			return nil, s.all.Set(policy, "", 0)
		}
		for _, name := range slices.Sorted(maps.Keys(p[policy])) {
			if err := s.all.Set(policy, name, p[policy][name]); err != nil {
				return nil, err
			}
		}
	}
	return s, nil
}

// Plan returns the plan policy of that name in the configuration.
func (s *Set) Plan(name string) (Planner, bool) {
	p, ok := find(s.all.Plans(), name)
	return p.Decide, ok
}

// Place returns the place policy of that name in the configuration.
func (s *Set) Place(name string) (Placer, bool) {
	p, ok := find(s.all.Places(), name)
	return p.Decide, ok
}

// Mint returns the mint policy of that name in the configuration.
func (s *Set) Mint(name string) (Minter, bool) {
	p, ok := find(s.all.Mints(), name)
	return p.Decide, ok
}

// Retain returns the retain policy of that name in the configuration.
func (s *Set) Retain(name string) (Retainer, bool) {
	p, ok := find(s.all.Retains(), name)
	return p.Decide, ok
}

// Evict returns the evict policy of that name in the configuration.
func (s *Set) Evict(name string) (Evictor, bool) {
	p, ok := find(s.all.Evicts(), name)
	return p.Decide, ok
}

// Plan returns the plan policy of that name with default parameters. Place, Mint,
// Retain and Evict do the same for their hooks.
func Plan(name string) (Planner, bool) { return defaults().Plan(name) }

// Place returns the place policy of that name.
func Place(name string) (Placer, bool) { return defaults().Place(name) }

// Mint returns the mint policy of that name.
func Mint(name string) (Minter, bool) { return defaults().Mint(name) }

// Retain returns the retain policy of that name.
func Retain(name string) (Retainer, bool) { return defaults().Retain(name) }

// Evict returns the evict policy of that name.
func Evict(name string) (Evictor, bool) { return defaults().Evict(name) }

// Needs returns the needs of the policy of that name with default parameters.
func Needs(name string) abi.Needs { return defaults().Needs(name) }

func defaults() *Set { return &Set{all: builtin.New()} }

// Needs returns the additional facts that the policy of that name needs with the
// parameters of s, none for an unknown name. No two policies of different hooks
// share a name.
func (s *Set) Needs(name string) abi.Needs {
	plan, _ := find(s.all.Plans(), name)
	place, _ := find(s.all.Places(), name)
	mint, _ := find(s.all.Mints(), name)
	retain, _ := find(s.all.Retains(), name)
	evict, _ := find(s.all.Evicts(), name)
	return plan.Needs | place.Needs | mint.Needs | retain.Needs | evict.Needs
}

// PlanNames lists the names of the plan policies in the configuration, in the
// order of the module of builtin.wasm.
func PlanNames() []string { return names(builtin.New().Plans()) }

// PlaceNames lists the names of the place policies, as PlanNames.
func PlaceNames() []string { return names(builtin.New().Places()) }

// MintNames lists the names of the mint policies, as PlanNames.
func MintNames() []string { return names(builtin.New().Mints()) }

// RetainNames lists the names of the retain policies, as PlanNames.
func RetainNames() []string { return names(builtin.New().Retains()) }

// EvictNames lists the names of the evict policies, as PlanNames.
func EvictNames() []string { return names(builtin.New().Evicts()) }

// Param describes one parameter of a policy.
type Param struct {
	Policy, Name         string
	Default, Least, Most float64
	Unit                 string // "" for a plain number
	Meaning              string
}

// AllParams lists the parameters of all policies, grouped by policy.
func AllParams() []Param {
	var list []Param
	all := builtin.New()
	for _, policy := range builtin.Configured() {
		for _, p := range all.Table(policy) {
			list = append(list, Param{policy, p.Key(), p.Default, p.Least, p.Most, p.Unit, p.Meaning})
		}
	}
	slices.SortStableFunc(list, func(a, b Param) int { return cmp.Compare(a.Policy, b.Policy) })
	return list
}

func find[F any](list []builtin.Policy[F], name string) (builtin.Policy[F], bool) {
	for _, p := range list {
		if p.Name == name {
			return p, true
		}
	}
	return builtin.Policy[F]{}, false
}

func names[F any](list []builtin.Policy[F]) []string {
	var names []string
	for _, p := range list {
		names = append(names, p.Name)
	}
	return names
}
