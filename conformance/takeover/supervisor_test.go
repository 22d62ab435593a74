package takeover

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// startFleet starts a fleet of two workers, ready to serve.
func startFleet(t *testing.T) (w *world, supervisor int) {
	t.Helper()
	w = newWorld(t, false, 2)
	w.run()
	supervisor = w.successor(0, func() {})
	w.awaitReady()
	w.eventually("there are not two workers", func() bool { return len(w.children("worker")) == 2 })
	return w, supervisor
}

// The processes of a fleet drain after their supervisor was killed: the running stream
// ends well, and no KV stays. The next supervisor starts at once on the same addresses,
// beside the processes that drain, and serves.
func TestSupervisorDies(t *testing.T) {
	w, supervisor := startFleet(t)
	w.expected = "the supervisor has ended"
	for range 3 {
		before := w.children("worker")
		stream := w.startStream()
		syscall.Kill(supervisor, syscall.SIGKILL)
		w.eventually("the lock of the supervisor is not free", func() bool { return w.holder() == 0 })
		w.run()
		supervisor = w.successor(supervisor, func() {})
		w.awaitReady()
		w.serves(20)
		if err := <-stream; err != nil {
			t.Errorf("the stream of a process without supervisor: %v", err)
		}
		w.eventually("the processes of the dead supervisor do not end", func() bool {
			now := w.children("worker")
			for _, pid := range before {
				for _, p := range now {
					if p == pid {
						return false
					}
				}
			}
			return len(now) == 2 && len(w.children("coordinator")) == 1
		})
	}
	// The new supervisor can be replaced in the same way.
	load := startLoad(t, w, false)
	w.run("--takeover")
	w.successor(supervisor, func() {})
	load.await(load.answered.Load() + 500)
	load.end()
}

// startStream starts a stream of some seconds, and returns when it has begun. The channel
// gets the error of the stream.
func (w *world) startStream() <-chan error {
	w.t.Helper()
	resp, err := http.Post("http://"+w.addr+path, "application/json", strings.NewReader(`{"model":"sim","prompt":"Say a lot.","max_tokens":300,"ignore_eos":true,"stream":true}`))
	if err != nil {
		w.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { // ends with the stream
		_, err := text(resp, true)
		resp.Body.Close()
		ended <- err
	}()
	return ended
}

// A process that dies is replaced. A process that hangs is killed first. The other
// processes continue.
func TestChildDies(t *testing.T) {
	for name, signal := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			w, _ := startFleet(t)
			w.expected = "a process " // has ended, shows no sign of life
			for _, role := range []string{"worker", "coordinator"} {
				before := w.children(role)
				for _, pid := range before {
					syscall.Kill(pid, signal)
					w.eventually(role+" is not replaced", func() bool {
						now := w.children(role)
						replaced := len(now) == len(before)
						for _, p := range now {
							replaced = replaced && p != pid
						}
						return replaced
					})
					break
				}
				w.awaitReady()
			}
			w.serves(20)
		})
	}
}

// A reload does not change the addresses. A process that the supervisor replaces after the
// reload serves the old addresses too.
func TestReplacedProcessesKeepTheAddresses(t *testing.T) {
	w, supervisor := startFleet(t)
	w.expected = "a process has ended"
	text, err := os.ReadFile(w.config)
	if err != nil {
		t.Fatal(err)
	}
	changed := strings.NewReplacer(w.addr, testbed.FreeAddr(t), w.admin, testbed.FreeAddr(t), w.metrics, testbed.FreeAddr(t)).Replace(string(text))
	changed += fmt.Sprintf("[epp]\nlisten = %q\n", testbed.FreeAddr(t))
	if err := os.WriteFile(w.config, []byte(changed), 0o600); err != nil {
		t.Fatal(err)
	}
	syscall.Kill(supervisor, syscall.SIGHUP)
	w.eventually("the processes do not reload", func() bool { return strings.Count(w.logged(), "configuration reloaded") == 3 })
	for _, role := range []string{"worker", "coordinator"} {
		before := w.children(role)
		for _, pid := range before {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		w.eventually(role+" is not replaced", func() bool {
			now := w.children(role)
			for slot, pid := range before {
				if now[slot] == 0 || now[slot] == pid {
					return false
				}
			}
			return true
		})
	}
	w.awaitReady()
	w.serves(20)
	if resp, err := http.Get("http://" + w.metrics + "/metrics"); err != nil {
		t.Error(err)
	} else if resp.Body.Close(); resp.StatusCode != http.StatusOK {
		t.Errorf("metrics.listen answers %d", resp.StatusCode)
	}
}

// Workers share the processors, unless the environment sets the number for each.
func TestWorkersShareProcessors(t *testing.T) {
	for said, want := range map[string]map[string]string{
		"":  {"worker": fmt.Sprint((runtime.GOMAXPROCS(0) + 1) / 2), "coordinator": ""},
		"3": {"worker": "3", "coordinator": "3"},
	} {
		t.Run("GOMAXPROCS="+said, func(t *testing.T) {
			t.Setenv("GOMAXPROCS", said)
			w, _ := startFleet(t)
			for role, n := range want {
				for _, pid := range w.children(role) {
					environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
					if err != nil {
						t.Fatal(err)
					}
					got := ""
					for v := range strings.SplitSeq(string(environ), "\x00") {
						if value, ok := strings.CutPrefix(v, "GOMAXPROCS="); ok {
							got = value
						}
					}
					if got != n {
						t.Errorf("%s: GOMAXPROCS=%q, want %q", role, got, n)
					}
				}
			}
		})
	}
}

// serves sends that many requests, each over a new connection.
func (w *world) serves(n int) {
	w.t.Helper()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for range n {
		resp, err := c.Post("http://"+w.addr+path, "application/json", bytes.NewReader(body(0, false)))
		if err != nil {
			w.t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 200 {
			w.t.Fatalf("got status %d", resp.StatusCode)
		}
	}
}

// A successor ends before it is ready, at different points of its start. It leaves
// nothing behind, and its predecessor continues.
func TestSuccessorDies(t *testing.T) {
	w, supervisor := startFleet(t)
	workers := w.children("worker")
	for n := range 5 {
		c := exec.Command(pdproxy, "run", "--takeover", w.config)
		var log bytes.Buffer
		c.Stderr = &log
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(n*40) * time.Millisecond) // at different points of its start
		c.Process.Kill()
		c.Wait()
		if strings.Contains(log.String(), "taken over") {
			break // it was faster, and the processes that it took over are its own
		}
		w.eventually("the workers of the predecessor continue", func() bool { return maps.Equal(w.children("worker"), workers) })
	}
	if w.holder() == supervisor {
		w.serves(20)
	} else if w.holder() == 0 {
		w.run()
		w.pids = append(w.pids, w.successor(0, func() {}))
	}
}

// An invalid takeover is reported with the exit code of its kind, and the
// running fleet continues.
func TestRefusals(t *testing.T) {
	w, _ := startFleet(t)
	run := func(config string, flags ...string) (string, int) {
		c := exec.Command(pdproxy, append([]string{"run", config}, flags...)...)
		out, _ := c.CombinedOutput()
		return string(out), c.ProcessState.ExitCode()
	}
	if out, code := run(w.config); code != 1 || !strings.Contains(out, "--takeover replaces it") {
		t.Errorf("a second supervisor: %d, %s", code, out)
	}
	text, err := os.ReadFile(w.config)
	if err != nil {
		t.Fatal(err)
	}
	broken := w.config + ".broken"
	if err := os.WriteFile(broken, append(text, fmt.Appendf(nil, "[[plugin]]\nname = \"x\"\npath = %q\n", w.config)...), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, code := run(broken, "--takeover"); code != 2 || strings.Contains(out, "taken over") {
		t.Errorf("successor with an invalid plugin: got code %d, %s", code, out)
	}
	w.serves(20)
}
