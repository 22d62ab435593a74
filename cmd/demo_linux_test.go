package cmd

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestDemoKeys: a person kills engines and restarts them, with the commands that the demo prints
// beside.
func TestDemoKeys(t *testing.T) {
	u := inTerminal(t, 200, 50, "demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--decode", "1", "--prefill", "1", "--log-level", "error")
	text := u.waits("Press k to kill an engine as kill -9 does, r to restart it, and Ctrl-C to stop the demo.")
	address := regexp.MustCompile(`(\S+) status --admin (\S+)`).FindStringSubmatch(text)
	if address == nil || address[1] != os.Args[0] {
		t.Fatalf("no command with the path of the program: %q", text)
	}
	states := func() string {
		_, stdout, stderr := run("status", "--admin", address[2])
		var states []string
		for _, l := range regexp.MustCompile(`(d0|p0) +(decode|prefill) +(\w+)`).FindAllStringSubmatch(stdout, -1) {
			states = append(states, l[1]+" "+l[3])
		}
		return strings.Join(states, ", ") + stderr
	}
	until := func(want string) {
		t.Helper()
		for range 30 {
			if states() == want {
				return
			}
		}
		t.Fatalf("the engines are %s, want %s", states(), want)
	}
	until("d0 ready, p0 ready")
	u.press("k")
	u.waits("killed the decode engine d0; r restarts it")
	until("d0 unhealthy, p0 ready")
	u.press("kk")
	u.waits("killed the prefill engine p0")
	u.waits("all engines are dead; r restarts them")
	u.press("r")
	u.waits("restarted the decode engine d0")
	u.waits("restarted the prefill engine p0")
	until("d0 ready, p0 ready")
	u.press("R")
	u.waits("no engine is dead; k kills one")
	u.press("\x03")
	if code := u.ends(); code != 0 {
		t.Errorf("exit code %d: %q", code, u.seen.String())
	}
}
