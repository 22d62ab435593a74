package deploy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
)

// patience bounds every wait for a condition; it is not a claim about speed.
const patience = time.Minute

// recipes is the folder with the recipes.
const recipes = "../../deploy"

// pdproxy is the binary under test.
var pdproxy string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "deploy")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	pdproxy = filepath.Join(dir, "pdproxy")
	// The program is static, like that of a release. CGO_ENABLED=0 would compile most packages again.
	static := "-ldflags=-linkmode=external -extldflags=-static"
	if out, err := exec.Command("go", "build", static, "-o", pdproxy, "../../cmd/pdproxy").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
		os.Exit(1)
	}
	status := isolated.Run(m)
	os.RemoveAll(dir)
	os.Exit(status)
}

// recipe reads a file of deploy/.
func recipe(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(recipes, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// write makes a file.
func write(t *testing.T, path, text string, mode os.FileMode) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

// process is a command of a recipe, in a separate process group.
type process struct {
	t    *testing.T
	cmd  *exec.Cmd
	out  testbed.Log
	done chan error
}

// start runs a command until the test's end, with env added to the test's
// environment.
func start(t *testing.T, env []string, name string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(name, args...), done: make(chan error, 1)}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.done <- p.cmd.Wait() }()
	t.Cleanup(func() {
		syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // the rest of the group
		if t.Failed() {
			t.Logf("output of %s:\n%s", filepath.Base(name), p.out.String())
		}
	})
	return p
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// ended waits for the process's end and returns its exit status.
func (p *process) ended() int {
	p.t.Helper()
	select {
	case err := <-p.done:
		p.done <- err
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(patience):
		p.t.Fatalf("%s does not end", p.cmd.Path)
	}
	return -1
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}

// status returns the status of a GET; 0 without an answer.
func status(url string) int {
	resp, err := http.Get(url)
	if err != nil {
		return 0
	}
	resp.Body.Close()
	return resp.StatusCode
}

// chat requests a short text. The answer names the engines that served it.
func chat(t *testing.T, url string, header ...string) (text, prefill, decode string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	body := `{"model":"sim","messages":[{"role":"user","content":"launched"}],"max_tokens":40,"ignore_eos":true}`
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, _ := io.ReadAll(resp.Body)
	var a struct {
		Choices []struct{ Message struct{ Content string } }
	}
	if resp.StatusCode != 200 || json.Unmarshal(data, &a) != nil || len(a.Choices) != 1 {
		t.Fatalf("got status %d: %s", resp.StatusCode, data)
	}
	return a.Choices[0].Message.Content, resp.Header.Get("X-Pdproxy-Prefill"), resp.Header.Get("X-Pdproxy-Decode")
}

// ready waits until the proxy could serve a request.
func ready(t *testing.T, url string) {
	t.Helper()
	eventually(t, "the proxy is ready", func() bool { return status(url+"/health") == 200 })
}

// running reports whether the proxy with that admin address has an exchange.
func running(admin string) bool {
	resp, err := http.Get(admin + "/v1/exchanges")
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	var rows []struct{ Decode string }
	return json.NewDecoder(resp.Body).Decode(&rows) == nil && len(rows) > 0 && rows[0].Decode != ""
}
