package trial

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
)

// meets compares a decision with the expected one: only the named members of an
// object, other values as a whole.
func meets(expect json.RawMessage, decision any) error {
	if len(expect) == 0 {
		return nil
	}
	text, err := json.Marshal(decision)
	if err != nil {
		return err
	}
	var want, got any
	if err := errors.Join(exactly(expect, &want), exactly(text, &got)); err != nil {
		return err
	}
	if within(want, got) {
		return nil
	}
	return fmt.Errorf("the decision is %s, expected %s", text, expect)
}

// exactly decodes numbers as text, because ids have more digits than a float64
// holds.
func exactly(text []byte, into *any) error {
	dec := json.NewDecoder(strings.NewReader(string(text)))
	dec.UseNumber()
	return dec.Decode(into)
}

func within(want, got any) bool {
	members, ok := want.(map[string]any)
	if !ok {
		return reflect.DeepEqual(want, got)
	}
	object, ok := got.(map[string]any)
	if !ok {
		return false
	}
	for name, value := range members {
		if found, ok := object[name]; !ok || !within(value, found) {
			return false
		}
	}
	return true
}
