package plugins

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
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

// TestFirstPlugin follows the steps of the README.
func TestFirstPlugin(t *testing.T) {
	var source, frames string
	for _, b := range blocks(t, "README.md") {
		switch {
		case b.language == "go":
			source = b.text
		case b.language == "json" && strings.Contains(b.text, `"hook"`):
			frames = b.text
		}
	}
	if lines := strings.Count(source, "\n"); lines == 0 || lines > 22 {
		t.Errorf("the first plugin has %d lines", lines)
	}
	if got := blocks(t, "docs/howto/plugins.md")[0].text; got != source {
		t.Error("README.md and docs/howto/plugins.md differ")
	}
	dir := module(t, source)
	write(t, filepath.Join(dir, "frames.json"), frames)
	if code, out := pdproxy("plugin", "build", dir); code != 0 {
		t.Fatal(out)
	}
	code, out := pdproxy("plugin", "test", filepath.Join(dir, "first.wasm"), filepath.Join(dir, "frames.json"))
	if code != 0 || !strings.Contains(out, `{"plan":"aggregate"`) || !strings.Contains(out, `{"plan":"pass"`) {
		t.Errorf("exit %d: %s", code, out)
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
			frames := filepath.Join(t.TempDir(), "frames.json")
			write(t, frames, b.text)
			// 2 would be a frame that cannot be read.
			if code, out := pdproxy("plugin", "test", modules[0], frames); code == 2 {
				t.Errorf("%s\n%s", out, b.text)
			}
		}
	}
	if len(modules) != 3 {
		t.Errorf("%d plugins", len(modules))
	}
}
