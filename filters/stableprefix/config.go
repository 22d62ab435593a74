package stableprefix

import (
	"strconv"
	"strings"
)

// Config is the configuration of the filter: scopes, of which the first that matches a request
// applies. It is safe for concurrent use.
type Config struct {
	scopes []scope
	// AnyClient is whether some scope applies the rules to requests of all clients.
	AnyClient bool
}

// scope has the rules for the requests of some models and tenants.
type scope struct {
	models, tenants []string // patterns; nil: all
	rules           []*Rule  // in the order of Rules
	anyClient       bool     // else the request must be one of an agent of the rule
}

// Error is an error in the text of a configuration.
type Error struct {
	Line    int // from 1
	Message string
	// Name is the unknown word, and Known are the words that are possible there. They are empty if
	// the error is another one.
	Name  string
	Known []string
}

// Error implements error.
func (e *Error) Error() string {
	text := "line " + strconv.Itoa(e.Line) + ": " + e.Message
	if len(e.Known) > 0 {
		text += "; there are " + strings.Join(e.Known, ", ")
	}
	return text
}

// safe is the name of all rules that do not change what the model is asked, and none of no rule.
const safe, none = "safe", "none"

// Parse reads a configuration. Each line is "key = value, value", or a comment after #. An empty
// line begins the next scope. The keys are models, tenants, rules and clients. The error is an
// *Error.
func Parse(text string) (*Config, error) {
	c := &Config{}
	keys := map[string]bool{} // of the scope
	number := 0
	for line := range strings.Lines(text) {
		number++
		line, comment, _ := strings.Cut(line, "#")
		if line = strings.TrimSpace(line); line == "" {
			if comment == "" {
				clear(keys)
			}
			continue
		}
		key, values, ok := strings.Cut(line, "=")
		if key = strings.TrimSpace(key); !ok {
			return nil, &Error{Line: number, Message: strconv.Quote(line) + " is not key = value"}
		}
		if keys[key] {
			return nil, &Error{Line: number, Message: "the scope has two lines " + key + "; an empty line begins the next scope"}
		}
		if len(keys) == 0 {
			c.scopes = append(c.scopes, newScope())
		}
		keys[key] = true
		if err := c.scopes[len(c.scopes)-1].set(key, list(values)); err != nil {
			err.Line = number
			return nil, err
		}
	}
	if len(c.scopes) == 0 {
		c.scopes = []scope{newScope()}
	}
	for _, s := range c.scopes {
		c.AnyClient = c.AnyClient || s.anyClient
	}
	return c, nil
}

func newScope() scope {
	s := scope{}
	_ = s.setRules([]string{safe})
	return s
}

// list splits the values of a line.
func list(values string) []string {
	var all []string
	for v := range strings.SplitSeq(values, ",") {
		if v = strings.TrimSpace(v); v != "" {
			all = append(all, v)
		}
	}
	return all
}

// set sets one key.
func (s *scope) set(key string, values []string) *Error {
	if len(values) == 0 {
		return &Error{Message: key + " has no value"}
	}
	switch key {
	case "models":
		s.models = values
	case "tenants":
		s.tenants = values
	case "rules":
		return s.setRules(values)
	case "clients":
		switch {
		case len(values) == 1 && values[0] == "known":
			s.anyClient = false
		case len(values) == 1 && values[0] == "any":
			s.anyClient = true
		default:
			return &Error{Message: "clients is known or any"}
		}
	default:
		return &Error{Message: "there is no key " + strconv.Quote(key), Name: key, Known: []string{"models", "tenants", "rules", "clients"}}
	}
	return nil
}

// setRules sets the rules by their names.
func (s *scope) setRules(names []string) *Error {
	s.rules = nil
	chosen := map[string]bool{}
	for _, name := range names {
		chosen[name] = true
	}
	known := []string{safe, none}
	for i := range Rules {
		r := &Rules[i]
		if known = append(known, r.Name); chosen[r.Name] || chosen[safe] && !r.Changes {
			s.rules = append(s.rules, r)
		}
		delete(chosen, r.Name)
	}
	if chosen[none] && len(names) > 1 {
		return &Error{Message: "the rule none excludes other rules"}
	}
	for _, name := range names {
		if chosen[name] && name != safe && name != none {
			return &Error{Message: "there is no rule " + strconv.Quote(name), Name: name, Known: known}
		}
	}
	return nil
}

// scope returns the scope of a request; nil if there is none.
func (c *Config) scope(model, tenant string) *scope {
	for i := range c.scopes {
		if s := &c.scopes[i]; matches(s.models, model) && matches(s.tenants, tenant) {
			return s
		}
	}
	return nil
}

func matches(patterns []string, name string) bool {
	for _, p := range patterns {
		if match(p, name) {
			return true
		}
	}
	return patterns == nil
}

// match reports whether a name matches a pattern, in which * stands for any text.
func match(pattern, name string) bool {
	first, rest, star := strings.Cut(pattern, "*")
	if !star {
		return pattern == name
	}
	if !strings.HasPrefix(name, first) {
		return false
	}
	name = name[len(first):]
	for {
		part, more, star := strings.Cut(rest, "*")
		if !star {
			return strings.HasSuffix(name, part)
		}
		i := strings.Index(name, part)
		if i < 0 {
			return false
		}
		name, rest = name[i+len(part):], more
	}
}
