package plugins

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/plugins/build"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestScaffolds makes, builds and tests a plugin of each kind in each language, in an
// empty folder and without a network. Without a compiler the test checks that the error
// names the compiler. make test-authors installs the compilers.
func TestScaffolds(t *testing.T) {
	t.Setenv("GOFLAGS", "-mod=mod")
	t.Setenv("GOPROXY", "off")
	t.Setenv("CARGO_NET_OFFLINE", "true")
	for _, language := range build.Languages {
		for _, kind := range build.Kinds {
			t.Run(string(language)+" "+string(kind), func(t *testing.T) {
				t.Chdir(t.TempDir())
				checkScaffold(t, language, "--kind", string(kind))
			})
		}
	}
}

// TestScaffoldsOverSDKs is TestScaffolds for filters over the stock SDKs, which come
// from the registries of Go and Rust.
func TestScaffoldsOverSDKs(t *testing.T) {
	for _, language := range []build.Language{build.Go, build.TinyGo, build.Rust} {
		t.Run(string(language), func(t *testing.T) {
			t.Chdir(t.TempDir())
			checkScaffold(t, language, "--kind", "filter", "--sdk")
		})
	}
}

// TestScaffoldOverCheckout uses pdproxy's sources in place of the copy.
func TestScaffoldOverCheckout(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	checkScaffold(t, build.Go, "--kind", "policy", "--sdk-dir", root)
	if _, err := os.Stat("My-1st_plugin/pdproxy"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the sources were copied: %v", err)
	}
}

// checkScaffold follows the README of a new plugin.
func checkScaffold(t *testing.T, language build.Language, flags ...string) {
	const name = "My-1st_plugin"
	if code, out := pdproxy(append([]string{"plugin", "new", name, "--lang", string(language)}, flags...)...); code != 0 {
		t.Fatal(out)
	}
	readme := ""
	for _, b := range blocksOf(t, filepath.Join(name, "README.md")) {
		switch b.language {
		case "sh":
			readme = b.text
		case "toml":
			engines := "[[engine]]\nname = 'e'\nurl = 'http://127.0.0.1:1'\nrole = 'both'\n"
			if _, err := config.Parse([]byte(b.text + engines)); err != nil {
				t.Errorf("%v\n%s", err, b.text)
			}
		}
	}
	for line := range strings.Lines(readme) {
		line, _, _ = strings.Cut(line, "#")
		words := strings.Fields(line)
		if words[0] == "go" {
			if out, err := exec.Command("go", words[1:]...).CombinedOutput(); err != nil {
				t.Errorf("%s: %v\n%s", line, err, out)
			}
			continue
		}
		code, out := pdproxy(words[1:]...)
		if language == build.TinyGo && words[2] == "build" && code == 0 {
			checkTinyGo(t, out)
		}
		if missing := missingCompiler(language); missing != nil && words[2] == "build" {
			if code != 1 || !strings.Contains(out, missing.Error()) {
				t.Errorf("%s: exit %d: %s", line, code, out)
			}
			if compilersInstalled {
				t.Error(out)
			}
			t.Logf("not built: %s", out)
			return
		}
		if code != 0 {
			t.Fatalf("%s: exit %d: %s", line, code, out)
		}
	}
}

// checkTinyGo checks that the output of a build names the TinyGo in PATH, and logs its version.
func checkTinyGo(t *testing.T, out string) {
	t.Helper()
	version, err := exec.Command("tinygo", "version").Output()
	if err != nil {
		t.Fatal(err)
	}
	words := strings.Fields(string(version)) // tinygo version 0.37.0 linux/amd64 ...
	if len(words) < 3 || !strings.Contains(out, "compiler tinygo "+words[2]+",") {
		t.Errorf("tinygo printed %q, the build %q", version, out)
	}
	t.Logf("built with %s%s", version, out)
}

// compilersInstalled is set by make test-authors.
var compilersInstalled bool

// missingCompiler returns the error of a build on this machine, nil if the compiler of
// the language and its WebAssembly target are there.
func missingCompiler(language build.Language) error {
	lacks := func(command string, args ...string) bool { return exec.Command(command, args...).Run() != nil }
	switch language {
	case build.TinyGo:
		if lacks("tinygo", "version") {
			return build.ErrNoTinyGo
		}
	case build.C:
		if lacks("clang", "--version") {
			return build.ErrNoClang
		}
		if path, err := exec.Command("clang", "--target=wasm32", "--print-prog-name=wasm-ld").Output(); err != nil || lacks(strings.TrimSpace(string(path)), "--version") {
			return build.ErrNoLinker
		}
	case build.Rust:
		if lacks("cargo", "--version") || lacks("rustc", "--version") {
			return build.ErrNoRust
		}
		libraries, err := exec.Command("rustc", "--print", "target-libdir", "--target", "wasm32-unknown-unknown").Output()
		if _, missing := os.Stat(strings.TrimSpace(string(libraries))); err != nil || missing != nil {
			return build.ErrNoTarget
		}
	}
	return nil
}
