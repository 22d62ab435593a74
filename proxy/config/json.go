package config

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/BurntSushi/toml"
)

// EngineFromJSON reads one engine as an operator posts it: a JSON object with
// the keys of [[engine]], checked as strictly as the configuration. The error
// is Problems where a key is at fault.
func EngineFromJSON(data []byte) (Engine, error) {
	var keys map[string]any
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	if err := d.Decode(&keys); err != nil {
		return Engine{}, fmt.Errorf("decode engine: %w", err)
	}
	for k, v := range keys {
		if n, ok := v.(json.Number); ok {
			i, err := n.Int64()
			if err != nil {
				return Engine{}, Problems{{Key: k, Message: "want a whole number"}}
			}
			keys[k] = i
		}
	}
	var text bytes.Buffer
	if err := toml.NewEncoder(&text).Encode(map[string]any{"engine": []any{keys}}); err != nil {
		return Engine{}, fmt.Errorf("decode engine: %w", err)
	}
	c, err := Parse(text.Bytes())
	if err != nil {
		return Engine{}, err
	}
	return c.Engines[0], nil
}
