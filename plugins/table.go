package plugins

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/plugins/policy"
)

// table is everything that serves at one moment. It is replaced as a whole and
// never changed.
type table struct {
	config  *Config
	plugins []*plugin // as in config
	builtin *plugin   // the built-in policies as WebAssembly; nil when they are not used

	canaries []canary // beside their predecessors in plugins

	plan   []planner
	place  placer
	mint   minter
	legs   []*policy.Policy // in the order of the configuration
	finish []*policy.Policy

	needs abi.Needs // of all policies that are asked
}

// planner, placer and minter are one policy each, in WebAssembly or compiled in.
type (
	planner struct {
		wasm   *policy.Policy
		native func(*abi.PlanFacts) abi.PlanDecision
		*compiledIn
	}
	placer struct {
		wasm   *policy.Policy
		native func(*abi.PlaceFacts) abi.PlaceDecision
		*compiledIn
	}
	minter struct {
		wasm   *policy.Policy
		native func(*abi.MintFacts) uint64
		*compiledIn
	}
)

// compiledIn is the name of a policy that runs natively and what its calls were
// like.
type compiledIn struct {
	name  string
	calls policy.Calls
	meter policy.Meter
}

func (c *compiledIn) observe(began time.Time) {
	took := time.Since(began)
	c.calls.Observe(took)
	c.meter.Observe(took)
}

// resolve finds the policies that the configuration names among what is loaded.
func (s *Set) resolve(t *table) error {
	c := t.config
	t.plan, t.place, t.mint, t.legs, t.finish = nil, placer{}, minter{}, nil, nil
	for i, name := range c.Plan {
		p := planner{}
		key := "policy.plan"
		if i < len(c.Plan)-1 { // the last one is policy.plan
			key = fmt.Sprintf("policy.order[%d]", i)
		}
		wasm, err := s.lookUp(t, abi.HookPlan, name)
		if err == nil && wasm == nil {
			if p.native, err = native(s.deps.Native.Plan, name); err == nil {
				p.compiledIn = s.compiledIn(abi.HookPlan, name)
			}
		}
		if err != nil {
			return &Error{key, err}
		}
		p.wasm = wasm
		t.plan = append(t.plan, p)
	}
	var err error
	if t.place.wasm, err = s.lookUp(t, abi.HookPlace, c.Place); err == nil && t.place.wasm == nil {
		if t.place.native, err = native(s.deps.Native.Place, c.Place); err == nil {
			t.place.compiledIn = s.compiledIn(abi.HookPlace, c.Place)
		}
	}
	if err != nil {
		return &Error{"policy.place", err}
	}
	if t.mint.wasm, err = s.lookUp(t, abi.HookMint, c.Mint); err == nil && t.mint.wasm == nil {
		if t.mint.native, err = native(s.deps.Native.Mint, c.Mint); err == nil {
			t.mint.compiledIn = s.compiledIn(abi.HookMint, c.Mint)
		}
	}
	if err != nil {
		return &Error{"policy.mint", err}
	}
	t.needs = 0
	for _, p := range t.plugins {
		if p.version == nil {
			continue
		}
		t.needs |= p.version.Needs()
		for _, q := range p.version.Policies() {
			switch q.Hook {
			case abi.HookLeg:
				t.legs = append(t.legs, q)
			case abi.HookFinish:
				t.finish = append(t.finish, q)
			}
		}
	}
	return nil
}

// lookUp finds the policy that a name of the configuration means; nil without an
// error for a built-in one that runs natively. A plugin wins over a built-in of
// the same name.
func (s *Set) lookUp(t *table, h abi.Hook, name string) (*policy.Policy, error) {
	plugin, within, _ := strings.Cut(name, "/")
	for _, p := range t.plugins {
		if p.spec.Name == plugin {
			return p.find(h, within)
		}
	}
	if t.builtin == nil {
		return nil, nil
	}
	if p, ok := t.builtin.version.Find(h, name); ok {
		return p, nil
	}
	return nil, errUnknown(name)
}

func errUnknown(name string) error {
	return fmt.Errorf("%q is neither a plugin nor a built-in policy", name)
}

// native finds a built-in policy that is compiled in.
func native[F any](find func(string) (F, bool), name string) (F, error) {
	f, ok := find(name)
	if !ok {
		return f, errUnknown(name)
	}
	return f, nil
}

// compiledIn is what watches a native policy, the same over all tables. s.mu is
// held.
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
	for _, name := range append([]string{c.Place, c.Mint}, c.Plan...) {
		plugin, _, _ := strings.Cut(name, "/")
		if !slices.ContainsFunc(c.Plugins, func(p Spec) bool { return p.Name == plugin }) {
			return true
		}
	}
	return false
}
