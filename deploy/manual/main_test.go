package main

import (
	"bytes"
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// page returns the text of a compressed page.
func page(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestPagesAndCompletions(t *testing.T) {
	dir := t.TempDir()
	stale := filepath.Join(dir, "man/pdproxy-gone.1.gz")
	if err := os.MkdirAll(filepath.Dir(stale), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(stale, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := write(dir, "1.2.3", time.Unix(0, 0).UTC()); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"pdproxy": "pdproxy-run", "pdproxy-run": "--takeover", "pdproxy-plugin-build": "plugin"} {
		text := strings.ReplaceAll(page(t, filepath.Join(dir, "man", name+".1.gz")), `\-`, "-")
		if !strings.Contains(text, want) || !strings.Contains(text, `"Jan 1970" "pdproxy 1.2.3"`) {
			t.Errorf("%s has no %q, or another head:\n%s", name, want, text)
		}
	}
	if _, err := os.Stat(stale); !os.IsNotExist(err) {
		t.Errorf("the page of a former command is still there: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "man/*.1")); len(left) > 0 {
		t.Errorf("not compressed: %v", left)
	}
	for _, name := range []string{"pdproxy", "_pdproxy", "pdproxy.fish"} {
		script, err := os.ReadFile(filepath.Join(dir, "completions", name))
		if err != nil || !bytes.Contains(script, []byte("__complete")) {
			t.Errorf("%s: %v\n%s", name, err, script)
		}
	}
	first, err := os.ReadFile(filepath.Join(dir, "man/pdproxy.1.gz"))
	if err != nil {
		t.Fatal(err)
	}
	if err := write(dir, "1.2.3", time.Unix(0, 0).UTC()); err != nil {
		t.Fatal(err)
	}
	if second, err := os.ReadFile(filepath.Join(dir, "man/pdproxy.1.gz")); err != nil || !bytes.Equal(first, second) {
		t.Errorf("two runs give different pages: %v", err)
	}
}
