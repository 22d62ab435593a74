package plugins

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestForms builds the plugin from all usual layouts of sources. None of its
// files may change.
func TestForms(t *testing.T) {
	for _, tt := range []struct {
		name   string
		dir    string // folder of the plugin, below the parent of the copy
		run    bool   // run the module; otherwise the module must equal the one that another test runs
		change func(t *testing.T, parent string)
	}{
		{"older SDK", "older", true, func(*testing.T, string) {}},
		{"vendored", "tetratelabs", false, func(t *testing.T, parent string) {
			run(t, filepath.Join(parent, "tetratelabs"), "go", "mod", "vendor")
		}},
		{"workspace", "tetratelabs", false, func(t *testing.T, parent string) {
			write(t, filepath.Join(parent, "sibling/go.mod"), "module example.com/sibling\n\ngo 1.24\n")
			write(t, filepath.Join(parent, "sibling/sibling.go"), "package sibling\n\nconst Name = `sibling`\n")
			write(t, filepath.Join(parent, "tetratelabs/sibling.go"), "package main\n\nimport \"example.com/sibling\"\n\nvar name = sibling.Name\n")
			write(t, filepath.Join(parent, "go.work"), "go 1.24\n\nuse (\n\t./tetratelabs\n\t./sibling\n)\n")
		}},
		{"folder below the module", "tetratelabs/cmd/tour", false, func(t *testing.T, parent string) {
			module := filepath.Join(parent, "tetratelabs")
			for _, name := range []string{"main.go", "tour.go"} {
				text, err := os.ReadFile(filepath.Join(module, name))
				if err != nil {
					t.Fatal(err)
				}
				write(t, filepath.Join(module, "cmd/tour", name), string(text))
				if err := os.Remove(filepath.Join(module, name)); err != nil {
					t.Fatal(err)
				}
			}
		}},
		{"SDK in a folder", "tetratelabs", false, func(t *testing.T, parent string) {
			module := filepath.Join(parent, "tetratelabs")
			sdk := strings.TrimSpace(run(t, module, "go", "list", "-m", "-f", "{{.Dir}}", sdks["tetratelabs"]))
			if err := os.CopyFS(filepath.Join(parent, "sdk"), os.DirFS(sdk)); err != nil {
				t.Fatal(err)
			}
			run(t, module, "go", "mod", "edit", "-replace", sdks["tetratelabs"]+"=../sdk")
		}},
		{"package for tests of plugins", "tetratelabs", false, func(t *testing.T, parent string) {
			write(t, filepath.Join(parent, "tetratelabs/emulator.go"),
				"package main\n\nimport \""+sdks["tetratelabs"]+"/proxywasm/proxytest\"\n\nvar _ = proxytest.NewEmulatorOption\n")
			run(t, filepath.Join(parent, "tetratelabs"), "go", "mod", "tidy")
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			parent := t.TempDir()
			if err := os.CopyFS(parent, os.DirFS("testdata")); err != nil {
				t.Fatal(err)
			}
			tt.change(t, parent)
			before := files(t, parent)
			module := buildPlugin(t, filepath.Join(parent, tt.dir))
			if !bytes.Contains(module, []byte("\x18proxy_on_request_headers")) {
				t.Error("the module has no callback")
			}
			if tt.run {
				w := newWorld(t, newCache(t), nil)
				url := w.serve(echo, w.start(module, nil))
				if status, headers, _ := w.do("POST", url+"/?q=1", ""); status != 200 || headers.Get("got-x-path") != "/?q=1" {
					t.Errorf("got status %d, headers %v", status, headers)
				}
			}
			if after := files(t, parent); after != before {
				t.Error("building changed the sources")
			}
		})
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func run(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(cmd.Environ(), "GOFLAGS=-mod=mod")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// files returns all files below a folder, as one text.
func files(t *testing.T, dir string) string {
	t.Helper()
	var all strings.Builder
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		all.WriteString(path + "\n" + string(text))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all.String()
}
