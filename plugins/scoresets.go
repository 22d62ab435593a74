package plugins

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/plugins/policy"
	"github.com/pdproxy/pdproxy/plugins/scores"
)

// Scores is the name of the rule that places by sets of scorers, as Config.Place.
const Scores = "scores"

// ScoreSet is a set of scorers of the configuration. The first set that matches a request places it.
type ScoreSet struct {
	Key      string // in the configuration, such as scores[0]; of a problem of one of its scorers
	Name     string
	Models   []string // as the engines name them; empty: all
	Classes  []uint32 // abi.LabelIDs of the names of priority classes; empty: all
	Weighted bool     // as scores.Set
	Scorers  []Scorer
}

// Scorer is one scorer of a ScoreSet.
type Scorer struct {
	// Name is that of a plugin, plugin/scorer, or of a built-in scorer.
	Name string
	// Builtin is the name of the scorer with its parameters in the module of built-in policies.
	Builtin string
	Weight  float64
	Leg     abi.Role // RolePrefill: the prefill leg of two; RoleDecode: the other leg; 0: each leg
}

// scoreSet is a ScoreSet whose scorers are found.
type scoreSet struct {
	ScoreSet
	*scores.Set
}

// matches reports whether the set is for a request.
func (s *scoreSet) matches(r *abi.RequestFacts) bool {
	return (len(s.Models) == 0 || slices.Contains(s.Models, r.Model)) && (len(s.Classes) == 0 || slices.Contains(s.Classes, r.Class))
}

// placeByScores places a request by the first set that matches.
func (t *table) placeByScores(f *abi.PlaceFacts) (d abi.PlaceDecision, reason string) {
	for i := range t.scores {
		if s := &t.scores[i]; s.matches(&f.Request) {
			return s.Place(f)
		}
	}
	return d, policy.Absent
}

// asker is a scorer with the module that has it.
type asker struct {
	policy *policy.Policy // of the score hook; nil: the scorer is compiled in
	native func(*abi.ScoreFacts, *abi.Scores)
	index  uint32
	name   string // within the module
}

// resolveScores finds the scorers of all sets. The table has no sets if another policy places.
func (s *Set) resolveScores(t *table) error {
	t.scores = nil
	if !t.byScores() {
		return nil
	}
	for _, c := range t.config.Scores {
		if len(c.Classes) > 0 {
			t.needs |= abi.NeedIdentity
		}
		var askers []asker
		for i, scorer := range c.Scorers {
			a, err := s.findScorer(t, scorer)
			if err != nil {
				return Errors{{Key: fmt.Sprintf("%s.scorer[%d].name", c.Key, i), Err: err}}
			}
			askers = append(askers, a)
		}
		set := &scores.Set{Name: c.Name, Weighted: c.Weighted}
		set.Prefill = s.scoreLeg(c.Scorers, askers, abi.RolePrefill)
		set.Decode = s.scoreLeg(c.Scorers, askers, abi.RoleDecode)
		t.scores = append(t.scores, scoreSet{c, set})
	}
	return nil
}

// byScores reports whether sets of scorers place the requests.
func (t *table) byScores() bool { return t.config.Place == Scores && t.plugin(Scores) == nil }

// findScorer returns the scorer that a name of the configuration means, as find does, and adds its
// needs to those of the table.
func (s *Set) findScorer(t *table, c Scorer) (a asker, err error) {
	plugin, within, _ := strings.Cut(c.Name, "/")
	var version *policy.Version
	switch p := t.plugin(plugin); {
	case p != nil:
		if version = p.version; version == nil {
			return a, fmt.Errorf("plugin %q is a filter", plugin)
		}
		if list := version.Scorers(); within == "" && len(list) == 1 {
			within = list[0].Name
		}
	case t.builtin != nil:
		version, within = t.builtin.version, c.Builtin
	default:
		native, known := t.config.Natives.Score(c.Builtin)
		if !known {
			return a, fmt.Errorf("%q is neither a plugin nor a built-in scorer", c.Name)
		}
		t.needs |= native.Needs
		t.addHeaders(native.Headers)
		return asker{native: native.Score}, nil
	}
	found, ok := version.Scorer(within)
	switch {
	case !ok && version.Scorers() == nil && t.plugin(plugin) != nil:
		return a, fmt.Errorf("plugin %q has no scorer: it does not export %s", plugin, abi.HookScore.Export())
	case !ok && t.plugin(plugin) != nil:
		return a, fmt.Errorf("plugin %q has no scorer %q, but %s", plugin, within, strings.Join(scorersOf(version, plugin), ", "))
	case !ok:
		return a, fmt.Errorf("%q is neither a plugin nor a built-in scorer", c.Name)
	}
	p, _ := version.Find(abi.HookScore, "")
	t.needs |= found.Needs | version.Needs()
	t.declare(p)
	return asker{policy: p, index: found.Index, name: within}, nil
}

// scorersOf returns the names of the scorers of a plugin in the configuration.
func scorersOf(v *policy.Version, plugin string) (names []string) {
	for _, s := range v.Scorers() {
		names = append(names, strings.TrimSuffix(plugin+"/"+s.Name, "/"))
	}
	return names
}

// scoreLeg returns the scorers for one leg. Scorers that follow each other and are in one module are
// one part.
func (s *Set) scoreLeg(list []Scorer, askers []asker, leg abi.Role) (l scores.Leg) {
	var part []asker
	end := func() {
		if len(part) > 0 {
			l.Parts = append(l.Parts, scores.Part{Scorers: len(part), Ask: s.ask(part)})
		}
		part = nil
	}
	for i, c := range list {
		if c.Leg != 0 && c.Leg != leg {
			continue
		}
		if len(part) > 0 && part[0].policy != askers[i].policy || len(part) == abi.MaxScorers {
			end()
		}
		part = append(part, askers[i])
		l.Scorers = append(l.Scorers, abi.NamedScorer{Name: c.Name, Weight: float32(c.Weight)})
	}
	end()
	return l
}

// ask returns the function that asks the scorers of a part.
func (s *Set) ask(part []asker) func(*abi.ScoreFacts, []abi.RowScore, []abi.Scale) string {
	p := part[0].policy
	if p == nil {
		return s.askNative(part)
	}
	var indices []uint32
	for _, a := range part {
		indices = append(indices, a.index)
	}
	return func(f *abi.ScoreFacts, rows []abi.RowScore, units []abi.Scale) string {
		if t := s.table.Load(); len(t.canaries) > 0 {
			if q := t.turn(p); q != p {
				var fresh [abi.MaxScorers]uint32
				for i, a := range part {
					found, _ := q.Version().Scorer(a.name) // found before the version became a canary
					fresh[i] = found.Index
				}
				return q.Score(f, fresh[:len(part)], rows, units)
			}
		}
		return p.Score(f, indices, rows, units)
	}
}

// askNative returns the function that asks scorers that are compiled in.
func (s *Set) askNative(part []asker) func(*abi.ScoreFacts, []abi.RowScore, []abi.Scale) string {
	c := s.compiledIn(abi.HookScore, Scores)
	return func(f *abi.ScoreFacts, rows []abi.RowScore, units []abi.Scale) string {
		began, n := time.Now(), len(f.Candidates)
		clear(rows)
		out := outs.Get().(*abi.Scores)
		*out = abi.Scores{}
		for i := range part {
			out.Close(f.Open, rows[i*n:(i+1)*n])
			part[i].native(f, out)
			units[i] = out.Unit
		}
		outs.Put(out)
		c.observe(began)
		return ""
	}
}

// outs is memory for the calls of compiled-in scorers.
var outs = sync.Pool{New: func() any { return new(abi.Scores) }}

// NativeScorer is a scorer that is compiled in.
type NativeScorer struct {
	Score   func(*abi.ScoreFacts, *abi.Scores)
	Needs   abi.Needs
	Headers []string // request headers that it gets, in lower case
}
