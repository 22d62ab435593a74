package docs

import (
	"go/build"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// designPage finds the line of a package comment that names a page of docs/design.
var designPage = regexp.MustCompile(`(?m)^// The decisions behind this package are in docs/design/([a-z]+)\.md\.$`)

// TestDesignPages: the comment of each package of the proxy names the page with the decisions
// behind the package, and each page is named.
func TestDesignPages(t *testing.T) {
	var pages []string
	for _, p := range readPages(t) {
		if dir, name := filepath.Split(p.path); dir == "design/" {
			pages = append(pages, strings.TrimSuffix(name, ".md"))
		}
	}
	named := map[string]bool{}
	for _, top := range []string{"proxy", "plugins", "abi", "cmd/node", "cmd/supervisor"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(dir string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return err
			}
			if d.Name() == "testdata" {
				return fs.SkipDir
			}
			p, err := build.ImportDir(dir, 0)
			if err != nil || len(p.GoFiles) == 0 {
				return nil //nolint:nilerr // a folder without a package of the proxy
			}
			page := pageOf(t, dir, p.GoFiles)
			switch {
			case page == "":
				t.Errorf("%s: no package comment ends with a line as in proxy/server.go that names a page of docs/design", dir)
			case !slices.Contains(pages, page):
				t.Errorf("%s: docs/design/%s.md does not exist", dir, page)
			}
			named[page] = true
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, page := range pages {
		if !named[page] {
			t.Errorf("no package comment names docs/design/%s.md", page)
		}
	}
	if len(pages) < 10 {
		t.Errorf("found only %q", pages)
	}
}

// pageOf returns the page that the package comment in one of the files names, or "".
func pageOf(t *testing.T, dir string, files []string) string {
	t.Helper()
	for _, name := range files {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		head, _, _ := strings.Cut(string(text), "\npackage ")
		if m := designPage.FindStringSubmatch(head); m != nil {
			return m[1]
		}
	}
	return ""
}
