package config

import (
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// ScoreSet is a set of scorers for policy.place = "scores". The first set whose models and classes
// match a request places it.
type ScoreSet struct {
	// Name is the name of the set, unique: in explain. Required.
	Name string `toml:"name"`
	// Models are the models that the set is for, as the engines name them. Default []: all.
	Models []string `toml:"models"`
	// Classes are the [[priority_class]] that the set is for; "default" is the class of requests
	// without a class. Default []: all.
	Classes []string `toml:"classes"`
	// Picker chooses a target by the sums of scores: "max_score" (the highest sum; equal sums at
	// random) or "weighted_random" (the chance is in proportion to the sum). Default "max_score".
	Picker string `toml:"picker"`
	// Scorers are the scorers and filters in their order, filters first. Default []: all targets are
	// equal.
	Scorers []Scorer `toml:"scorer"`
}

// Scorer is one scorer or filter of a set.
type Scorer struct {
	// Name is a built-in scorer, the name of a [[plugin]], or plugin/scorer; the plugin takes
	// precedence. Required.
	Name string `toml:"name"`
	// Weight multiplies the score, from 0 to 1000000. It has no effect for a filter. Default 1.
	Weight float64 `toml:"weight"`
	// Leg is the leg that the scorer is for: "prefill" (of two legs), "decode" (of two legs, and the
	// leg of an aggregated request) or "" (each). Default "".
	Leg string `toml:"leg"`
	// Params are the parameters of a built-in scorer: numbers and texts by name. Default {}: all at
	// their defaults.
	Params ScorerParams `toml:"params"`
}

// ScorerParams are numbers and texts by name; a number is its text.
type ScorerParams map[string]string

// PlaceScores is the place policy that uses sets of scorers.
const PlaceScores = "scores"

// The pickers of a set of scorers, and the legs of a scorer.
const (
	PickerMaxScore       = "max_score"
	PickerWeightedRandom = "weighted_random"

	LegPrefill = "prefill"
	LegDecode  = "decode"
)

// Bounds of [[scores]].
const (
	maxScoreSets = 64
	maxScorers   = 64 // of a set
	maxWeight    = 1_000_000
)

// DefaultScoreSet returns a set in which every omitted key has its default.
func DefaultScoreSet() ScoreSet { return ScoreSet{Picker: PickerMaxScore} }

// DefaultScorer returns a scorer in which every omitted key has its default.
func DefaultScorer() Scorer { return Scorer{Weight: 1} }

// UsualScores returns the set for requests that no [[scores]] matches: that of llm-d's router without
// a configuration (pkg/epp/config/loader/defaults.go).
func UsualScores() ScoreSet {
	return ScoreSet{Name: "usual", Picker: PickerMaxScore, Scorers: []Scorer{
		{Name: "prefix", Weight: 3}, {Name: "queue", Weight: 2}, {Name: "kv_usage", Weight: 2},
	}}
}

// scorerParams fills v from a table of numbers and texts.
func (d *decoder) scorerParams(key string, datum any, v *ScorerParams) {
	t, ok := datum.(map[string]any)
	if !ok {
		d.wrongType(key, "table", datum)
		return
	}
	*v = ScorerParams{}
	for _, name := range slices.Sorted(maps.Keys(t)) {
		if text, ok := t[name].(string); ok {
			(*v)[name] = text
			continue
		}
		number := 0.0
		before := len(d.problems)
		if d.scalar(joinKey(key, name), t[name], reflect.ValueOf(&number).Elem()); len(d.problems) == before {
			(*v)[name] = strconv.FormatFloat(number, 'g', -1, 64)
		}
	}
}

// ScorerParamKey returns the key of a parameter in the file. scorer is the key of its scorer.
func ScorerParamKey(scorer, name string) string { return joinKey(scorer+".params", name) }

// scores checks every [[scores]].
func (k *checker) scores() {
	names := map[string]string{}
	for i, s := range k.config.Scores {
		key := func(name string) string { return joinKey(indexKey("scores", i), name) }
		k.name(key("name"), s.Name)
		k.unique(key("name"), s.Name, names)
		k.scoreModels(key("models"), s.Models)
		for n, class := range s.Classes {
			if _, found := k.config.PriorityClass(class); !found || class == "" {
				k.add(indexKey(key("classes"), n), "no [[priority_class]] has the name %q", class)
			}
		}
		k.oneOf(key("picker"), s.Picker, PickerMaxScore, PickerWeightedRandom)
		if len(s.Scorers) > maxScorers {
			k.add(key("scorer"), "must have at most %d tables, found %d", maxScorers, len(s.Scorers))
		}
		for n, scorer := range s.Scorers {
			k.scorer(indexKey(key("scorer"), n), scorer)
		}
	}
	if n := len(k.config.Scores); n > maxScoreSets {
		k.add("scores", "must have at most %d tables, found %d", maxScoreSets, n)
	}
}

// scoreModels checks the models of a set: names that engines serve.
func (k *checker) scoreModels(at string, models []string) {
	for n, model := range models {
		key := indexKey(at, n)
		k.modelName(key, model)
		if m := k.config.Model(model); m != nil && (m.AliasOf != "" || len(m.Split) > 0) {
			k.add(key, "%q is a [[model]] that other models serve: name the models of the engines", model)
		}
	}
}

// scorer checks one scorer at the key at.
func (k *checker) scorer(at string, s Scorer) {
	k.required(joinKey(at, "name"), s.Name)
	if !(s.Weight >= 0 && s.Weight <= maxWeight) { // this form also rejects NaN
		k.add(joinKey(at, "weight"), "must be from 0 to %d, found %v", maxWeight, s.Weight)
	}
	k.oneOf(joinKey(at, "leg"), s.Leg, "", LegPrefill, LegDecode)
	if k.config.OwnScorer(s.Name) && len(s.Params) > 0 {
		k.add(joinKey(at, "params"), "is for built-in scorers: a plugin reads the key config of its [[plugin]]")
	}
}

// OwnScorer reports whether a name means a scorer of a [[plugin]].
func (c *Config) OwnScorer(name string) bool {
	plugin, _, _ := strings.Cut(name, "/")
	return slices.ContainsFunc(c.Plugins, func(p Plugin) bool { return p.Name == plugin })
}

// ByScores reports whether sets of scorers place the requests.
func (c *Config) ByScores() bool {
	return c.Policy.Place == PlaceScores && !c.OwnScorer(PlaceScores)
}

// warnScores warns about sets of scorers that no request uses.
func (k *checker) warnScores() {
	all := ""
	for i, s := range k.config.Scores {
		key := joinKey(indexKey("scores", i), "name")
		switch {
		case !k.config.ByScores():
			k.add(key, "no request uses this set: policy.place is not %q", PlaceScores)
		case all != "":
			k.add(key, "no request uses this set: the set %q before it is for all requests", all)
		case len(s.Models) == 0 && len(s.Classes) == 0:
			all = s.Name
		}
	}
}
