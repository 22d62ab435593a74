package docs

import (
	"encoding"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// schemaOf returns the JSON schema of a Go type, so that the documents cannot differ from the
// answers. A field that may be missing is not required, and no other field is allowed.
func schemaOf[T any]() object { return schema(reflect.TypeFor[T]()) }

func schema(t reflect.Type) object {
	if t.Implements(reflect.TypeFor[encoding.TextMarshaler]()) {
		return object{"type": "string"}
	}
	if t == reflect.TypeFor[json.RawMessage]() {
		return object{}
	}
	switch t.Kind() {
	case reflect.Bool:
		return object{"type": "boolean"}
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64, reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return object{"type": "integer"}
	case reflect.Float32, reflect.Float64:
		return object{"type": "number"}
	case reflect.String:
		return object{"type": "string"}
	case reflect.Pointer:
		return object{"anyOf": []any{schema(t.Elem()), object{"type": "null"}}}
	case reflect.Slice, reflect.Array:
		return object{"type": "array", "items": schema(t.Elem())}
	case reflect.Map:
		return object{"type": "object", "additionalProperties": schema(t.Elem())}
	case reflect.Struct:
		return structSchema(t)
	}
	return object{} // an interface: any value
}

func structSchema(t reflect.Type) object {
	properties, required := object{}, []string{}
	for i := range t.NumField() {
		f := t.Field(i)
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "" || name == "-" {
			continue
		}
		properties[name] = schema(f.Type)
		if !strings.Contains(options, "omitempty") && !strings.Contains(options, "omitzero") {
			required = append(required, name)
		}
	}
	return object{"type": "object", "properties": properties, "required": required, "additionalProperties": false}
}

func TestSchema(t *testing.T) {
	type row struct {
		Name string  `json:"name"`
		Time *int    `json:"time,omitempty"`
		List []int32 `json:"list"`
		none int
	}
	got, err := json.Marshal(schemaOf[row]())
	want := `{"additionalProperties":false,"properties":{"list":{"items":{"type":"integer"},"type":"array"},"name":{"type":"string"},"time":{"anyOf":[{"type":"integer"},{"type":"null"}]}},"required":["name","list"],"type":"object"}`
	if err != nil || string(got) != want || (row{}).none != 0 {
		t.Errorf("%v: %s", err, got)
	}
}
