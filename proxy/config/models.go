package config

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Model is a name of a model in the requests of clients, with the models that serve
// these requests. Other names in requests are names of models that engines serve.
type Model struct {
	// Name is the name in requests, unique. It may be the name of a model that engines
	// serve. Required.
	Name string `toml:"name"`
	// AliasOf is the model that serves the requests: one that engines serve, or another
	// [[model]], whose fallbacks come before those of this one. Default "": Split, or the
	// engines' model Name.
	AliasOf string `toml:"alias_of"`
	// Split has several models with the weights of their shares of the conversations.
	// Weight 0 is no share. A model in it may be Name itself, as the engines serve it. All
	// requests of a conversation go to one model. It excludes AliasOf. Default {}: one
	// model.
	Split map[string]float64 `toml:"split"`
	// Fallback lists models for requests that no engine of the chosen model can take, in
	// the order of use: names of engines' models, of [[model]] without a split, and of
	// [[remote]] with "remote:" before the name. The fallbacks of a fallback are not used.
	// Default []: none.
	Fallback []string `toml:"fallback"`
	// Continue is retry.continue for the requests of this name. Default "": that of
	// AliasOf, or else retry.continue.
	Continue string `toml:"continue"`
}

// MaxSplit bounds the models of a split.
const MaxSplit = 16

// Bounds of [[model]].
const (
	maxModelName = 256 // bytes
	maxFallback  = 8   // models
)

// models checks every [[model]].
func (k *checker) models() {
	names := map[string]string{}
	for i, m := range k.config.Models {
		key := func(name string) string { return joinKey(indexKey("model", i), name) }
		k.modelName(key("name"), m.Name)
		k.unique(key("name"), m.Name, names)
		switch {
		case m.AliasOf != "" && len(m.Split) > 0:
			k.add(key("split"), "must not be set together with alias_of")
		case m.AliasOf == "" && len(m.Split) == 0 && len(m.Fallback) == 0 && m.Continue == "":
			k.add(key("alias_of"), "is required, or split, or fallback, or continue")
		case m.AliasOf == m.Name && m.Name != "":
			k.add(key("alias_of"), "must be another model than name")
		case m.AliasOf != "":
			k.modelName(key("alias_of"), m.AliasOf)
		case len(m.Split) > 0:
			k.split(key("split"), m)
		}
		k.fallback(key("fallback"), m)
		k.oneOf(key("continue"), m.Continue, "", ContinueOff, ContinueDrain, ContinueOn)
	}
	k.modelCycles()
}

// fallback checks the fallbacks of m at the key at.
func (k *checker) fallback(at string, m Model) {
	if len(m.Fallback) > maxFallback {
		k.add(at, "must have at most %d models, found %d", maxFallback, len(m.Fallback))
	}
	for i, name := range m.Fallback {
		key := indexKey(at, i)
		switch {
		case name == m.Name && name != "":
			k.add(key, "must be another model than name")
		case slices.Contains(m.Fallback[:i], name):
			k.add(key, "%q occurs twice in the list", name)
		case k.config.splits(name):
			k.add(key, "%q has a split: name one of its models", name)
		case strings.HasPrefix(name, RemotePrefix):
			k.remote(key, name)
		default:
			k.modelName(key, name)
		}
	}
}

// modelName requires a name that is fit for metrics and log lines.
func (k *checker) modelName(key, value string) {
	if value == "" {
		k.required(key, value)
	} else if err := CheckModelName(value); err != nil {
		k.add(key, "%s", err)
	}
}

// CheckModelName returns an error unless a name is fit for metrics and log lines.
func CheckModelName(value string) error {
	switch {
	case value == "":
		return errors.New("is empty")
	case strings.HasPrefix(value, RemotePrefix):
		return fmt.Errorf("must not begin with %q: a [[remote]] is only for fallback", RemotePrefix)
	case len(value) > maxModelName:
		return fmt.Errorf("must have at most %d bytes, found %d", maxModelName, len(value))
	case !utf8.ValidString(value) || strings.ContainsFunc(value, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }):
		return fmt.Errorf("invalid name %q: want printable text without spaces", value)
	}
	return nil
}

// split checks the shares of m at the key at.
func (k *checker) split(at string, m Model) {
	sum := 0.0
	for _, name := range slices.Sorted(maps.Keys(m.Split)) {
		weight, key := m.Split[name], joinKey(at, name)
		sum += weight
		switch {
		case !(weight >= 0) || math.IsInf(weight, 0): // the first is false for NaN, too
			k.add(key, "must be a weight of 0 or more, found %v", weight)
			return
		case name != m.Name && k.config.splits(name):
			k.add(key, "%q has a split itself: list its models here", name)
		default:
			k.modelName(key, name)
		}
	}
	switch {
	case !(sum > 0) || math.IsInf(sum, 0):
		k.add(at, "needs a model with a weight above 0, and a finite sum of weights")
	case len(m.Split) > MaxSplit:
		k.add(at, "must have at most %d models, found %d", MaxSplit, len(m.Split))
	}
}

// Model returns the [[model]] of that name, nil for none.
func (c *Config) Model(name string) *Model {
	for i := range c.Models {
		if c.Models[i].Name == name {
			return &c.Models[i]
		}
	}
	return nil
}

// splits reports whether requests for the name are split, perhaps through aliases.
func (c *Config) splits(name string) bool {
	for range c.Models { // bounds a cycle of aliases
		m := c.Model(name)
		switch {
		case m == nil:
			return false
		case len(m.Split) > 0:
			return true
		}
		name = m.AliasOf
	}
	return false
}

// modelCycles requires that each name leads to models that engines serve.
func (k *checker) modelCycles() {
	const done = 2 // 1: on the path of the present search
	seen := map[string]int{}
	var leads func(name string) bool
	leads = func(name string) bool {
		m := k.config.Model(name)
		if m == nil || seen[name] == done {
			return true
		}
		if seen[name] == 1 {
			return false
		}
		seen[name] = 1
		defer func() { seen[name] = done }()
		if m.AliasOf != "" && m.AliasOf != name && !leads(m.AliasOf) {
			return false
		}
		for _, next := range slices.Sorted(maps.Keys(m.Split)) {
			if next != name && !leads(next) {
				return false
			}
		}
		return true
	}
	for i, m := range k.config.Models {
		if seen[m.Name] == 0 && !leads(m.Name) {
			key := "alias_of"
			if m.AliasOf == "" {
				key = "split"
			}
			k.add(joinKey(indexKey("model", i), key), "leads back to %q through other [[model]] tables", m.Name)
		}
	}
}
