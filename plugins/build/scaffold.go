package build

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/template"

	"github.com/pdproxy/pdproxy/abi"
)

// Kind is the kind of a new plugin.
type Kind string

// The kinds: the hook of a policy, or a filter. Policy is another name of Place.
const (
	Policy Kind = "policy"
	Place  Kind = "place"
	Plan   Kind = "plan"
	Mint   Kind = "mint"
	Leg    Kind = "leg"
	Score  Kind = "score" // a scorer for policy.place = "scores"
	Filter Kind = "filter"
)

// Kinds are all kinds.
var Kinds = []Kind{Place, Plan, Mint, Leg, Score, Filter}

// Language is the language of a new plugin.
type Language string

// The languages.
const (
	Go     Language = "go"
	TinyGo Language = "tinygo" // a plugin in Go whose README has the command that builds the plugin with TinyGo
	Rust   Language = "rust"
	C      Language = "c"
)

// Languages are all languages.
var Languages = []Language{Go, TinyGo, Rust, C}

// NewOptions are the options of New.
type NewOptions struct {
	Dir      string // folder to make; its last element is the plugin's name
	Kind     Kind
	Language Language
	// SDKDir, if not "", is a folder with pdproxy's sources for a policy in Go. Else
	// New copies the packages abi and abi/guest into the new folder.
	SDKDir string
	// Registry makes a filter over the SDK of the proxy-wasm project, which the first
	// build downloads from the registry of the language. Else the filter has no SDK.
	Registry bool
}

// ErrExists reports that the folder of a new plugin exists already.
var ErrExists = errors.New("the folder exists already")

//go:embed scaffold
var scaffolds embed.FS

// goodName matches names that are valid for a folder, a Go module and a plugin.
var goodName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]*$`)

// scaffold holds the values of the templates.
type scaffold struct {
	Name, Kind, Lang, Language string
	Policy, TinyGo, GoTest     bool
	Go, SDK                    string // the Go version of go.mod, and the folder of pdproxy's packages
	Registry                   string // that has the SDK; "" without an SDK
	Needs, Config, Spec        string // for README.md
	files                      map[string]string
}

// New makes a folder with the first files of a plugin: its source, test frames, and a README with
// the commands that build and run it. The folder has all files that the build needs, so that a
// plugin without an SDK from a registry builds without a network. New returns the names of the
// files.
func New(o NewOptions) ([]string, error) {
	s, err := newScaffold(o)
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(o.Dir, 0o755); errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("%s: %w", o.Dir, ErrExists)
	} else if err != nil {
		return nil, err
	}
	for name, from := range s.files {
		text, err := s.text(from)
		if err != nil {
			return nil, err
		}
		path := filepath.Join(o.Dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, err
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			return nil, err
		}
	}
	names := make([]string, 0, len(s.files))
	for name := range s.files {
		names = append(names, name)
	}
	slices.Sort(names)
	return names, nil
}

// newScaffold checks the options and lists the files of the folder.
func newScaffold(o NewOptions) (*scaffold, error) {
	if o.Kind == Policy {
		o.Kind = Place
	}
	name := filepath.Base(o.Dir)
	switch {
	case !goodName.MatchString(name):
		return nil, fmt.Errorf("%q is not a name for a plugin: use letters, digits, - and _, and begin with a letter or a digit", name)
	case !slices.Contains(Kinds, o.Kind):
		return nil, fmt.Errorf("%q is not a kind of plugin: place, plan, mint, leg, score or filter", o.Kind)
	case !slices.Contains(Languages, o.Language):
		return nil, fmt.Errorf("%q is not a language: go, tinygo, rust or c", o.Language)
	case o.SDKDir != "" && (o.Kind == Filter || o.Language != Go && o.Language != TinyGo):
		return nil, errors.New("abi/guest is for policies in Go: filters use one of the stock SDKs, or none")
	case o.Registry && (o.Kind != Filter || o.Language == C):
		return nil, errors.New("the SDKs of the proxy-wasm project are for filters in Go and Rust")
	}
	s := &scaffold{
		Name: name, Kind: string(o.Kind), Lang: string(o.Language), Policy: o.Kind != Filter, Go: "1.24",
		files: map[string]string{"README.md": "README.md", "frames.json": "frames/" + string(o.Kind) + ".json"},
	}
	switch o.Language {
	case C:
		s.addC()
	case Rust:
		s.addRust(o.Registry)
	default:
		s.TinyGo = o.Language == TinyGo
		if err := s.addGo(o); err != nil {
			return nil, err
		}
	}
	if s.Policy {
		s.Config = policyKeys(name, o.Kind, o.Language)
	}
	return s, nil
}

func (s *scaffold) addC() {
	s.Language, s.Needs = "C", "clang and wasm-ld"
	s.files["plugin.c"] = "c/" + s.Kind + ".c"
	if s.Policy {
		s.Spec = "abi.md"
		s.files["pdproxy.h"], s.files["abi.md"] = abiFile+"pdproxy.h", abiFile+"README.md"
	}
}

func (s *scaffold) addRust(registry bool) {
	s.Language, s.Needs = "Rust", "cargo and the target wasm32-unknown-unknown"
	s.files["lib.rs"], s.files["Cargo.toml"] = "rust/"+s.Kind+".rs", "rust/Cargo.toml"
	if registry {
		s.Registry, s.files["lib.rs"] = "crates.io", "registry/rust/filter.rs"
	}
	if s.Policy {
		s.Spec = "abi.md"
		s.files["pdproxy.rs"], s.files["abi.md"] = abiFile+"pdproxy.rs", abiFile+"README.md"
	}
}

func (s *scaffold) addGo(o NewOptions) error {
	s.Language, s.Needs = "Go", "Go 1.24 or later"
	if s.TinyGo {
		s.Needs += fmt.Sprintf(", and TinyGo 0.%d or later", oldestTinyGo)
	}
	s.files["main.go"], s.files["go.mod"] = "go/"+s.Kind+".go", "go/go.mod"
	if o.Registry {
		s.Registry = "the Go module proxy"
		s.files["main.go"], s.files["go.mod"], s.files["go.sum"] = "registry/go/filter.go", "registry/go/go.mod", "registry/go/go.sum"
	}
	if !s.Policy {
		return nil
	}
	s.GoTest = true
	s.files["main_test.go"] = "go/" + s.Kind + "_test.go"
	if o.SDKDir != "" {
		var err error
		s.SDK, s.Go, err = findSources(o.SDKDir)
		s.Spec = s.SDK + "/abi/README.md"
		return err
	}
	s.SDK, s.Spec = "./pdproxy", "pdproxy/abi/README.md"
	s.files["pdproxy/go.mod"] = "go/pdproxy.mod"
	return fs.WalkDir(abi.Sources, ".", func(path string, d fs.DirEntry, err error) error {
		if filepath.Ext(path) == ".go" || path == "README.md" {
			s.files["pdproxy/abi/"+path] = abiFile + path
		}
		return err
	})
}

// policyKeys returns the lines of the configuration that make a policy decide. A
// policy in Go has a name of its own, the others the name of the plugin.
func policyKeys(plugin string, kind Kind, language Language) string {
	names := map[Kind]string{Place: "/fewest_tokens", Plan: "/short", Mint: "/ids", Score: "/few_requests"}
	if language == C || language == Rust {
		names = nil
	}
	switch name := plugin + names[kind]; kind {
	case Leg:
		return "# Leg policies of all plugins serve; [policy] does not name them.\n"
	case Score:
		return fmt.Sprintf("[policy]\nplace = \"scores\"\n\n[[scores]]\nname = \"all\"\n\n[[scores.scorer]]\nname = \"prefix\"    # built in\nweight = 3\n\n[[scores.scorer]]\nname = %q\nweight = 2\n\n", name)
	case Plan:
		return fmt.Sprintf("[policy]\norder = [%q, \"auto\"]    # auto decides if this policy passes\n\n", name)
	default:
		return fmt.Sprintf("[policy]\n%s = %q\n\n", kind, name)
	}
}

// abiFile marks a file of package abi; the others are templates.
const abiFile = "abi:"

// text returns the content of a file.
func (s *scaffold) text(from string) ([]byte, error) {
	if name, ok := strings.CutPrefix(from, abiFile); ok {
		return fs.ReadFile(abi.Sources, name)
	}
	text, err := fs.ReadFile(scaffolds, "scaffold/"+from+".tmpl")
	if err != nil {
		return nil, err
	}
	t, err := template.New(from).Delims("[[", "]]").Funcs(template.FuncMap{"lower": strings.ToLower}).Parse(string(text))
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = t.Execute(&b, s)
	return b.Bytes(), err
}

// findSources returns the absolute path of a folder with pdproxy's sources, and
// the Go version in its go.mod. A module that uses it must not name an older
// version.
func findSources(dir string) (path, goVersion string, err error) {
	if dir, err = filepath.Abs(dir); err != nil {
		return "", "", err
	}
	text, err := os.ReadFile(filepath.Join(dir, "go.mod"))
	if err != nil {
		return "", "", fmt.Errorf("find pdproxy's sources: %w", err)
	}
	ours := false
	for line := range strings.Lines(string(text)) {
		switch word, rest, _ := strings.Cut(strings.TrimSpace(line), " "); word {
		case "module":
			ours = rest == "github.com/pdproxy/pdproxy"
		case "go":
			goVersion = rest
		}
	}
	if !ours || goVersion == "" {
		return "", "", fmt.Errorf("find pdproxy's sources: %s holds another module", dir)
	}
	return filepath.ToSlash(dir), goVersion, nil
}
