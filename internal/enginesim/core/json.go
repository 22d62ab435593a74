package core

import (
	"bytes"
	"encoding/json"
	"strconv"
	"unicode/utf8"
)

// Object is a JSON object with its members in order.
type Object []member

type member struct {
	Name  string
	Value any
}

// Obj makes an object of name, value, name, value…
func Obj(pairs ...any) Object {
	o := make(Object, 0, len(pairs)/2)
	for i := 0; i < len(pairs); i += 2 {
		o = append(o, member{pairs[i].(string), pairs[i+1]})
	}
	return o
}

// With returns the object with one more member.
func (o Object) With(name string, value any) Object { return append(o, member{name, value}) }

// MarshalJSON writes the members in order.
func (o Object) MarshalJSON() ([]byte, error) { return EncodeJSON(o) }

// EncodeJSON marshals as the engines do: members in order, UTF-8 and HTML
// characters as they are.
func EncodeJSON(v any) ([]byte, error) { return appendJSON(nil, v) }

// appendJSON appends the JSON of v. Stream events consist of the types handled
// here; all others go through encoding/json.
func appendJSON(dst []byte, v any) ([]byte, error) {
	var err error
	switch v := v.(type) {
	case nil:
		return append(dst, "null"...), nil
	case string:
		return AppendString(dst, v), nil
	case bool:
		return strconv.AppendBool(dst, v), nil
	case int:
		return strconv.AppendInt(dst, int64(v), 10), nil
	case int64:
		return strconv.AppendInt(dst, v, 10), nil
	case Object:
		dst = append(dst, '{')
		for i, m := range v {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = append(AppendString(dst, m.Name), ':')
			if dst, err = appendJSON(dst, m.Value); err != nil {
				return dst, err
			}
		}
		return append(dst, '}'), nil
	case []any:
		dst = append(dst, '[')
		for i, item := range v {
			if i > 0 {
				dst = append(dst, ',')
			}
			if dst, err = appendJSON(dst, item); err != nil {
				return dst, err
			}
		}
		return append(dst, ']'), nil
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	err = enc.Encode(v)
	return append(dst, bytes.TrimSuffix(b.Bytes(), []byte("\n"))...), err
}

// AppendString appends a JSON string, escaping only what JSON demands.
func AppendString(dst []byte, s string) []byte {
	dst = append(dst, '"')
	for i := 0; i < len(s); {
		c := s[i]
		switch {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c == '\n':
			dst = append(dst, '\\', 'n')
		case c == '\r':
			dst = append(dst, '\\', 'r')
		case c == '\t':
			dst = append(dst, '\\', 't')
		case c < 0x20:
			dst = append(dst, '\\', 'u', '0', '0', "0123456789abcdef"[c>>4], "0123456789abcdef"[c&15])
		case c < utf8.RuneSelf:
			dst = append(dst, c)
		default:
			r, n := utf8.DecodeRuneInString(s[i:])
			dst = utf8.AppendRune(dst, r)
			i += n
			continue
		}
		i++
	}
	return append(dst, '"')
}
