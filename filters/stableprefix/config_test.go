package stableprefix

import (
	"strings"
	"testing"
)

func TestScopes(t *testing.T) {
	const text = `
# the first scope that matches a request applies
models = qwen3-*, glm-5   # two patterns
tenants = team-a
rules = safe, env_date

tenants = team-a
rules = none

models = *-coder
clients = any
rules = tool_order
`
	c, err := Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	if !c.AnyClient {
		t.Error("no scope takes any client")
	}
	for _, tt := range []struct{ model, tenant, want string }{
		{"qwen3-32b", "team-a", "billing_header env_date"}, {"glm-5", "team-a", "billing_header env_date"}, {"glm-5.3", "team-a", ""},
		{"x-coder", "team-a", ""}, {"x-coder", "", "tool_order any"}, {"x-coder-2", "", "no scope"},
	} {
		s, got := c.scope(tt.model, tt.tenant), "no scope"
		if s != nil {
			var names []string
			for _, r := range s.rules {
				names = append(names, r.Name)
			}
			if s.anyClient {
				names = append(names, "any")
			}
			got = strings.Join(names, " ")
		}
		if got != tt.want {
			t.Errorf("%s of %s: %s, want %s", tt.model, tt.tenant, got, tt.want)
		}
	}
	body := `{"model":"glm-5","system":"` + billing("1") + `A"}`
	for tenant, want := range map[string]string{"team-a": `{"model":"glm-5","system":"A"}`, "team-b": body} {
		if got, _ := changed(t, text, Messages, claudeCLI, tenant, body); got != want {
			t.Errorf("%s: %s", tenant, got)
		}
	}
}

// TestDefault: without a text, the safe rules hold for all models and tenants.
func TestDefault(t *testing.T) {
	for _, text := range []string{"", "\n\n# nothing\n"} {
		c, err := Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		s := c.scope("any", "")
		if s == nil || len(s.rules) != 1 || s.rules[0].Name != "billing_header" || s.anyClient {
			t.Errorf("%q: %+v", text, s)
		}
	}
}

func TestConfigErrors(t *testing.T) {
	for text, want := range map[string]string{
		"rules = billing_heder":               `line 1: there is no rule "billing_heder"; there are safe, none, billing_header, token_budget,`,
		"models = a\n\n\nmodel = b":           `line 4: there is no key "model"; there are models, tenants, rules, clients`,
		"models = a\nmodels = b":              "line 2: the scope has two lines models",
		"models":                              `line 1: "models" is not key = value`,
		"models = ,":                          "line 1: models has no value",
		"clients = all":                       "line 1: clients is known or any",
		"# comment\nrules = none, tool_order": "line 2: the rule none excludes other rules",
	} {
		if _, err := Parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

func TestMatch(t *testing.T) {
	for _, tt := range []struct {
		pattern, name string
		want          bool
	}{
		{"*", "", true}, {"*", "a/b", true}, {"a", "a", true}, {"a", "ab", false}, {"a*", "ab", true}, {"*b", "ab", true}, {"a*c*e", "abcde", true},
		{"a*c*e", "abde", false}, {"a*a", "a", false}, {"", "", true}, {"", "a", false}, {"**", "a", true}, {"*ab*ab", "ab", false},
	} {
		if got := match(tt.pattern, tt.name); got != tt.want {
			t.Errorf("match(%q, %q) = %v", tt.pattern, tt.name, got)
		}
	}
}

// TestTable: the names of rules are words of the configuration, and each rule has a description.
func TestTable(t *testing.T) {
	seen := map[string]bool{safe: true, none: true}
	for _, r := range Rules {
		if seen[r.Name] || r.Meaning == "" || r.Agents == 0 || strings.Trim(r.Name, "abcdefghijklmnopqrstuvwxyz_") != "" || (r.begin == "") != (r.Action == Sort) {
			t.Errorf("%+v", r)
		}
		if !r.Changes && r.Action != Remove {
			t.Errorf("%s moves a text, which the model reads in another place then", r.Name)
		}
		seen[r.Name] = true
	}
}
