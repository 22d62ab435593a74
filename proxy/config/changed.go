package config

import "reflect"

// Changed returns the full names of the keys that have different values in c and next, in the
// order of the structs. An array of tables is one key.
func (c *Config) Changed(next *Config) []string {
	return changed("", reflect.ValueOf(c).Elem(), reflect.ValueOf(next).Elem())
}

func changed(table string, a, b reflect.Value) (keys []string) {
	for i := range a.NumField() {
		tag, tagged := a.Type().Field(i).Tag.Lookup("toml")
		if !tagged {
			continue
		}
		key, x, y := joinKey(table, tag), a.Field(i), b.Field(i)
		switch {
		case x.Kind() == reflect.Struct:
			keys = append(keys, changed(key, x, y)...)
		case !same(x, y):
			keys = append(keys, key)
		}
	}
	return keys
}

// same reports whether two values of a key are equal. An empty list or table and a missing one
// are equal.
func same(x, y reflect.Value) bool {
	if (x.Kind() == reflect.Slice || x.Kind() == reflect.Map) && x.Len() == 0 && y.Len() == 0 {
		return true
	}
	return reflect.DeepEqual(x.Interface(), y.Interface())
}
