package plugins

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/cmd"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// block is a piece of code in a document.
type block struct{ language, text string }

var fences = regexp.MustCompile("(?ms)^```([a-z]+)\n(.*?)^```$")

func blocks(t *testing.T, document string) []block {
	t.Helper()
	return blocksOf(t, filepath.Join("../..", document))
}

// blocksOf returns the code in the file of a document.
func blocksOf(t *testing.T, path string) []block {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var found []block
	for _, m := range fences.FindAllStringSubmatch(string(text), -1) {
		found = append(found, block{m[1], m[2]})
	}
	return found
}

// module makes a folder for a plugin that may import pdproxy and the SDK.
func module(t *testing.T, source string) string {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "first")
	write(t, filepath.Join(dir, "main.go"), source)
	switch {
	case strings.Contains(source, "tetratelabs"):
		for _, name := range []string{"go.mod", "go.sum"} {
			text, err := os.ReadFile(filepath.Join("testdata/tetratelabs", name))
			if err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(dir, name), string(text))
		}
	default:
		write(t, filepath.Join(dir, "go.mod"), "module first\n\ngo 1.26.0\n\nrequire github.com/pdproxy/pdproxy v0.0.0\n\n"+
			"replace github.com/pdproxy/pdproxy => "+root+"\n")
	}
	return dir
}

// pdproxy runs a command line.
func pdproxy(args ...string) (code int, out string) {
	var b bytes.Buffer
	code = cmd.Main(args, &b, &b)
	return code, b.String()
}

// TestFirstPolicy follows the tutorial of the first policy, and then "Your first plugin" of
// README, without a network.
func TestFirstPolicy(t *testing.T) {
	page := blocks(t, "docs/tutorials/first-policy.md")
	readme := blocks(t, "README.md")
	t.Chdir(t.TempDir())
	t.Setenv("GOFLAGS", "-mod=mod")
	t.Setenv("GOPROXY", "off")
	checked := func(text string) {
		write(t, "config.toml", text+"[[engine]]\nname = 'e'\nurl = 'http://127.0.0.1:1'\nrole = 'both'\n")
		shell(t, "pdproxy check config.toml\n")
	}
	sources := 0
	for _, b := range page {
		switch {
		case b.language == "sh" && (strings.HasPrefix(b.text, "pdproxy plugin") || strings.HasPrefix(b.text, "go ")):
			shell(t, b.text)
		case b.language == "go":
			sources++
			if got, err := os.ReadFile("nearest/main.go"); err != nil || string(got) != b.text {
				t.Errorf("nearest/main.go is not that of the tutorial: %v\n%s", err, got)
			}
		}
	}
	if _, err := os.Stat("nearest/nearest.wasm"); err != nil || sources != 1 {
		t.Errorf("the tutorial shows %d sources and builds: %v", sources, err)
	}
	os.RemoveAll("nearest")
	i := slices.IndexFunc(readme, func(b block) bool { return strings.HasPrefix(b.text, "pdproxy plugin new") })
	if i < 0 {
		t.Fatal("README has no first plugin")
	}
	shell(t, readme[i].text)
	checked(readme[i+1].text)
}

// shell runs lines of pdproxy and go.
func shell(t *testing.T, lines string) {
	t.Helper()
	for line := range strings.Lines(lines) {
		line, _, _ = strings.Cut(line, "#")
		words := strings.Fields(line)
		if words[0] == "go" {
			if out, err := exec.Command("go", words[1:]...).CombinedOutput(); err != nil {
				t.Errorf("%s: %v\n%s", line, err, out)
			}
		} else if code, out := pdproxy(words[1:]...); words[0] != "pdproxy" || code != 0 {
			t.Errorf("%s: exit %d: %s", line, code, out)
		}
	}
}

// TestDocument: sources build, configurations are accepted, frames are read.
func TestDocument(t *testing.T) {
	var modules []string
	for _, b := range blocks(t, "docs/howto/plugins.md") {
		switch b.language {
		case "go":
			dir := module(t, b.text)
			if code, out := pdproxy("plugin", "build", dir); code != 0 {
				t.Errorf("%s\n%s", out, b.text)
			}
			modules = append(modules, filepath.Join(dir, "first.wasm"))
		case "toml":
			engines := "[[engine]]\nname = 'e'\nurl = 'http://127.0.0.1:1'\nrole = 'both'\n"
			if _, err := config.Parse([]byte(b.text + engines)); err != nil {
				t.Errorf("%v\n%s", err, b.text)
			}
		case "json":
			testFrames(t, modules[0], b.text)
		}
	}
	if len(modules) != 3 {
		t.Errorf("got %d plugins", len(modules))
	}
	for _, b := range blocks(t, "docs/reference/plugin-frames.md") {
		if b.language == "json" {
			testFrames(t, modules[0], b.text)
		}
	}
}

// testFrames runs frames of a document.
func testFrames(t *testing.T, module, text string) {
	t.Helper()
	frames := filepath.Join(t.TempDir(), "frames.json")
	write(t, frames, text)
	// 2 would be a frame that cannot be read.
	if code, out := pdproxy("plugin", "test", module, frames); code == 2 {
		t.Errorf("%s\n%s", out, text)
	}
}
