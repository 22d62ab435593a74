package importer

import (
	"cmp"
	"maps"
	"slices"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// profile is one of the schedulingProfiles.
type profile struct {
	name string
	line int
	refs []reference
}

// reference is a plugin of a profile.
type reference struct {
	plugin *pickerPlugin
	line   int
	weight float64
}

// readProfiles reads the scheduling profiles. Without profiles, llm-d makes one of all plugins
// (pkg/epp/config/loader/defaults.go).
func (p *picker) readProfiles(root *table) {
	nodes, _, ok := p.list(root, "schedulingProfiles")
	if !ok || len(nodes) == 0 {
		all := profile{name: "default"}
		for _, name := range p.names {
			g := p.plugins[name]
			all.refs = append(all.refs, reference{g, g.line, 1})
		}
		p.profiles = []profile{all}
		return
	}
	seen := map[string]bool{}
	for _, node := range nodes {
		t := p.table("schedulingProfiles", node)
		name, _, ok := p.text(t, "name")
		switch {
		case !ok || name == "":
			p.problem(p.file, node.Line, "schedulingProfiles.name", "is required")
		case seen[name]:
			p.problem(p.file, node.Line, "schedulingProfiles.name", "the file has two profiles of this name")
		}
		seen[name] = true
		p.profiles = append(p.profiles, profile{name, node.Line, p.references(t)})
		p.leftKeys(t)
	}
}

// leftKeys notes the keys of a table of the file that nothing has read.
func (p *picker) leftKeys(t *table) {
	for _, e := range t.entries {
		p.unequal(e.line, t.name(e.key), "unknown key: it is left out")
	}
}

// references reads the plugins of a profile.
func (p *picker) references(t *table) (refs []reference) {
	nodes, _, _ := p.list(t, "plugins")
	for _, node := range nodes {
		const key = "schedulingProfiles.plugins.pluginRef"
		one := p.table("schedulingProfiles.plugins", node)
		name, _, ok := p.text(one, "pluginRef")
		weight, _, weighed := p.float(one, "weight", -maxScoreWeight, maxScoreWeight)
		if !weighed {
			weight = 1
		}
		p.leftKeys(one)
		switch g, found := p.plugin(name, node.Line); {
		case !ok:
			p.problem(p.file, node.Line, key, "is required")
		case !found:
			p.problem(p.file, node.Line, key, "names no plugin of this file")
		default:
			refs = append(refs, reference{g, node.Line, weight})
		}
	}
	return refs
}

// Bounds of [[scores]] (proxy/config/scores.go).
const (
	maxScoreWeight = 1_000_000
	maxScorers     = 64  // of a set
	maxScorerText  = 256 // bytes of a parameter (policies/param)
)

// run is a profile with the leg of [[scores.scorer]] that it places.
type run struct {
	profile
	leg string
}

// place writes the scheduling profiles as one set of scorers: the profile of each leg gives the
// scorers with this leg.
func (p *picker) place() {
	runs := p.runs()
	p.doc.set("policy", "place", text(config.PlaceScores), "schedulingProfiles")
	set := p.doc.add("scores")
	set.set("name", text("llm-d"), "")
	p.picker(set, runs)
	for _, r := range runs {
		p.leg(r)
	}
	p.deadline()
}

// deadline names the header lines with the limits of times that llm-d's plugins read.
func (p *picker) deadline() {
	if g := p.firstOf("latency-scorer", "slo-headroom-tier-filter", "latency-slo-admitter"); g != nil {
		p.doc.set("limits", "deadline_header", text("x-llm-d-slo-ttft-ms"), "the line that "+g.kind+" reads; a request that still waits then gets 503")
		p.doc.set("limits", "token_time_header", text("x-llm-d-slo-tpot-ms"), "the line that "+g.kind+" reads")
	}
}

// setPickers are the pickers of [[scores]] by those of llm-d.
func setPickers() map[string]string {
	return map[string]string{"max-score-picker": config.PickerMaxScore, "weighted-random-picker": config.PickerWeightedRandom, randomPicker: ""}
}

// randomPicker is llm-d's picker that ignores the scores.
const randomPicker = "random-picker"

// picker writes the picker of the set. A leg with random-picker has no scorers, so that each picker
// draws at random.
func (p *picker) picker(set *section, runs []run) {
	chosen, from := "", ""
	for _, r := range runs {
		kind := "max-score-picker"
		if g := p.pickerOf(r.profile); g != nil {
			kind = g.kind
			p.endpoints(g)
		}
		switch name := setPickers()[kind]; {
		case kind == randomPicker:
			from = cmp.Or(from, randomPicker+": the set has no scorers, so all sums are equal")
		case chosen == "":
			chosen, from = name, kind
		case name != chosen:
			p.unequal(r.line, "schedulingProfiles "+r.name, "a set has one picker for both legs: this profile gets %s, not %s", text(chosen), text(kind))
		}
	}
	set.set("picker", text(cmp.Or(chosen, config.PickerMaxScore)), from)
}

// pickerOf returns the picker of a profile; nil: max-score-picker. A profile without a picker gets
// one of the file in llm-d.
func (p *picker) pickerOf(of profile) *pickerPlugin {
	isPicker := func(r reference) bool { _, ok := setPickers()[r.plugin.kind]; return ok }
	if i := slices.IndexFunc(of.refs, isPicker); i >= 0 {
		return of.refs[i].plugin
	}
	return p.firstOf(slices.Sorted(maps.Keys(setPickers()))...)
}

// endpoints reads how many endpoints a picker returns.
func (p *picker) endpoints(g *pickerPlugin) {
	const most = 17 // the chosen one and epp.fallbacks
	n, e, ok := p.integer(g.parameters, "maxNumOfEndpoints", -1<<30, 1<<30)
	if ok && n > most {
		p.unequal(e.line, g.key(e.key), "epp.fallbacks is at most %d", most-1)
	}
	p.further = max(p.further, min(n, most)-1)
}

// runs returns the profiles that place a leg: prefill before decode.
func (p *picker) runs() (runs []run) {
	stages := p.stages()
	for _, of := range p.profiles {
		leg, isStage := stages[of.name]
		switch {
		case len(p.profiles) == 1:
			runs = append(runs, run{of, ""})
		case isStage && leg == encodeStage:
			p.encode(of)
		case isStage:
			runs = append(runs, run{of, leg})
		default:
			p.lose(p.doc, p.file, of.line, "schedulingProfiles "+of.name, "the result has no scorers of this profile: a [[scores]] is chosen by models and priority classes (limits.priority_header)")
		}
	}
	slices.SortStableFunc(runs, func(a, b run) int { return -cmp.Compare(a.leg, b.leg) })
	return runs
}

// encodeStage is the leg of an encoder, which is no leg of [[scores.scorer]].
const encodeStage = "encode"

// stages returns the legs by the names of their profiles: as the handler names them, or the names
// that llm-d uses.
func (p *picker) stages() map[string]string {
	names := map[string]string{config.LegPrefill: config.LegPrefill, config.LegDecode: config.LegDecode, encodeStage: encodeStage}
	handler := p.firstOf(profileHandlers()...)
	if handler == nil {
		return names
	}
	nested, _, _ := p.sub(handler.parameters, "profiles")
	for _, leg := range []string{config.LegPrefill, config.LegDecode, encodeStage} {
		name, _, given := p.text(nested, leg)
		if flat, _, found := p.text(handler.parameters, leg+"Profile"); found && !given {
			name, given = flat, true
		}
		if given && name != "" {
			delete(names, leg)
			names[name] = leg
		}
	}
	p.leftKeys(nested)
	return names
}

// encode notes the scorers of the encoders' profile.
func (p *picker) encode(of profile) {
	for _, r := range of.refs {
		if _, scores := scorerKinds()[r.plugin.kind]; scores {
			p.unequal(r.line, "schedulingProfiles "+of.name, "encoders are used in turn: no policy places them, so %s has no equal", text(r.plugin.name))
		}
	}
}

// leg writes the scorers of one leg, filters first.
func (p *picker) leg(r run) {
	g := p.pickerOf(r.profile)
	random := g != nil && g.kind == randomPicker
	for _, filters := range []bool{true, false} {
		for _, ref := range r.refs {
			for _, s := range p.scorers(ref.plugin) {
				switch {
				case s.filter != filters:
				case !s.filter && random:
					p.doc.note(ref.line, "schedulingProfiles "+r.name, "random-picker ignores the scores: the result lacks %s", text(ref.plugin.name))
				case !s.filter && ref.weight < 0:
					p.unequal(ref.line, "schedulingProfiles "+r.name, "a weight below 0 has no equal: the result lacks %s", text(ref.plugin.name))
				default:
					p.scorer(r, ref, s)
				}
			}
		}
	}
}

// scorer writes one [[scores.scorer]].
func (p *picker) scorer(r run, ref reference, s scorer) {
	t := p.doc.add("scores.scorer")
	t.set("name", text(s.name), ref.plugin.name+" of the profile "+r.name)
	if !s.filter {
		t.set("weight", float(ref.weight), "")
	}
	switch {
	case s.pair && r.leg == config.LegPrefill:
		t.set("leg", text(config.LegDecode), "prefill is placed first here, so decode is the leg that comes close to the other")
	case s.pair:
		t.set("leg", text(config.LegDecode), "the leg that comes close to prefill")
	case r.leg != "":
		t.set("leg", text(r.leg), "")
	}
	if len(s.params) > 0 {
		t.set("params", inlineTable(s.params), "")
	}
}
