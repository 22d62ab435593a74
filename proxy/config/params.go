package config

import (
	"maps"
	"reflect"
	"slices"
	"strings"
)

// params fills v from a table of policies, each with a table of numbers. The numbers of a table
// within it get a name with a dot.
func (d *decoder) params(key string, datum any, v *map[string]map[string]float64) {
	tables, ok := datum.(map[string]any)
	if !ok {
		d.wrongType(key, "table", datum)
		return
	}
	*v = map[string]map[string]float64{}
	for _, policy := range slices.Sorted(maps.Keys(tables)) {
		key := joinKey(key, policy)
		t, ok := tables[policy].(map[string]any)
		if !ok {
			d.wrongType(key, "table", tables[policy])
			continue
		}
		numbers := map[string]float64{}
		(*v)[policy] = numbers
		for name, datum := range t {
			inner, ok := datum.(map[string]any)
			if !ok {
				d.number(joinKey(key, name), datum, numbers, name)
				continue
			}
			for label, datum := range inner {
				d.number(joinKey(joinKey(key, name), label), datum, numbers, name+"."+label)
			}
		}
	}
}

// number stores a number of a table.
func (d *decoder) number(key string, datum any, to map[string]float64, name string) {
	number := 0.0
	d.scalar(key, datum, reflect.ValueOf(&number).Elem())
	to[name] = number
}

// ParamKey returns the key of a parameter of [policy.params] in the file.
func ParamKey(policy, name string) string {
	key := joinKey("policy.params", policy)
	name, label, dotted := strings.Cut(name, ".")
	if key = joinKey(key, name); dotted {
		key = joinKey(key, label)
	}
	return key
}
