package plugins

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/plugins/policy"
)

// table holds everything that serves at one moment. It is replaced as a whole
// and never changed.
type table struct {
	config  *Config
	plugins []*plugin // as in config
	builtin *plugin   // the built-in policies as WebAssembly; nil when they are not used

	canaries []canary // they serve next to their predecessors in plugins

	plan   []planner
	place  placer     // zero if scores place
	scores []scoreSet // empty if place does
	mint   minter
	retain retainer
	evict  evictor          // zero: none
	legs   []*policy.Policy // in the order of the configuration
	finish []*policy.Policy

	needs   abi.Needs // of all policies in use and of their canaries
	headers []string  // that these policies get, each once
}

// decider is one policy, in WebAssembly or compiled in.
type decider[F, A any] struct {
	wasm   *policy.Policy // nil: native
	native func(F) A
	needs  abi.Needs // of this policy, in addition to those of its module
	*compiledIn
}

type (
	planner = decider[*abi.PlanFacts, abi.PlanDecision]
	placer  = decider[*abi.PlaceFacts, abi.PlaceDecision]
	minter  = decider[*abi.MintFacts, uint64]

	retainer = decider[*abi.RetainFacts, abi.RetainDecision]
	evictor  = decider[*abi.EvictFacts, int32]
)

// decide calls the compiled-in policy.
func (d *decider[F, A]) decide(f F) A {
	began := time.Now()
	a := d.native(f)
	d.observe(began)
	return a
}

// observe counts a call that began at that time.
func (c *compiledIn) observe(began time.Time) {
	took := time.Since(began)
	c.calls.Observe(took)
	c.meter.Observe(took)
}

// compiledIn is the name of a policy that runs natively, and the figures of its
// calls.
type compiledIn struct {
	name  string
	calls policy.Calls
	meter policy.Meter
}

// resolve finds the policies that the configuration names among the loaded ones.
func (s *Set) resolve(t *table) error {
	c := t.config
	t.plan, t.legs, t.finish = nil, nil, nil
	for i, name := range c.Plan {
		p, err := find(s, t, abi.HookPlan, name, c.Natives.Plan)
		switch {
		case err == nil:
			t.plan = append(t.plan, p)
		case i < len(c.Plan)-1: // the last one is policy.plan
			return Errors{{Key: fmt.Sprintf("policy.order[%d]", i), Err: err}}
		default:
			return Errors{{Key: "policy.plan", Err: err}}
		}
	}
	if err := s.resolveSingle(t); err != nil {
		return err
	}
	t.headers = nil
	t.declare(t.place.wasm)
	t.needs = t.place.needs | t.mint.needs
	if err := s.resolveScores(t); err != nil {
		return err
	}
	for i := range t.plan {
		t.needs |= t.plan[i].needs
		t.declare(t.plan[i].wasm)
	}
	for _, p := range t.plugins {
		if p.version == nil {
			continue
		}
		t.needs |= p.version.Needs()
		for _, q := range p.version.Policies() {
			switch q.Hook {
			case abi.HookLeg:
				t.legs = append(t.legs, q)
				t.needs |= q.Needs
				t.declare(q)
			case abi.HookFinish:
				t.finish = append(t.finish, q)
				t.needs |= q.Needs
				t.declare(q)
			}
		}
	}
	for _, c := range t.canaries { // they get their facts beside those of their predecessors
		full := t.with(c.old, c.fresh)
		full.canaries = nil
		if err := s.resolve(full); err != nil {
			return err
		}
		t.needs |= full.needs
		t.addHeaders(full.headers)
	}
	if n := len(t.headers); n > abi.MaxAllHeaders {
		return Errors{{Key: "plugin", Err: fmt.Errorf("the policies in use declare %d different request headers, at most %d are possible: %s", n, abi.MaxAllHeaders, t.declarations())}}
	}
	return nil
}

// resolveSingle finds the policies of the hooks that have one policy each.
func (s *Set) resolveSingle(t *table) (err error) {
	c := t.config
	if t.place = (placer{}); t.byScores() {
	} else if t.place, err = find(s, t, abi.HookPlace, c.Place, c.Natives.Place); err != nil {
		return Errors{{Key: "policy.place", Err: err}}
	}
	if t.mint, err = find(s, t, abi.HookMint, c.Mint, c.Natives.Mint); err != nil {
		return Errors{{Key: "policy.mint", Err: err}}
	}
	if t.retain, err = find(s, t, abi.HookRetain, c.Retain, c.Natives.Retain); err != nil {
		return Errors{{Key: "policy.retain", Err: err}}
	}
	if t.evict = (evictor{}); c.Evict == "" {
		return nil
	}
	if t.evict, err = find(s, t, abi.HookEvict, c.Evict, c.Natives.Evict); err != nil {
		return Errors{{Key: "policy.evict", Err: err}}
	}
	return nil
}

// declare adds the headers that a policy gets; nil: a compiled-in policy.
func (t *table) declare(p *policy.Policy) {
	if p != nil {
		t.addHeaders(p.Headers())
	}
}

func (t *table) addHeaders(names []string) {
	for _, name := range names {
		if !slices.Contains(t.headers, name) {
			t.headers = append(t.headers, name)
		}
	}
}

// declarations returns the number of headers of each plugin that declares headers, as "p 8, q 3".
func (t *table) declarations() string {
	var list []string
	for _, p := range t.all() {
		if p.version == nil {
			continue
		}
		if n := len(p.version.Headers()); n > 0 {
			list = append(list, fmt.Sprintf("%s %d", p.spec.Name, n))
		}
	}
	return strings.Join(list, ", ")
}

// find returns the policy that a name of the configuration means. A plugin has
// priority over a built-in policy of the same name. Built-in policies run
// compiled in where the table does not have them in WebAssembly. The caller
// holds s.mu.
func find[F, A any](s *Set, t *table, h abi.Hook, name string, native func(string) (func(F) A, bool)) (d decider[F, A], err error) {
	plugin, within, _ := strings.Cut(name, "/")
	if p := t.plugin(plugin); p != nil {
		if d.wasm, err = p.find(h, within); err == nil {
			d.needs = d.wasm.Needs
		}
		return d, err
	}
	known := false
	if t.builtin != nil {
		if d.wasm, known = t.builtin.version.Find(h, name); known {
			d.needs = d.wasm.Needs
		}
	} else if d.native, known = native(name); known {
		d.compiledIn, d.needs = s.compiledIn(h, name), t.config.Natives.Needs(name)
	}
	if !known {
		err = fmt.Errorf("%q is neither a plugin nor a built-in policy", name)
	}
	return d, err
}

// compiledIn returns the meter of a native policy, the same one in all tables.
// The caller holds s.mu.
func (s *Set) compiledIn(h abi.Hook, name string) *compiledIn {
	key := nativeKey{h, name}
	if s.natives[key] == nil {
		s.natives[key] = &compiledIn{name: name, meter: s.deps.Meter(name, h.String())}
	}
	return s.natives[key]
}

type nativeKey struct {
	hook abi.Hook
	name string
}

// needsBuiltin reports whether the configuration names a policy that no plugin
// has.
func (c *Config) needsBuiltin() bool {
	for _, name := range append([]string{c.Place, c.Mint, c.Retain, c.Evict}, c.Plan...) {
		if name == "" {
			continue
		}
		plugin, _, _ := strings.Cut(name, "/")
		if !slices.ContainsFunc(c.Plugins, func(p Spec) bool { return p.Name == plugin }) {
			return true
		}
	}
	return false
}
