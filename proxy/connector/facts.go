package connector

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// The paths that several kinds of engines answer in the same way.
const (
	modelsPath     = "/v1/models"
	versionPath    = "/version"
	serverInfoPath = "/server_info"
	healthPath     = "/health"
)

// served reports whether the engine serves a path of facts. An engine without the path
// has no such facts, which is no error.
func served(path string, status int) (bool, error) {
	switch {
	case status/100 == 2:
		return true, nil
	case status == http.StatusNotFound, status == http.StatusMethodNotAllowed, status == http.StatusNotImplemented:
		return false, nil
	}
	return false, fmt.Errorf("read facts: %s answered with status %d", path, status)
}

// readModels copies the ids of an OpenAI list of models into f, and the statements about
// each model. It ignores names that are longer than those of requests.
func readModels(f *engine.Facts, body []byte) error {
	data, ok, err := openai.Lookup(body, "data")
	if err != nil {
		return fmt.Errorf("read facts: %s: %w", modelsPath, err)
	}
	list, err := openai.Elements(data)
	if !ok || err != nil {
		return errors.New("read facts: " + modelsPath + ": data is no list")
	}
	f.Models, f.Cards, f.Owner = nil, nil, ""
	for model := range list {
		if owner := text(model, "owned_by"); f.Owner == "" && len(owner) <= openai.MaxModel {
			f.Owner = owner
		}
		id := text(model, "id")
		if id == "" || len(id) > openai.MaxModel {
			continue
		}
		f.Models = append(f.Models, id)
		if card, ok := readCard(id, model); ok {
			f.Cards = append(f.Cards, card)
		}
	}
	return nil
}

// readCard reads the statements about one model. ok is false if there are none. It ignores
// statements of a wrong type, and names that are longer than those of requests.
func readCard(id string, model []byte) (card engine.ModelCard, ok bool) {
	name := func(key string) string {
		if s := text(model, key); len(s) <= openai.MaxModel {
			return s
		}
		return ""
	}
	card = engine.ModelCard{ID: id, Root: name("root"), Parent: name("parent")}
	if v, _, err := openai.Lookup(model, "max_model_len"); err == nil {
		n, _ := openai.Int64(v)
		card.MaxModelLen = max(0, n)
	}
	return card, card != engine.ModelCard{ID: id}
}

// readVersion copies the answer to GET /version into f.
func readVersion(f *engine.Facts, body []byte) error {
	version, _, err := openai.Lookup(body, "version")
	if err != nil {
		return fmt.Errorf("read facts: %s: %w", versionPath, err)
	}
	f.Version, _ = openai.String(version)
	return nil
}

// text returns a string member of raw, or "" for any other type.
func text(raw []byte, key string) string {
	v, _, err := openai.Lookup(raw, key)
	if err != nil {
		return ""
	}
	s, _ := openai.String(v)
	return s
}

// memberText is text for JSON that has been checked.
func memberText(raw []byte, key string) string {
	v, _ := openai.Find(raw, key)
	s, _ := openai.String(v)
	return s
}

// textOf returns a string member of o, or "" for any other type.
func textOf(o *openai.Object, key string) string {
	v, _ := o.Get(key)
	s, _ := openai.String(v)
	return s
}

// count returns a member of o that is a non-negative number, or 0.
func count(o *openai.Object, key string) int {
	v, _ := o.Get(key)
	n, ok := openai.Int64(v)
	if !ok || n < 0 || n > 1<<31-1 {
		return 0
	}
	return int(n)
}
