package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// page is a Markdown file below docs.
type page struct{ path, text string }

// readPages returns all Markdown files below docs, by their path from docs.
func readPages(t *testing.T) []page {
	t.Helper()
	var list []page
	top := root + "/docs"
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".md" {
			return err
		}
		text, err := os.ReadFile(path)
		name, _ := filepath.Rel(top, path)
		list = append(list, page{filepath.ToSlash(name), string(text)})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(list) < 40 {
		t.Fatalf("found only %d pages", len(list))
	}
	return list
}

// maxCell is the largest number of words in a cell of a table.
const maxCell = 25

var (
	linkTarget = regexp.MustCompile(`\]\([^)]*\)`)
	rule       = regexp.MustCompile(`^\|[ :|-]+\|$`)
	fence      = regexp.MustCompile("(?ms)^ *```.*?^ *```$")
)

// TestCellsAreShort: longer texts belong into a section or a list.
func TestCellsAreShort(t *testing.T) {
	tables := 0
	for _, p := range readPages(t) {
		for line := range strings.Lines(fence.ReplaceAllString(p.text, "")) {
			line = strings.TrimSpace(line)
			if !strings.HasPrefix(line, "|") {
				continue
			}
			if rule.MatchString(line) {
				tables++
			}
			for cell := range strings.SplitSeq(linkTarget.ReplaceAllString(line, "]"), "|") {
				if words := len(strings.Fields(cell)); words > maxCell {
					t.Errorf("%s: a cell has %d words: %s", p.path, words, strings.TrimSpace(cell))
				}
			}
		}
	}
	if tables < 20 {
		t.Errorf("found only %d tables", tables)
	}
}

// TestNavigation: each page is in the navigation of the site, directly or in a folder.
func TestNavigation(t *testing.T) {
	config, err := os.ReadFile(root + "/mkdocs.yml")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range readPages(t) {
		nav := string(config)
		if !strings.Contains(nav, " "+p.path+"\n") && !strings.Contains(nav, " "+filepath.Dir(p.path)+"/\n") {
			t.Errorf("%s is not in the navigation of mkdocs.yml", p.path)
		}
	}
}
