package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// step finds a file and a function of it in the text of docs/architecture.md.
var step = regexp.MustCompile("`([a-z0-9_/]+\\.go)` `(\\w+)`")

// TestArchitecture: each function that docs/architecture.md names is in the file that it names.
func TestArchitecture(t *testing.T) {
	page, err := os.ReadFile(root + "/docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	steps := step.FindAllStringSubmatch(string(page), -1)
	for _, s := range steps {
		source, err := os.ReadFile(filepath.Join(root, "proxy", s[1]))
		if err != nil {
			source, err = os.ReadFile(filepath.Join(root, s[1]))
		}
		if err != nil {
			t.Error(err)
			continue
		}
		if !regexp.MustCompile(`(?m)^func (\([^)]*\) )?` + s[2] + `\(`).Match(source) {
			t.Errorf("%s has no function %s", s[1], s[2])
		}
	}
	if len(steps) < 20 {
		t.Errorf("found only %d functions", len(steps))
	}
}
