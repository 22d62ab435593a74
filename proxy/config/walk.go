package config

import "reflect"

// walk calls visit for each key of v, in the order of the struct, with its full name
// (engine[1].role), its name without indices (engine.role) and its value. It visits
// tables and entries of arrays of tables before their content, but not the arrays
// themselves.
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
