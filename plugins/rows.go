package plugins

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/plugins/policy"
)

// Row describes one policy or filter for operators.
type Row struct {
	Name    string // as the configuration has it
	Phase   string // plan, place, score, mint, leg, finish, retain, evict or filter
	SHA256  string // of the module; "" for a policy that is compiled in
	Runtime string // wasm or native
	State   string // active, canary (takes a share), parked (failed too often) or failed (its new version cannot be used; this one serves)
	policy.Summary
}

// Rows lists the loaded policies and filters: the used built-in policies, then
// every policy of every plugin and the filters, in the order of the
// configuration.
func (s *Set) Rows() []Row {
	t := s.table.Load()
	if t == nil {
		return nil
	}
	var rows []Row
	for i := range t.plan {
		rows = t.plan[i].compiledIn.row(rows, abi.HookPlan)
		rows = t.builtinRow(rows, t.plan[i].wasm)
	}
	rows = t.place.compiledIn.row(rows, abi.HookPlace)
	rows = t.builtinRow(rows, t.place.wasm)
	if len(t.scores) > 0 {
		rows = s.scoreRow(rows, t)
	}
	rows = t.mint.compiledIn.row(rows, abi.HookMint)
	rows = t.builtinRow(rows, t.mint.wasm)
	rows = t.retain.compiledIn.row(rows, abi.HookRetain)
	rows = t.builtinRow(rows, t.retain.wasm)
	rows = t.evict.compiledIn.row(rows, abi.HookEvict)
	rows = t.builtinRow(rows, t.evict.wasm)
	for _, p := range t.plugins {
		if p.filter != nil {
			rows = append(rows, Row{Name: p.spec.Name, Phase: "filter", SHA256: p.digest, Runtime: "wasm", State: p.state(), Summary: p.calls.calls.Summary()})
			continue
		}
		for _, q := range p.version.Policies() {
			rows = append(rows, p.row(q))
		}
	}
	for _, c := range t.canaries {
		for _, q := range c.fresh.version.Policies() {
			r := c.fresh.row(q)
			r.State = "canary"
			rows = append(rows, r)
		}
	}
	return rows
}

// scoreRow appends the row of the built-in scorers: one for all of them.
func (s *Set) scoreRow(rows []Row, t *table) []Row {
	if t.builtin == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.compiledIn(abi.HookScore, Scores).row(rows, abi.HookScore)
	}
	p, _ := t.builtin.version.Find(abi.HookScore, "")
	return t.builtinRow(rows, p)
}

// row appends the row of a policy that is compiled in, if c is one.
func (c *compiledIn) row(rows []Row, h abi.Hook) []Row {
	if c == nil {
		return rows
	}
	return append(rows, Row{Name: c.name, Phase: h.String(), Runtime: "native", State: "active", Summary: c.calls.Summary()})
}

// builtinRow appends the row of q if it is a built-in policy.
func (t *table) builtinRow(rows []Row, q *policy.Policy) []Row {
	if q == nil || t.builtin == nil || q.Version() != t.builtin.version {
		return rows
	}
	return append(rows, t.builtin.row(q))
}

func (p *plugin) row(q *policy.Policy) Row {
	return Row{Name: q.Label, Phase: q.Hook.String(), SHA256: p.digest, Runtime: "wasm", State: p.state(), Summary: q.Summary()}
}

// builtinNamed returns the runtime of the built-in policy of that name, if it
// is used.
func (t *table) builtinNamed(name string) (isNative, used bool) {
	native := []*compiledIn{t.place.compiledIn, t.mint.compiledIn, t.retain.compiledIn, t.evict.compiledIn}
	for i := range t.plan {
		native = append(native, t.plan[i].compiledIn)
	}
	for _, c := range native {
		if c != nil && c.name == name {
			return true, true
		}
	}
	if name == Scores && len(t.scores) > 0 && t.builtin == nil {
		return true, true
	}
	if t.builtin != nil {
		for _, q := range t.builtin.version.Policies() {
			used = used || q.Label == name
		}
	}
	return false, used
}
