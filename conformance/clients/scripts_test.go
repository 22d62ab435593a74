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
	perConnector(t, func() script { return nodeScript(t, name) })
}

func runPython(t *testing.T, name string) {
	perConnector(t, func() script { return pythonScript(t, name) })
}

// nodeScript returns a file of the folder node as a script.
func nodeScript(t *testing.T, name string) script {
	t.Helper()
	path := writeFile(t, tool(t, "node"), name, readFile(t, "node/"+name))
	return script{
		regexp.MustCompile(`^(?P<verdict>ok|not ok) \d+ - (?P<name>.+)$`),
		exec.Command(tool(t, "venv/bin/node"), "--test", "--test-reporter=tap", path),
	}
}

func pythonScript(t *testing.T, path string) script {
	t.Helper()
	return script{
		regexp.MustCompile(`^test_(?P<name>\w+) .*\.\.\. (?P<verdict>.+)$`),
		exec.Command(tool(t, "venv/bin/python"), "-B", path),
	}
}

// perConnector runs a script against a demo of each connector. Each of its tests becomes a
// subtest of that name.
func perConnector(t *testing.T, command func() script) {
	for _, connector := range connectors {
		t.Run(connector, func(t *testing.T) {
			t.Parallel()
			f := startDemo(t, connector)
			command().run(t, f, "PDPROXY_CONNECTOR="+connector)
			t.Run("nothing left", f.waitIdle)
		})
	}
}

// script is a test program in another language. Its lines that match result name a test and its
// verdict.
type script struct {
	result *regexp.Regexp
	cmd    *exec.Cmd
}

// run runs the program against f, with more variables in its environment.
func (s script) run(t *testing.T, f *front, more ...string) {
	t.Helper()
	s.cmd.Env = append(os.Environ(), "PDPROXY_URL="+f.URL, "PDPROXY_ADMIN="+f.Admin, "PDPROXY_ALONE="+f.Alone, "NO_PROXY=127.0.0.1", "no_proxy=127.0.0.1")
	s.cmd.Env = append(s.cmd.Env, more...)
	out, err := s.cmd.CombinedOutput()
	ran := 0
	for sc := bufio.NewScanner(strings.NewReader(string(out))); sc.Scan(); {
		m := s.result.FindStringSubmatch(sc.Text())
		if m == nil {
			continue
		}
		ran++
		t.Run(m[s.result.SubexpIndex("name")], func(t *testing.T) {
			if verdict := m[s.result.SubexpIndex("verdict")]; verdict != "ok" {
				t.Error(verdict)
			}
		})
	}
	if err != nil || ran == 0 {
		t.Errorf("%s: %v after %d tests\n%s", filepath.Base(s.cmd.Path), err, ran, out)
	}
}
