package config

import (
	"math"

	"golang.org/x/net/http/httpguts"
)

// PriorityClass is a class of requests. Waiting requests of the classes share the places that
// become free by the weights of the classes, counted in tokens.
type PriorityClass struct {
	// Name is the name of the class, unique: in the header limits.priority_header, in metrics,
	// and for tenants. The class "default" has the requests of no other class; it exists
	// without a table, too. Required.
	Name string `toml:"name"`
	// Weight is the share of the places that the class gets while requests of other classes
	// wait, relative to their weights. Default 1; above 0.
	Weight float64 `toml:"weight"`
	// MaxShare is the maximum share of limits.max_exchanges that may run requests of this
	// class, from 0 to 1, also if no other request waits. The rest stays free for the other
	// classes. Default 1; above 0.
	MaxShare float64 `toml:"max_share"`
	// PromoteAfter is how long the waiting requests of this class may get no place. The class
	// then gets the next free place, ahead of all classes. Default 5s; 0: no limit.
	PromoteAfter Duration `toml:"promote_after"`
	// Deadline is the time from the arrival of a request of this class in which its first
	// token is due, unless the request has limits.deadline_header. Default 0: none.
	Deadline Duration `toml:"deadline"`
	// TokenTime is the limit for the mean time between two tokens of an answer to a request of this
	// class, unless the request has limits.token_time_header. Default 0: none.
	TokenTime Duration `toml:"token_time"`
	// Priority is the urgency of the class: a higher value is more urgent. Engines whose
	// engine.priority is set get it with each request. Without limits.trust_priority a client
	// may choose only classes that are not more urgent than its own. Default 0.
	Priority int `toml:"priority"`
}

// DefaultClass is the name of the class of requests of no other class.
const DefaultClass = "default"

// MaxBands is how many priorities the InferenceObjectives of epp.pool may have.
const MaxBands = 8

// objectiveHeaders are the header lines of llm-d with the name of an InferenceObjective, the
// present one first. Source: llm-d-router, pkg/epp/metadata/consts.go.
var objectiveHeaders = [2]string{"x-llm-d-inference-objective", "x-gateway-inference-objective"}

// PriorityHeaders returns the names of the header lines with the priority class or the
// InferenceObjective of a request: limits.priority_header, or with epp.pool those of llm-d. The first
// line that a request has counts. "": none.
func (c *Config) PriorityHeaders() [2]string {
	if c.Limits.PriorityHeader == "" && c.EPP.Pool != "" {
		return objectiveHeaders
	}
	return [2]string{c.Limits.PriorityHeader}
}

// Values of Engine.Priority.
const (
	LowerFirst  = "lower_first"
	HigherFirst = "higher_first"
)

// Bounds of [[priority_class]].
const (
	maxClasses   = 16
	maxClassName = 64 // bytes
	maxPriority  = 1_000_000
)

// DefaultPriorityClass returns a class in which every omitted key has its default.
func DefaultPriorityClass() PriorityClass {
	return PriorityClass{Weight: 1, MaxShare: 1, PromoteAfter: seconds(5)}
}

// Places returns how many of all places the class may use, at least 1.
func (p PriorityClass) Places(all int) int {
	if p.MaxShare >= 1 {
		return all
	}
	return max(1, int(p.MaxShare*float64(all)))
}

// PriorityClass returns the class of that name; "" is DefaultClass. It returns false if there
// is none.
func (c *Config) PriorityClass(name string) (PriorityClass, bool) {
	if name == "" {
		name = DefaultClass
	}
	for _, p := range c.PriorityClasses {
		if p.Name == name {
			return p, true
		}
	}
	p := DefaultPriorityClass()
	p.Name = DefaultClass
	return p, name == DefaultClass
}

// priorities checks every [[priority_class]] and the keys that refer to them.
func (k *checker) priorities() {
	names := map[string]string{}
	for i, p := range k.config.PriorityClasses {
		key := func(name string) string { return joinKey(indexKey("priority_class", i), name) }
		if k.name(key("name"), p.Name); len(p.Name) > maxClassName {
			k.add(key("name"), "must have at most %d bytes, found %d", maxClassName, len(p.Name))
		}
		k.unique(key("name"), p.Name, names)
		if !(p.Weight > 0) || math.IsInf(p.Weight, 0) { // the first is true for NaN, too
			k.add(key("weight"), "must be above 0, found %v", p.Weight)
		}
		if !(p.MaxShare > 0 && p.MaxShare <= 1) {
			k.add(key("max_share"), "must be above 0 and at most 1, found %v", p.MaxShare)
		}
		k.atLeast(key("promote_after"), int(p.PromoteAfter), 0)
		k.atLeast(key("deadline"), int(p.Deadline), 0)
		k.atLeast(key("token_time"), int(p.TokenTime), 0)
		k.within(key("priority"), p.Priority, -maxPriority, maxPriority)
	}
	if n := len(k.config.PriorityClasses); n > maxClasses {
		k.add("priority_class", "must have at most %d tables, found %d", maxClasses, n)
	}
	for i, t := range k.config.Tenants {
		if _, found := k.config.PriorityClass(t.Class); !found && safeName(t.Class) {
			k.add(joinKey(indexKey("tenant", i), "class"), "no [[priority_class]] has the name %q", t.Class)
		}
	}
	l := k.config.Limits
	for _, h := range [...]struct{ key, name string }{
		{"limits.priority_header", l.PriorityHeader}, {"limits.deadline_header", l.DeadlineHeader}, {"limits.token_time_header", l.TokenTimeHeader}, {"limits.fairness_header", l.FairnessHeader},
	} {
		if h.name != "" && !httpguts.ValidHeaderFieldName(h.name) {
			k.add(h.key, "must be the name of a header line, found %q", h.name)
		}
	}
	if l.PriorityHeader != "" && len(k.config.PriorityClasses) == 0 && k.config.EPP.Pool == "" {
		k.add("limits.priority_header", "needs [[priority_class]] or epp.pool")
	}
	if l.TrustPriority && l.PriorityHeader == "" && k.config.EPP.Pool == "" {
		k.add("limits.trust_priority", "needs limits.priority_header or epp.pool")
	}
}
