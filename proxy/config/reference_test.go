package config

import (
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// referencePath is the config.toml at the root of the repository.
const referencePath = "../../config.toml"

func readReference(t testing.TB) string {
	t.Helper()
	data, err := os.ReadFile(referencePath)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// optional matches the start of a line of an optional section.
var optional = regexp.MustCompile(`(?m)^#([\[a-z])`)

func TestReferenceRunsAsItIs(t *testing.T) {
	cfg, err := Parse([]byte(readReference(t)))
	if err != nil {
		t.Fatal(err)
	}
	if warnings := cfg.Warnings(); len(warnings) > 0 {
		t.Errorf("warnings: %v", warnings)
	}
	engines := cfg.Engines
	cfg.Engines, cfg.lines = nil, nil
	cfg.Policy.Order, cfg.Discovery.Etcd.Endpoints, cfg.Discovery.Allow, cfg.Fleet.Etcd.Endpoints = nil, nil, nil, nil
	cfg.Sidecar.Policies, cfg.Sidecar.Callers = nil, nil // empty arrays in the file
	if want := Default(); !reflect.DeepEqual(cfg, want) {
		t.Errorf("the file differs from the default configuration (engines apart): got %+v\nwant %+v", cfg, want)
	}
	p0, d0 := DefaultEngine(), DefaultEngine()
	p0.Name, p0.URL, p0.Role, p0.Connector = "p0", "http://127.0.0.1:8100", RolePrefill, ConnectorVLLMNixl
	d0.Name, d0.URL, d0.Role, d0.Connector = "d0", "http://127.0.0.1:8200", RoleDecode, ConnectorVLLMNixl
	if want := []Engine{p0, d0}; !reflect.DeepEqual(engines, want) {
		t.Errorf("engines: got %+v\nwant %+v", engines, want)
	}
}

// TestReferenceHasEveryKey uncomments the optional sections. Then the file must have
// each key of the structs, with its default and a comment. Within a table the keys
// have the order of the struct's fields.
func TestReferenceHasEveryKey(t *testing.T) {
	text := optional.ReplaceAllString(readReference(t), "$1")
	if problems, ok := parseError(text).(Problems); ok {
		for _, p := range problems {
			t.Error(p)
		}
	}
	index := scanLines(text)
	cfg := Default()
	cfg.Engines, cfg.Plugins, cfg.Upstreams = []Engine{DefaultEngine()}, []Plugin{DefaultPlugin()}, make([]Upstream, 1)
	cfg.Models, cfg.Remotes = make([]Model, 1), make([]Remote, 1)
	cfg.PriorityClasses = []PriorityClass{DefaultPriorityClass()}
	cfg.Scores = []ScoreSet{DefaultScoreSet()}
	cfg.Scores[0].Scorers = []Scorer{DefaultScorer()}
	cfg.Tenants, cfg.JWTs = []Tenant{DefaultTenant()}, []JWT{DefaultJWT()}
	example := map[string]bool{ // for these keys the file shows an example, not the default
		"engine.name": true, "engine.url": true, "engine.role": true, "engine.connector": true,
		"plugin.name": true, "plugin.path": true, "upstream.name": true, "upstream.url": true,
		"priority_class.name": true, "model.name": true, "model.alias_of": true, "remote.name": true, "remote.url": true, "remote.model": true,
		"scores.name": true, "scores.scorer.name": true, "tenant.name": true, "jwt.issuer": true, "jwt.audience": true, "jwt.jwks_url": true, "jwt.tenant": true,
	}
	lines := strings.Split(text, "\n")
	previous := map[string]int{}
	walk("", "", reflect.ValueOf(&cfg).Elem(), func(key, plain string, v reflect.Value) {
		line, found := index[key]
		if !found {
			t.Errorf("%s is not in the file", key)
			return
		}
		if v.Kind() == reflect.Struct {
			return
		}
		table := key[:strings.LastIndexByte(key, '.')]
		if line <= previous[table] {
			t.Errorf("key %s on line %d is out of order", key, line)
		}
		previous[table] = line
		source := lines[line-1]
		name := key[len(table)+1:]
		if !regexp.MustCompile(`^` + name + ` = .*\S +# \S`).MatchString(source) {
			t.Errorf("line %d: %q is not `%s = value # comment`", line, source, name)
		}
		if !example[plain] {
			checkDefault(t, key, plain, source, v)
		}
	})
}

// parseError is the error of parsing text.
func parseError(text string) error {
	_, err := Parse([]byte(text))
	return err
}

// checkDefault decodes one line of the file into a field with another value, and
// compares the result with the default in v.
func checkDefault(t *testing.T, key, plain, source string, v reflect.Value) {
	t.Helper()
	table := plain[:strings.LastIndexByte(plain, '.')]
	header := "[" + table + "]\n"
	if slices.Contains([]string{"engine", "plugin", "upstream", "model", "priority_class", "remote", "tenant", "jwt", "scores"}, table) {
		header = "[[" + table + "]]\n"
	} else if table == "scores.scorer" {
		header = "[[scores]]\n[[scores.scorer]]\n"
	}
	var got Config
	if problems := decodeTree(mustTree(t, header+source), &got); len(problems) > 0 {
		t.Errorf("%s: decodeTree(mustTree(header+source), &got) = %v", key, problems)
	}
	found := false
	walk("", "", reflect.ValueOf(&got).Elem(), func(k, _ string, field reflect.Value) {
		if k != key {
			return
		}
		found = true
		if (v.Kind() == reflect.Slice || v.Kind() == reflect.Map) && v.Len() == 0 && field.Len() == 0 {
			return
		}
		if !reflect.DeepEqual(field.Interface(), v.Interface()) {
			t.Errorf("%s: value in the file %v, default %v", key, field, v)
		}
	})
	if !found {
		t.Errorf("%s: line %q sets nothing", key, source)
	}
}
