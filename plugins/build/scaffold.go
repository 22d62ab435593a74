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
	"strings"
	"text/template"
)

// Kind is the kind of a new plugin.
type Kind string

// The kinds.
const (
	Policy Kind = "policy"
	Filter Kind = "filter"
)

// ErrExists reports that the folder of a new plugin exists already.
var ErrExists = errors.New("the folder exists already")

//go:embed scaffold
var scaffolds embed.FS

// goodName matches names that are valid for a folder, a Go module and a plugin.
var goodName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]*$`)

// New makes a folder with the first files of a plugin: its source, tests, and a
// README that says how to build and run it. The last element of dir is the
// plugin's name. The plugin builds with Go alone and needs no network. sdk, if
// not "", is a folder with pdproxy's sources; a policy then uses the package
// abi/guest. Otherwise the policy's own source contains the few lines of the
// contract, as a filter's does. New returns the names of the files.
func New(dir string, kind Kind, sdk string) ([]string, error) {
	name := filepath.Base(dir)
	if !goodName.MatchString(name) {
		return nil, fmt.Errorf("%q is not a name for a plugin: use letters, digits, - and _, and begin with a letter or a digit", name)
	}
	set, goVersion := string(kind), ""
	switch {
	case kind != Policy && kind != Filter:
		return nil, fmt.Errorf("%q is not a kind of plugin: policy or filter", kind)
	case sdk != "" && kind == Filter:
		return nil, errors.New("abi/guest is for policies: filters use one of the stock SDKs, or none")
	case sdk != "":
		set = "sdkpolicy"
		var err error
		if sdk, goVersion, err = findSources(sdk); err != nil {
			return nil, err
		}
	}
	if err := os.Mkdir(dir, 0o755); errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("%s: %w", dir, ErrExists)
	} else if err != nil {
		return nil, err
	}
	templates, err := fs.Sub(scaffolds, "scaffold/"+set)
	if err != nil {
		return nil, err
	}
	return writeScaffold(dir, templates, map[string]string{"Name": name, "SDK": sdk, "Go": goVersion})
}

// writeScaffold fills in the templates and writes them without their suffix.
func writeScaffold(dir string, templates fs.FS, values map[string]string) ([]string, error) {
	files, err := template.New("").Delims("[[", "]]").Funcs(template.FuncMap{"lower": strings.ToLower}).ParseFS(templates, "*.tmpl")
	if err != nil {
		return nil, err
	}
	var names []string
	for _, t := range files.Templates() {
		name, ok := strings.CutSuffix(t.Name(), ".tmpl")
		if !ok {
			continue
		}
		var text bytes.Buffer
		if err := t.Execute(&text, values); err != nil {
			return nil, err
		}
		if err := os.WriteFile(filepath.Join(dir, name), text.Bytes(), 0o644); err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return names, nil
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
