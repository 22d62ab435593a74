package clients

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The tests run copies of node/*.test.mjs in the folder of their modules.
func TestNode(t *testing.T)          { runNode(t, "openai.test.mjs") }
func TestAnthropicNode(t *testing.T) { runNode(t, "anthropic.test.mjs") }

func TestPython(t *testing.T)          { runPython(t, "python/openai_test.py") }
func TestAnthropicPython(t *testing.T) { runPython(t, "python/anthropic_test.py") }

func runNode(t *testing.T, name string) {
	script := writeFile(t, tool(t, "node"), name, readFile(t, "node/"+name))
	perConnector(t, regexp.MustCompile(`^(?P<verdict>ok|not ok) \d+ - (?P<name>.+)$`), func() *exec.Cmd {
		return exec.Command(tool(t, "venv/bin/node"), "--test", "--test-reporter=tap", script)
	})
}

func runPython(t *testing.T, script string) {
	perConnector(t, regexp.MustCompile(`^test_(?P<name>\w+) .*\.\.\. (?P<verdict>.+)$`), func() *exec.Cmd {
		return exec.Command(tool(t, "venv/bin/python"), "-B", script)
	})
}

// perConnector runs a script in another language against a demo of each
// connector. Each of its lines that match result becomes a subtest of that
// name; "ok" means that it passed.
func perConnector(t *testing.T, result *regexp.Regexp, command func() *exec.Cmd) {
	for _, connector := range connectors {
		t.Run(connector, func(t *testing.T) {
			t.Parallel()
			f := startDemo(t, connector)
			cmd := command()
			cmd.Env = append(os.Environ(), "PDPROXY_URL="+f.URL, "PDPROXY_ADMIN="+f.Admin, "PDPROXY_ALONE="+f.Alone, "PDPROXY_CONNECTOR="+connector, "NO_PROXY=127.0.0.1", "no_proxy=127.0.0.1")
			out, err := cmd.CombinedOutput()
			ran := 0
			for sc := bufio.NewScanner(strings.NewReader(string(out))); sc.Scan(); {
				m := result.FindStringSubmatch(sc.Text())
				if m == nil {
					continue
				}
				ran++
				t.Run(m[result.SubexpIndex("name")], func(t *testing.T) {
					if verdict := m[result.SubexpIndex("verdict")]; verdict != "ok" {
						t.Error(verdict)
					}
				})
			}
			if err != nil || ran == 0 {
				t.Errorf("%s: %v after %d tests\n%s", filepath.Base(cmd.Path), err, ran, out)
			}
			t.Run("nothing left", f.waitIdle)
		})
	}
}
