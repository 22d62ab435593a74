package clients

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience bounds every wait for an event that is certain. It is not a
// measurement: a slow machine must not make a test fail.
const patience = 20 * time.Second

// buildDir contains the tools that run.sh installed.
const buildDir = "../../build/clients"

// tool returns the absolute path of a file under buildDir.
func tool(t *testing.T, path string) string {
	t.Helper()
	abs, err := filepath.Abs(filepath.Join(buildDir, path))
	if err == nil {
		_, err = os.Stat(abs)
	}
	if err != nil {
		t.Fatalf("the program is missing (run.sh installs it): %v", err)
	}
	return abs
}

// process is a pdproxy of some kind that a test started.
type process struct {
	cmd  *exec.Cmd
	out  *bufio.Reader // standard output
	log  logBuffer     // standard error
	name string
	once sync.Once // of terminate
}

// start runs the built binary until the test ends. Then the process must end without a
// further signal, with exit code 0 and without a panic.
func start(t *testing.T, args ...string) *process {
	t.Helper()
	binary, err := filepath.Abs("../../bin/pdproxy")
	if err != nil {
		t.Fatal(err)
	}
	p := &process{name: args[0], cmd: exec.Command(binary, append(args, "--log-level", "debug")...)}
	p.cmd.Stderr = &p.log
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(stdout)
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("pdproxy does not start (make build builds it): %v", err)
	}
	t.Cleanup(func() { p.stop(t) })
	return p
}

// terminate asks the process to end, once, because a second signal would cut
// the drain.
func (p *process) terminate() {
	p.once.Do(func() { p.cmd.Process.Signal(syscall.SIGTERM) })
}

// stop ends the process the way an operator does.
func (p *process) stop(t *testing.T) {
	killed := time.AfterFunc(patience, func() { p.cmd.Process.Kill() })
	p.terminate()
	err := p.cmd.Wait()
	if !killed.Stop() {
		err = fmt.Errorf("the process still runs %s after SIGTERM", patience)
	}
	if err != nil {
		t.Errorf("pdproxy %s: %v", p.name, err)
	}
	text := p.log.String()
	if strings.Contains(text, "panic") {
		t.Errorf("pdproxy %s panicked", p.name)
	}
	if t.Failed() {
		t.Logf("last log lines of pdproxy %s:\n%s", p.name, lastLines(text, 25))
	}
}

// firstLine is the first line of standard output.
func (p *process) firstLine(t *testing.T) string {
	t.Helper()
	line, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatalf("pdproxy %s: %v\n%s", p.name, err, &p.log)
	}
	return strings.TrimSpace(line)
}

// logBuffer collects a process's log. It is safe for concurrent use.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer // guarded by mu
}

// Write implements io.Writer.
func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

// String returns all written text.
func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// front is a proxy with its engines, for every way of starting it.
type front struct {
	*process
	URL   string `json:"url"`
	Admin string `json:"admin"`
	Alone string `json:"engine_alone"` // one engine with the same model
	token string // the token for Admin
}

var connectors = []string{"vllm-nixl", "sglang", "trtllm"}

// startDemo runs pdproxy demo and returns when it serves.
func startDemo(t *testing.T, connector string) *front {
	t.Helper()
	p := start(t, "demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--connector", connector, "--json")
	f := &front{process: p}
	if err := json.NewDecoder(p.out).Decode(f); err != nil {
		t.Fatalf("pdproxy demo: %v\n%s", err, &p.log)
	}
	return f
}

// eventually calls ok until it returns nil. After patience it fails with the
// last error.
func eventually(t *testing.T, what string, ok func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ok()
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s: %v", what, errors.Join(err, context.Cause(ctx)))
		case <-tick.C:
		}
	}
}
