// Package policies is the built-in policies as the proxy uses them: decisions
// written in plain Go, one folder each, that run as WebAssembly or, through
// Native, compiled in. They import nothing of the proxy but the contract, are
// pure functions of their facts and parameters, and do not allocate while they
// decide.
package policies

import (
	"cmp"
	"fmt"
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

// Params is the parameters that are set, by policy and name, as the tables
// [policy.params.NAME] of the configuration have them. What is not there keeps
// its default.
type Params map[string]map[string]float64

// Text is the parameters as the module of Wasm takes them for its configuration,
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

// Set is the built-in policies with their parameters. It is safe for concurrent
// use.
type Set struct{ all *builtin.Policies }

// New returns the policies with these parameters. The error names what is not
// known or out of its bounds.
func New(p Params) (*Set, error) {
	s := &Set{all: builtin.New()}
	for _, policy := range slices.Sorted(maps.Keys(p)) {
		if s.all.Table(policy) == nil {
			return nil, fmt.Errorf("set parameters: %w", s.all.Set(policy, "", 0))
		}
		for _, name := range slices.Sorted(maps.Keys(p[policy])) {
			if err := s.all.Set(policy, name, p[policy][name]); err != nil {
				return nil, fmt.Errorf("set parameters: %w", err)
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

// Plan returns the plan policy of that name with the defaults of its parameters,
// as Place and Mint do theirs.
func Plan(name string) (Planner, bool) { return defaults().Plan(name) }

// Place returns the place policy of that name.
func Place(name string) (Placer, bool) { return defaults().Place(name) }

// Mint returns the mint policy of that name.
func Mint(name string) (Minter, bool) { return defaults().Mint(name) }

func defaults() *Set { return &Set{all: builtin.New()} }

// Needs is what the policy of that name asks for beyond the usual facts; nothing
// for a name that is not known. No two policies of different hooks share a name.
func Needs(name string) abi.Needs {
	all := builtin.New()
	plan, _ := find(all.Plans(), name)
	place, _ := find(all.Places(), name)
	mint, _ := find(all.Mints(), name)
	return plan.Needs | place.Needs | mint.Needs
}

// PlanNames, PlaceNames and MintNames list the policies of a hook by their names
// in the configuration, in the order in which the module of builtin.wasm has
// them.
func PlanNames() []string { return names(builtin.New().Plans()) }

// PlaceNames lists the place policies.
func PlaceNames() []string { return names(builtin.New().Places()) }

// MintNames lists the mint policies.
func MintNames() []string { return names(builtin.New().Mints()) }

// Param is what is to be known of one parameter of a policy.
type Param struct {
	Policy, Name         string
	Default, Least, Most float64
	Unit                 string // "" for a plain number
	Meaning              string
}

// AllParams lists the parameters of all policies, those of one together.
func AllParams() []Param {
	var list []Param
	all := builtin.New()
	for _, policy := range builtin.Configured() {
		for _, p := range all.Table(policy) {
			list = append(list, Param{policy, p.Name, p.Default, p.Least, p.Most, p.Unit, p.Meaning})
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
