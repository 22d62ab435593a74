package quickstart

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestNames compares all flags, environment variables, and members of JSON and YAML values
// with the kept lists of the engines' names. A name that is not in the list of its engine
// has not been checked against the engine's source.
func TestNames(t *testing.T) {
	used := map[string]map[string]bool{} // list, then name
	each(t, func(t *testing.T, p *Plan, _ Options) {
		lists := []string{strings.ReplaceAll(strings.ToLower(p.Release), " ", "-")}
		if len(p.Services) > 0 {
			lists = append(lists, "lmcache-"+lmcacheVer)
		}
		for name := range namesOf(t, p) {
			found := false
			for _, list := range lists {
				if used[list] == nil {
					used[list] = map[string]bool{}
				}
				if kept(t, list)[name] {
					used[list][name], found = true, true
				}
			}
			if !found {
				t.Errorf("%q is not in %v", name, lists)
			}
		}
	})
	for list, names := range used {
		for name := range kept(t, list) {
			if !names[name] {
				t.Errorf("no quickstart uses %q of %s", name, list)
			}
		}
	}
}

// kept reads a list: "KIND NAME" of each line that is no comment.
func kept(t *testing.T, list string) map[string]bool {
	t.Helper()
	text, err := os.ReadFile("testdata/" + list + ".txt")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) < 3 {
			t.Fatalf("%s: %q has no kind, name and source", list, line)
		}
		names[fields[0]+" "+fields[1]] = true
	}
	return names
}

var yamlKey = regexp.MustCompile(`(?m)^ *([a-z_]+):`)

// namesOf returns the names that a plan takes from the engine, as "KIND NAME".
func namesOf(t *testing.T, p *Plan) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for i := range p.Engines {
		e := &p.Engines[i]
		for _, v := range e.Env {
			name, _, _ := strings.Cut(v, "=")
			names["env "+name] = true
		}
		for _, arg := range e.Command {
			if strings.HasPrefix(arg, "--") {
				names["flag "+arg] = true
			}
			if strings.HasPrefix(arg, "{") {
				var value any
				if err := json.Unmarshal([]byte(arg), &value); err != nil {
					t.Fatalf("%s: %v: %s", e.Name, err, arg)
				}
				members(value, names)
			}
		}
	}
	for _, f := range p.Files {
		for _, m := range yamlKey.FindAllStringSubmatch(f.Text, -1) {
			names["yaml "+m[1]] = true
		}
	}
	return names
}

func members(value any, names map[string]bool) {
	switch v := value.(type) {
	case map[string]any:
		for name, inner := range v {
			names["json "+name] = true
			members(inner, names)
		}
	case []any:
		for _, inner := range v {
			members(inner, names)
		}
	}
}
