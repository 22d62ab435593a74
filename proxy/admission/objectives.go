package admission

import (
	"maps"
	"math"
	"slices"
	"strconv"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Objective is what the name of an InferenceObjective means for a request.
type Objective struct {
	Class config.PriorityClass
	// Sheddable: the request is refused instead of waiting. llm-d calls a request with a negative
	// priority sheddable.
	Sheddable bool
}

// bandRatio is the ratio of the weights of two neighbouring priorities: the higher one gets that
// many times the places while both wait. It is finite, so no request starves.
const bandRatio = 16

// Objectives returns the InferenceObjectives with these priorities by name. A class of the
// configuration with the name of an objective takes its place. An objective with the priority of a
// class is in this class. Each other priority is a class of its own.
func Objectives(cfg *config.Config, priorities map[string]int) map[string]Objective {
	if len(priorities) == 0 {
		return nil
	}
	byPriority := map[int]config.PriorityClass{}
	base, _ := cfg.PriorityClass(config.DefaultClass)
	for _, c := range append(slices.Clone(cfg.PriorityClasses), base) {
		if _, found := byPriority[c.Priority]; !found || c.Name == config.DefaultClass {
			byPriority[c.Priority] = c
		}
	}
	ranks := append(slices.Collect(maps.Values(priorities)), base.Priority)
	slices.Sort(ranks)
	ranks = slices.Compact(ranks)
	zero := slices.Index(ranks, base.Priority)
	all := make(map[string]Objective, len(priorities))
	for name, priority := range priorities {
		if _, configured := cfg.PriorityClass(name); configured {
			continue
		}
		class, found := byPriority[priority]
		if !found {
			class = base
			class.Name, class.Priority = "priority_"+strconv.Itoa(priority), priority
			class.Weight = base.Weight * math.Pow(bandRatio, float64(slices.Index(ranks, priority)-zero))
		}
		all[name] = Objective{Class: class, Sheddable: priority < 0}
	}
	return all
}
