package conformance

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

var tomlBlock = regexp.MustCompile("(?s)```toml\n(.*?)```")

// Every configuration shown in a document can be run.
func TestConfigurationsInDocuments(t *testing.T) {
	var files []string
	for _, pattern := range []string{"../README.md", "../docs/*.md", "../policies/*/README.md", "../config.toml"} {
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
				t.Errorf("%s: %v", file, err)
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
