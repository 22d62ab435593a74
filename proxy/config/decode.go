package config

import (
	"cmp"
	"encoding"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
)

// decoder fills a struct from a decoded TOML tree. It notes every unknown key and wrong
// type instead of stopping at the first. Keys match field tags exactly. The only
// conversion is that of an integer to a float.
type decoder struct {
	lines    lineIndex
	problems Problems
}

// decodeTree fills cfg from tree and returns the problems.
func decodeTree(tree map[string]any, cfg *Config) Problems {
	d := &decoder{lines: cfg.lines}
	d.table("", tree, reflect.ValueOf(cfg).Elem())
	return d.problems
}

func (d *decoder) add(key, format string, args ...any) {
	if len(d.problems) >= maxProblems {
		return
	}
	d.problems = append(d.problems, Problem{Key: key, Line: d.lines.line(key), Message: fmt.Sprintf(format, args...)})
}

// table fills the struct v from t, whose key is path.
func (d *decoder) table(path string, t map[string]any, v reflect.Value) {
	for _, name := range slices.Sorted(maps.Keys(t)) {
		if len(d.problems) >= maxProblems {
			return
		}
		key := joinKey(path, name)
		field, found := fieldOf(v, name)
		if why := retiredKey(key); !found && why != "" {
			d.add(key, "%s", why)
			continue
		}
		if !found {
			d.add(key, "unknown key%s", cmp.Or(outsideSections(path, name, t[name], v), DidYouMean(name, fieldNames(v))))
			continue
		}
		d.value(key, t[name], field)
	}
}

// value fills v, which may be of any kind, from datum.
func (d *decoder) value(key string, datum any, v reflect.Value) {
	if u, ok := v.Addr().Interface().(encoding.TextUnmarshaler); ok {
		if s, ok := datum.(string); !ok {
			d.wrongType(key, textForm(u), datum)
		} else if err := u.UnmarshalText([]byte(s)); err != nil {
			d.add(key, "%v", err)
		}
		return
	}
	if labels, ok := v.Addr().Interface().(*Labels); ok {
		d.labels(key, datum, labels)
		return
	}
	if params, ok := v.Addr().Interface().(*map[string]map[string]float64); ok {
		d.params(key, datum, params)
		return
	}
	if params, ok := v.Addr().Interface().(*ScorerParams); ok {
		d.scorerParams(key, datum, params)
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		if t, ok := datum.(map[string]any); ok {
			d.table(key, t, v)
		} else {
			d.wrongType(key, "table", datum)
		}
	case reflect.Slice:
		d.slice(key, datum, v)
	case reflect.Map:
		d.mapping(key, datum, v)
	default:
		d.scalar(key, datum, v)
	}
}

// slice fills v from an array of tables or an inline array. The file's array
// replaces the default; each table in it starts from the defaults of its type.
func (d *decoder) slice(key string, datum any, v reflect.Value) {
	array, ok := datum.([]any)
	if tables, isTables := datum.([]map[string]any); isTables {
		ok = true
		for _, t := range tables {
			array = append(array, t)
		}
	}
	if !ok {
		want := "array"
		if v.Type().Elem().Kind() == reflect.Struct {
			want = "array of tables"
			if _, table := datum.(map[string]any); table {
				want += ", [[" + key + "]]"
			}
		}
		d.wrongType(key, want, datum)
		return
	}
	v.Set(reflect.MakeSlice(v.Type(), len(array), len(array)))
	for i, element := range array {
		switch e := v.Index(i).Addr().Interface().(type) {
		case *Engine:
			*e = DefaultEngine()
		case *Plugin:
			*e = DefaultPlugin()
		case *PriorityClass:
			*e = DefaultPriorityClass()
		case *Tenant:
			*e = DefaultTenant()
		case *JWT:
			*e = DefaultJWT()
		case *ScoreSet:
			*e = DefaultScoreSet()
		case *Scorer:
			*e = DefaultScorer()
		}
		d.value(indexKey(key, i), element, v.Index(i))
	}
}

// mapping fills v, a map with keys of the user's choice, from a table. The
// file's table replaces the default.
func (d *decoder) mapping(key string, datum any, v reflect.Value) {
	t, ok := datum.(map[string]any)
	if !ok {
		d.wrongType(key, "table", datum)
		return
	}
	v.Set(reflect.MakeMap(v.Type()))
	for _, name := range slices.Sorted(maps.Keys(t)) {
		element := reflect.New(v.Type().Elem()).Elem()
		d.value(joinKey(key, name), t[name], element)
		v.SetMapIndex(reflect.ValueOf(name), element)
	}
}

// scalar fills v from a string, number or boolean.
func (d *decoder) scalar(key string, datum any, v reflect.Value) {
	whole, isWhole := datum.(int64)
	if isWhole && v.Kind() == reflect.Float64 {
		v.SetFloat(float64(whole))
		return
	}
	switch value := reflect.ValueOf(datum); {
	case isWhole && v.Kind() == reflect.Int:
		v.SetInt(whole)
	case value.Kind() == v.Kind():
		v.Set(value)
	default:
		d.wrongType(key, kindName(v.Kind()), datum)
	}
}

// wrongType notes that key has another type than want. It omits the value, which may be
// a secret.
func (d *decoder) wrongType(key, want string, datum any) {
	d.add(key, "wrong type: want %s, found %s", want, typeName(datum))
}

// fieldOf returns the field of the struct v whose toml tag is name.
func fieldOf(v reflect.Value, name string) (reflect.Value, bool) {
	for i := range v.NumField() {
		if tag, tagged := v.Type().Field(i).Tag.Lookup("toml"); tagged && tag == name {
			return v.Field(i), true
		}
	}
	return reflect.Value{}, false
}

// fieldNames returns the toml tags of the fields of the struct v.
func fieldNames(v reflect.Value) []string {
	var names []string
	for i := range v.NumField() {
		if tag, tagged := v.Type().Field(i).Tag.Lookup("toml"); tagged {
			names = append(names, tag)
		}
	}
	return names
}

// outsideSections explains a key at the top of the file, before every section. It returns
// "" for other keys and for tables.
func outsideSections(path, name string, datum any, v reflect.Value) string {
	switch datum.(type) {
	case map[string]any, []map[string]any:
		return ""
	}
	if path != "" {
		return ""
	}
	var sections []string
	for i := range v.NumField() {
		if tag, tagged := v.Type().Field(i).Tag.Lookup("toml"); tagged && v.Field(i).Kind() == reflect.Struct {
			if _, found := fieldOf(v.Field(i), name); found {
				sections = append(sections, "["+tag+"]")
			}
		}
	}
	if len(sections) == 0 {
		return ""
	}
	return " at the top of the file: write it below its section, " + strings.Join(sections, " or ")
}

// textForm describes the string from which u is read.
func textForm(u encoding.TextUnmarshaler) string {
	switch u.(type) {
	case *Duration:
		return `string such as "30s"`
	case *ByteSize:
		return `string such as "16MiB"`
	}
	return "string"
}

// kindName names the TOML type of a scalar field.
func kindName(k reflect.Kind) string {
	switch k {
	case reflect.Int:
		return "integer"
	case reflect.Float64:
		return "float"
	case reflect.Bool:
		return "boolean"
	default:
		return "string"
	}
}

// typeName names the TOML type of a decoded value.
func typeName(datum any) string {
	switch datum.(type) {
	case string:
		return "string"
	case int64:
		return "integer"
	case float64:
		return "float"
	case bool:
		return "boolean"
	case time.Time:
		return "datetime"
	case map[string]any:
		return "table"
	case []map[string]any:
		return "array of tables"
	case nil:
		return "null"
	default:
		return "array"
	}
}

// joinKey appends name, quoted if TOML requires it, to the key of its table.
func joinKey(path, name string) string {
	quoted := toml.Key{name}.String()
	if path == "" {
		return quoted
	}
	return path + "." + quoted
}

// indexKey returns the key of entry i of the array key, counted from 0.
func indexKey(key string, i int) string { return key + "[" + strconv.Itoa(i) + "]" }
