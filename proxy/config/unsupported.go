package config

import (
	"fmt"
	"reflect"
	"strings"
)

// missingFeature is one row of the table below.
type missingFeature struct {
	// key is the key that turns the feature on, without array indices.
	key string
	// value is the one value that does, or its beginning before a final *; ""
	// means any but the zero value.
	value string
}

// missingFeatures lists what config.toml can ask for and this build does not
// do. Keys that belong to such a feature are accepted and checked like all
// others; only turning it on is refused. A feature that arrives deletes its
// rows and touches nothing else here.
func missingFeatures() []missingFeature {
	return nil
}

// unsupported adds a problem for every feature that the configuration turns
// on and this build does not have.
func (k *checker) unsupported() {
	missing := missingFeatures()
	walk("", "", reflect.ValueOf(k.config).Elem(), func(key, plain string, v reflect.Value) {
		for _, m := range missing {
			switch {
			case m.key != strings.TrimPrefix(strings.TrimPrefix(plain, "discovery.dns."), "discovery.kubernetes."): // where engine.connector stands too
			case strings.HasPrefix(plain, "policy.") && k.isPlugin(m.value): // it wins over a built-in of its name
			case m.value == "" && isSet(v):
				k.add(key, "not supported by this build")
			case m.value != "" && m.matches(fmt.Sprint(v)):
				k.add(key, "%q is not supported by this build", m.value)
			}
		}
	})
}

// matches reports whether a value is the one that turns the feature on.
func (m missingFeature) matches(value string) bool {
	beginning, begins := strings.CutSuffix(m.value, "*")
	return value == m.value || begins && strings.HasPrefix(value, beginning)
}

// isSet reports whether v turns something on: a non-zero scalar, or an array
// with entries.
func isSet(v reflect.Value) bool {
	if v.Kind() == reflect.Slice {
		return v.Len() > 0
	}
	return !v.IsZero()
}

// walk calls visit for v's every key, in the order of the struct: with its
// full name (engine[1].role), its name without indices (engine.role) and its
// value. Tables and entries of arrays of tables are visited before what they
// hold; an array of tables itself is not.
func walk(key, plain string, v reflect.Value, visit func(key, plain string, v reflect.Value)) {
	if v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.Struct {
		for i := range v.Len() {
			walk(indexKey(key, i), plain, v.Index(i), visit)
		}
		return
	}
	if key != "" {
		visit(key, plain, v)
	}
	if v.Kind() != reflect.Struct {
		return
	}
	for i := range v.NumField() {
		if tag, tagged := v.Type().Field(i).Tag.Lookup("toml"); tagged {
			walk(joinKey(key, tag), joinKey(plain, tag), v.Field(i), visit)
		}
	}
}
