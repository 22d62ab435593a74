package epp

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience bounds each wait of a test. It is reached only if a test fails.
const patience = time.Minute

// process is a program that a test has started.
type process struct {
	name string
	cmd  *exec.Cmd
	log  bytes.Buffer // read it after the end of the process
	once sync.Once
}

// start runs a program until the test ends.
func start(t testing.TB, name, program string, args ...string) *process {
	t.Helper()
	p := &process{name: name, cmd: exec.Command(program, args...)}
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	p.cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+t.TempDir())
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("%s does not start: %v", name, err)
	}
	t.Cleanup(func() {
		p.stop(t, syscall.SIGTERM)
		if log := p.log.String(); t.Failed() || strings.Contains(log, "panic") {
			t.Errorf("log of %s:\n%s", name, tail(log, 25))
		}
	})
	return p
}

// stop ends the process with a signal.
func (p *process) stop(t testing.TB, s syscall.Signal) {
	p.once.Do(func() {
		_ = p.cmd.Process.Signal(s) // an error means that the process has ended
		hung := time.AfterFunc(patience, func() { p.cmd.Process.Kill() })
		_ = p.cmd.Wait() // the exit code of a killed process says nothing
		if !hung.Stop() {
			t.Errorf("%s ignores signal %v", p.name, s)
		}
	})
}

func tail(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// given are the addresses that free has returned.
var given sync.Map

// free returns an address whose port no other process gets by chance: the port is below those
// that the kernel gives to connections.
func free(t testing.TB) string {
	t.Helper()
	for range 1000 {
		addr := fmt.Sprintf("127.0.0.1:%d", 10000+rand.IntN(20000))
		if _, taken := given.LoadOrStore(addr, true); taken {
			continue
		}
		if l, err := net.Listen("tcp", addr); err == nil {
			l.Close()
			return addr
		}
	}
	t.Fatal("no port is free")
	return ""
}

// pdproxy returns the path of the built program.
func pdproxy(t testing.TB) string {
	t.Helper()
	path, err := filepath.Abs(cmp.Or(os.Getenv("PDPROXY"), "../../bin/pdproxy"))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// envoyPath returns the path of Envoy, which make test-epp installs.
func envoyPath(t testing.TB) string {
	t.Helper()
	path := os.Getenv("ENVOY")
	if path == "" {
		t.Fatal("ENVOY is not set: conformance/epp/install.sh prints the path")
	}
	return path
}

// run runs pdproxy with a configuration.
func run(t testing.TB, name, config string) *process {
	t.Helper()
	return runProgram(t, name, pdproxy(t), config)
}

// runProgram is run with a build of pdproxy.
func runProgram(t testing.TB, name, program, config string) *process {
	t.Helper()
	path := filepath.Join(t.TempDir(), name+".toml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return start(t, name, program, "run", path)
}

// until waits for a condition.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s", what, patience)
		}
	}
}

// untilEnvoy waits until the Envoy with that admin address serves, and its health checks have
// found each picker.
func untilEnvoy(t testing.TB, admin string) {
	t.Helper()
	until(t, "envoy", func() bool { status, _ := get("http://" + admin + "/ready"); return status == 200 })
	until(t, "envoy has checked the pickers", func() bool {
		_, text := get("http://" + admin + "/clusters")
		pickers, healthy := 0, 0
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, "picker") && strings.Contains(line, "::health_flags::") {
				pickers++
				if strings.HasSuffix(strings.TrimSpace(line), "::healthy") {
					healthy++
				}
			}
		}
		return pickers > 0 && healthy == pickers
	})
}

// get returns the status and the body of a GET; 0 after an error.
func get(url string) (int, string) {
	resp, err := http.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body) // a short body fails the caller's comparison
	return resp.StatusCode, string(body)
}
