package config

import "reflect"

// Changed returns the full names of the keys that have different values in c and next, in the
// order of the structs. An array of tables is one key.
func (c *Config) Changed(next *Config) (keys []string) {
	eachChanged("", reflect.ValueOf(c).Elem(), reflect.ValueOf(next).Elem(), func(key string, _, _ reflect.Value) { keys = append(keys, key) })
	return keys
}

// Changes is Changed for readers: it lists the entries of an array of tables by their names, such as
// "engine.d1 added", "engine.d0 removed" and "engine.d2.weight". It shows no values.
func (c *Config) Changes(next *Config) (list []string) {
	eachChanged("", reflect.ValueOf(c).Elem(), reflect.ValueOf(next).Elem(), func(key string, x, y reflect.Value) {
		if entries := changedEntries(key, x, y); entries != nil {
			list = append(list, entries...)
			return
		}
		list = append(list, key)
	})
	return list
}

// eachChanged calls visit for each key that differs in the structs a and b. table is the key of the
// structs.
func eachChanged(table string, a, b reflect.Value, visit func(key string, x, y reflect.Value)) {
	for i := range a.NumField() {
		tag, tagged := a.Type().Field(i).Tag.Lookup("toml")
		if !tagged {
			continue
		}
		key, x, y := joinKey(table, tag), a.Field(i), b.Field(i)
		switch {
		case x.Kind() == reflect.Struct:
			eachChanged(key, x, y, visit)
		case !same(x, y):
			visit(key, x, y)
		}
	}
}

// changedEntries compares the arrays x and y of tables with names. The result is nil for other
// values, and if the entries differ only in their order.
func changedEntries(key string, x, y reflect.Value) (list []string) {
	if x.Kind() != reflect.Slice || x.Type().Elem().Kind() != reflect.Struct {
		return nil
	}
	if _, named := x.Type().Elem().FieldByName("Name"); !named {
		return nil
	}
	before := entriesByName(x)
	after := entriesByName(y)
	for i := range y.Len() {
		entry := y.Index(i)
		name := joinKey(key, entry.FieldByName("Name").String())
		old, found := before[entry.FieldByName("Name").String()]
		if !found {
			list = append(list, name+" added")
			continue
		}
		eachChanged(name, old, entry, func(key string, _, _ reflect.Value) { list = append(list, key) })
	}
	for i := range x.Len() {
		name := x.Index(i).FieldByName("Name").String()
		if _, found := after[name]; !found {
			list = append(list, joinKey(key, name)+" removed")
		}
	}
	return list
}

// entriesByName returns the entries of an array of tables. A checked configuration has each name once.
func entriesByName(array reflect.Value) map[string]reflect.Value {
	entries := make(map[string]reflect.Value, array.Len())
	for i := range array.Len() {
		entries[array.Index(i).FieldByName("Name").String()] = array.Index(i)
	}
	return entries
}

// same reports whether two values of a key are equal. An empty list or table and a missing one
// are equal.
func same(x, y reflect.Value) bool {
	if (x.Kind() == reflect.Slice || x.Kind() == reflect.Map) && x.Len() == 0 && y.Len() == 0 {
		return true
	}
	return reflect.DeepEqual(x.Interface(), y.Interface())
}
