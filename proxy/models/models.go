// Package models finds the models that serve a request from the name that the client
// requested: aliases, weighted splits and fallbacks of the configuration, and rewrites of
// InferenceModelRewrites.
//
// The decisions behind this package are in docs/design/request.md.
package models

import (
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Table has the names of [[model]] and of rewrites. A nil Table has none. It is immutable and safe
// for concurrent use.
type Table struct {
	routes map[string]*Route
	names  []string // sorted
	any    *Route   // of all other names; nil: they have no route
}

// Rewrite is a rule of an InferenceModelRewrite: the models for one name.
type Rewrite struct {
	Name    string // in requests
	Any     bool   // the rule is for every name, instead of Name
	Targets []RewriteTarget
}

// RewriteTarget is one model of a Rewrite.
type RewriteTarget struct {
	Model  string  // a name of [[model]], or of a model that engines serve
	Weight float64 // above 0
}

// AnyName is the name of the route for every name.
const AnyName = "*"

// Route is the models that serve the requests for one name.
type Route struct {
	name    string
	choices []choice // one at least; those of a split are ordered by name
}

// choice is one model of a split, or the only model.
type choice struct {
	models []string // the model, then its fallbacks
	weight float64  // above 0
	salt   uint64   // of the model, the same in all processes
}

// NewTable returns the table of a valid configuration and of rewrites in order of precedence, nil if
// they name no model. A name of [[model]] has no rewrite.
func NewTable(cfg *config.Config, rewrites []Rewrite) *Table {
	if len(cfg.Models) == 0 && len(rewrites) == 0 {
		return nil
	}
	t := &Table{routes: make(map[string]*Route, len(cfg.Models))}
	for _, m := range cfg.Models {
		t.routes[m.Name] = &Route{name: m.Name, choices: choicesOf(cfg, m.Name)}
	}
	for i := range rewrites {
		switch r := &rewrites[i]; {
		case r.Any && t.any == nil:
			t.any = &Route{name: AnyName, choices: choicesOfTargets(cfg, r)}
		case !r.Any && t.routes[r.Name] == nil:
			t.routes[r.Name] = &Route{name: r.Name, choices: choicesOfTargets(cfg, r)}
		}
	}
	t.names = slices.Sorted(maps.Keys(t.routes))
	return t
}

// choicesOf returns the models that a name leads to, with their fallbacks.
func choicesOf(cfg *config.Config, name string) []choice {
	m := cfg.Model(name)
	if m == nil {
		return []choice{only(name)}
	}
	var list []choice
	switch {
	case m.AliasOf != "":
		list = choicesOf(cfg, m.AliasOf)
	case len(m.Split) == 0:
		list = []choice{only(name)}
	}
	for _, part := range slices.Sorted(maps.Keys(m.Split)) {
		if m.Split[part] == 0 {
			continue
		}
		one := only(part)
		if part != name {
			one = choicesOf(cfg, part)[0] // a split has no split in it
		}
		one.weight = m.Split[part]
		list = add(list, one)
	}
	for i := range list {
		for _, f := range m.Fallback {
			if served := follow(cfg, f); !slices.Contains(list[i].models, served) {
				list[i].models = append(list[i].models, served)
			}
		}
	}
	return list
}

// choicesOfTargets returns the models of a rewrite, with the fallbacks that [[model]] has for them.
// The models of a split share the weight of their target.
func choicesOfTargets(cfg *config.Config, r *Rewrite) (list []choice) {
	for _, target := range r.Targets {
		choices := choicesOf(cfg, target.Model)
		sum := 0.0
		for _, c := range choices {
			sum += c.weight
		}
		for _, c := range choices {
			c.weight *= target.Weight / sum
			list = add(list, c)
		}
	}
	slices.SortFunc(list, func(a, b choice) int { return strings.Compare(a.models[0], b.models[0]) })
	return list
}

// only returns the choice of one model without fallbacks.
func only(model string) choice {
	return choice{models: []string{model}, weight: 1, salt: xxh3.HashString(model)}
}

// follow returns the engines' name of a model that has no split.
func follow(cfg *config.Config, name string) string {
	for m := cfg.Model(name); m != nil && m.AliasOf != ""; m = cfg.Model(name) {
		name = m.AliasOf
	}
	return name
}

// add adds a choice. If two names lead to one model, the model has one choice with the
// weight of both names, and the fallbacks of the first name.
func add(list []choice, one choice) []choice {
	for i := range list {
		if list[i].models[0] == one.models[0] {
			list[i].weight += one.weight
			return list
		}
	}
	return append(list, one)
}

// Route returns the route of a name in a request, nil if the name has none.
func (t *Table) Route(name string) *Route {
	if t == nil {
		return nil
	}
	if r := t.routes[name]; r != nil {
		return r
	}
	return t.any
}

// Merge returns the names that clients may request while these models are served: the
// names of served, which are sorted, and those names of the table that lead to one of them
// or to a remote.
// The result is sorted, and may be served itself.
func (t *Table) Merge(served []string) []string {
	if t == nil {
		return served
	}
	all := slices.Clone(served)
	for _, name := range t.names {
		if r := t.routes[name]; r.LeadsTo(served) || r.leadsAway() {
			all = append(all, name)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Name returns the name in requests, or AnyName.
func (r *Route) Name() string { return r.name }

// Split reports whether the route has several models.
func (r *Route) Split() bool { return len(r.choices) > 1 }

// Models returns the models of the route without fallbacks: one, or those of the split.
func (r *Route) Models() []string {
	var list []string
	for _, c := range r.choices {
		list = append(list, c.models[0])
	}
	return list
}

// ChoiceOf returns the models that Choose returns for the keys of a model; nil if it is none
// of Models.
func (r *Route) ChoiceOf(model string) []string {
	for _, c := range r.choices {
		if c.models[0] == model {
			return c.models
		}
	}
	return nil
}

// LeadsTo reports whether the route has one of the models, also as a fallback. A nil Route has
// none.
func (r *Route) LeadsTo(served []string) bool {
	return r != nil && r.has(func(model string) bool { return slices.Contains(served, model) })
}

// leadsAway reports whether the route has a remote.
func (r *Route) leadsAway() bool {
	return r.has(func(model string) bool { return strings.HasPrefix(model, config.RemotePrefix) })
}

// has reports whether one of the route's models meets the condition.
func (r *Route) has(condition func(model string) bool) bool {
	return slices.ContainsFunc(r.choices, func(c choice) bool { return slices.ContainsFunc(c.models, condition) })
}

// Choose returns the model for a key, which is uniform over the conversations, and then the
// fallbacks of that model. The caller must not change the slice. The same key always gets
// the same model, in every process. When weights change, only those keys
// change their model that the new weights make necessary: weighted rendezvous hashing.
func (r *Route) Choose(key uint64) []string {
	best, least := 0, math.Inf(1)
	if r.Split() {
		for i, c := range r.choices {
			if score := -math.Log(unit(key^c.salt)) / c.weight; score < least {
				best, least = i, score
			}
		}
	}
	return r.choices[best].models
}

// unit maps x to a uniform number between 0 and 1, both excluded. It mixes the bits as
// the finalizer of SplitMix64 does.
func unit(x uint64) float64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	x ^= x >> 31
	return (float64(x>>12) + 0.5) / (1 << 52)
}
