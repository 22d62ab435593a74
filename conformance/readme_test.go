package conformance

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"

	"github.com/pdproxy/pdproxy/proxy/config"
)

var tomlBlock = regexp.MustCompile("(?s)```toml\n(.*?)```")

// Every configuration shown in a document can be run.
func TestConfigurationsInDocuments(t *testing.T) {
	var files []string
	for _, pattern := range []string{"../README.md", "../docs/*.md", "../docs/*/*.md", "../policies/*/README.md", "../config.toml"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	blocks := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		shown := []string{string(text)}
		if filepath.Ext(file) == ".md" {
			shown = nil
			for _, m := range tomlBlock.FindAllStringSubmatch(string(text), -1) {
				shown = append(shown, m[1])
			}
		}
		for _, s := range shown {
			blocks++
			if _, err := config.Parse([]byte(s)); err != nil {
				t.Errorf("%s: config.Parse([]byte(s)) = %v, want nil", file, err)
			}
		}
	}
	if blocks < 3 {
		t.Errorf("only %d configurations found", blocks)
	}
}

// The commands in README are targets of the Makefile.
func TestCommandsInReadme(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile("(?m)^make ([a-z-]+)").FindAllStringSubmatch(string(readme), -1) {
		if !strings.Contains(string(makefile), "\n"+m[1]+":") {
			t.Errorf("README names make %s, which the Makefile does not have", m[1])
		}
	}
	ci, err := os.ReadFile("../.ci/run")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(ci), "make test") {
		t.Error("CI does not run README's test command")
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	code    = regexp.MustCompile("(?ms)^```.*?^```|`[^`\n]*`")
)

// Every link between documents leads to a file that exists, and to a heading in it.
func TestLinksInDocuments(t *testing.T) {
	links := 0
	for _, file := range documents(t) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllStringSubmatch(code.ReplaceAllString(string(text), ""), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			links++
			path, anchor, _ := strings.Cut(m[1], "#")
			target := file
			if path != "" {
				target = filepath.Join(filepath.Dir(file), path)
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s: link to %s: %v", file, m[1], err)
			} else if anchor != "" && !hasHeading(t, target, anchor) {
				t.Errorf("%s: link to %s: there is no such heading", file, m[1])
			}
		}
	}
	if links < 50 {
		t.Errorf("only %d links found", links)
	}
}

// documents returns the paths of all Markdown files of the project.
func documents(t *testing.T) []string {
	t.Helper()
	var files []string
	for _, pattern := range []string{"../*.md", "../*/*.md", "../*/*/*.md"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range found {
			if !strings.HasPrefix(f, "../build/") {
				files = append(files, f)
			}
		}
	}
	return files
}

// hasHeading reports whether file has a heading with the anchor that Git hosts derive
// from it: lower case, spaces as hyphens, without punctuation.
func hasHeading(t *testing.T, file, anchor string) bool {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range heading.FindAllStringSubmatch(string(text), -1) {
		slug := strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
				return unicode.ToLower(r)
			}
			return -1
		}, m[1])
		if slug == anchor {
			return true
		}
	}
	return false
}
