package deploy

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
)

var units = []string{"pdproxy.service", "pdproxy-sidecar@.service", "vllm@.service"}

// unit holds the keys of a unit's sections, in order.
type unit map[string][]string

// readUnit parses a unit for an instance.
func readUnit(t *testing.T, name, instance string) unit {
	t.Helper()
	u := unit{}
	for line := range strings.Lines(strings.ReplaceAll(recipe(t, "systemd/"+name), "%i", instance)) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' || line[0] == '[' {
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok {
			t.Fatalf("%s: %q", name, line)
		}
		u[key] = append(u[key], value)
	}
	return u
}

func (u unit) seconds(t *testing.T, key string) time.Duration {
	t.Helper()
	n, err := strconv.Atoi(u[key][0])
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(n) * time.Second
}

// command returns a command line of the unit with the test's paths.
func command(line, file, pid string) (name string, args []string) {
	words := strings.Fields(line)
	for i, w := range words {
		switch {
		case w == "/usr/bin/pdproxy":
			words[i] = pdproxy
		case strings.HasPrefix(w, "/etc/pdproxy/"):
			words[i] = file
		case w == "$MAINPID":
			words[i] = pid
		}
	}
	return words[0], words[1:]
}

// TestUnitsAreSound checks the units with systemd itself, where it is installed.
func TestUnitsAreSound(t *testing.T) {
	dir := t.TempDir()
	args := []string{"verify", "--man=no"}
	for _, name := range units {
		text := strings.NewReplacer("/usr/bin/pdproxy", pdproxy, "/usr/bin/vllm", "/bin/true").Replace(recipe(t, "systemd/"+name))
		write(t, filepath.Join(dir, name), text, 0o644)
		args = append(args, filepath.Join(dir, strings.Replace(name, "@.", "@d0.", 1)))
	}
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Log("systemd-analyze is not installed: the test only runs the units")
		return
	}
	if out, err := exec.Command(analyze, args...).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("%v:\n%s", err, out)
	}
}

// TestUnits runs the units' commands in systemd's order, with a simulated
// engine in place of the real one.
func TestUnits(t *testing.T) {
	for _, name := range units[:2] {
		t.Run(name, func(t *testing.T) { testUnit(t, name) })
	}
}

func testUnit(t *testing.T, name string) {
	u := readUnit(t, name, "d0")
	port := testbed.Ports(t, 5, "127.0.0.1")
	engine := fmt.Sprintf("127.0.0.1:%d", port+2)
	start(t, nil, pdproxy, "sim", "--role", "both", "--listen", engine, "--decode-us-per-token", "50000")
	text := fmt.Sprintf("[server]\nlisten = \"127.0.0.1:%d\"\nexpose_placement = true\n[admin]\nlisten = \"127.0.0.1:%d\"\n[health]\ninterval = \"100ms\"\n", port, port+1)
	local, second := "local", ""
	if name == units[0] {
		local, second = "e0", fmt.Sprintf("[[engine]]\nname = \"e1\"\nurl = \"http://%s\"\nrole = \"both\"\nconnector = \"vllm-nixl\"\n", engine)
		text += strings.Replace(second, "e1", "e0", 1)
	} else {
		text += fmt.Sprintf("[sidecar]\nlocal = \"http://%s\"\nrole = \"both\"\n", engine)
		second = "policies = [\"local\"]\n"
	}
	file := write(t, filepath.Join(t.TempDir(), "config.toml"), text, 0o644)
	run := func(key string, n int, pid string) error {
		cmd, args := command(u[key][n], file, pid)
		out, err := exec.Command(cmd, args...).CombinedOutput()
		t.Logf("%s: %s", u[key][n], out)
		return err
	}
	if err := run("ExecStartPre", 0, ""); err != nil {
		t.Fatal(err)
	}
	cmd, args := command(u["ExecStart"][0], file, "")
	p := start(t, []string{"XDG_CACHE_HOME=" + t.TempDir()}, cmd, args...)
	pid, url := strconv.Itoa(p.cmd.Process.Pid), fmt.Sprintf("http://127.0.0.1:%d", port)
	ready(t, url)
	if _, _, decode := chat(t, url); decode != local {
		t.Errorf("served by %s", decode)
	}

	reload := func() error {
		for n := range u["ExecReload"] {
			if err := run("ExecReload", n, pid); err != nil {
				return err
			}
		}
		return nil
	}
	write(t, file, text+second, 0o644)
	if err := reload(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new configuration is used", func() bool { return strings.Contains(p.out.String(), "configuration reloaded") })
	write(t, file, text+"nonsense", 0o644)
	if reload() == nil {
		t.Error("got no error for the reload of an invalid file")
	}

	// TERM arrives during a stream. The stream completes, because the engine is
	// still there.
	got := make(chan string, 1)
	go func() {
		text, _, _ := chat(t, url)
		got <- text
	}()
	eventually(t, "a request runs", func() bool {
		return status(url+"/health") == 200 && running(fmt.Sprintf("http://127.0.0.1:%d", port+1))
	})
	p.signal(syscall.SIGTERM)
	if <-got == "" {
		t.Error("the request was cut")
	}
	if status := p.ended(); status != 0 {
		t.Errorf("exit status %d, want 0", status)
	}

	// Its next start would fail.
	cmd, args = command(u["ExecStart"][0], file, "")
	if status := start(t, nil, cmd, args...).ended(); status != 2 {
		t.Errorf("exit status %d for a bad configuration, want 2", status)
	}
	// Go ends a process that crashes with the same status.
	if u["Restart"][0] != "on-failure" || u["RestartPreventExitStatus"] != nil {
		t.Errorf("Restart=%v, RestartPreventExitStatus=%v: systemd would not restart a proxy that has crashed", u["Restart"], u["RestartPreventExitStatus"])
	}
	d := config.Default()
	if limit := time.Duration(d.Server.DrainTimeout + d.Timeouts.Cleanup); u.seconds(t, "TimeoutStopSec") <= limit {
		t.Errorf("systemd kills the proxy before it has drained: %s", limit)
	}
}

// TestSidecarUnitFollowsItsEngine: systemd stops in the reverse order of After.
func TestSidecarUnitFollowsItsEngine(t *testing.T) {
	u := readUnit(t, units[1], "d0")
	if !slices.Equal(u["BindsTo"], []string{"vllm@d0.service"}) || !slices.Contains(strings.Fields(u["After"][0]), "vllm@d0.service") {
		t.Errorf("BindsTo %v, After %v", u["BindsTo"], u["After"])
	}
}
