package quickstart

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the pages of docs/quickstart anew")

const pagesFolder = "../docs/quickstart"

// TestPages compares docs/quickstart with the pages that the table generates.
func TestPages(t *testing.T) {
	pages, err := Pages()
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, page := range pages {
		want = append(want, page.Name)
		path := filepath.Join(pagesFolder, page.Name)
		if *update {
			if err := os.MkdirAll(pagesFolder, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(page.Text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if text, err := os.ReadFile(path); err != nil || string(text) != page.Text {
			t.Errorf("%s differs from the table (%v): run make quickstart", path, err)
		}
	}
	entries, err := os.ReadDir(pagesFolder)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !slices.Contains(want, e.Name()) {
			t.Errorf("%s: no quickstart has this page", e.Name())
		}
	}
}

// TestTablesAreShort holds the cells of tables to 25 words.
func TestTablesAreShort(t *testing.T) {
	pages, err := Pages()
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		for line := range strings.Lines(page.Text) {
			if !strings.HasPrefix(line, "|") {
				continue
			}
			for cell := range strings.SplitSeq(line, "|") {
				if n := len(strings.Fields(cell)); n > 25 {
					t.Errorf("%s: a cell of %d words: %s", page.Name, n, cell)
				}
			}
		}
	}
}
