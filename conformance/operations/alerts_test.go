package operations

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// TestRules: promtool accepts the rules as they are.
func TestRules(t *testing.T) {
	p := start(t, nil, "promtool", "check", "rules", deploy+"prometheus/alerts.yaml")
	<-p.done
	if p.cmd.ProcessState.ExitCode() != 0 || !strings.Contains(p.out.String(), "SUCCESS") {
		t.Error(p.out.String())
	}
}

// TestRunbook: each alert has an entry in docs/howto/alerts.md, and links to it.
func TestRunbook(t *testing.T) {
	page, err := os.ReadFile("../../docs/howto/alerts.md")
	if err != nil {
		t.Fatal(err)
	}
	rules, err := os.ReadFile(deploy + "prometheus/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	names := alerts(t)
	if len(names) < 10 {
		t.Fatalf("only %d alerts", len(names))
	}
	for _, name := range names {
		if !strings.Contains(string(page), "\n## "+name+"\n") {
			t.Errorf("docs/howto/alerts.md has no entry for %s", name)
		}
		if !strings.Contains(string(rules), "docs/howto/alerts.md#"+strings.ToLower(name)+"\n") {
			t.Errorf("%s has no link to its entry", name)
		}
	}
}

// TestOperations runs proxies under load, causes the condition of each alert, and waits until the
// alert fires. Every series that the dashboard, the alerts and the ScaledObjects name must exist in
// one of the proxies, and Prometheus must evaluate every expression.
func TestOperations(t *testing.T) {
	tested, seen := map[string]bool{}, map[string]bool{}
	t.Run("load", func(t *testing.T) { testLoad(t, tested, seen) })
	t.Run("engines", func(t *testing.T) { testEngines(t, tested, seen) })
	for _, name := range alerts(t) {
		if !tested[name] {
			t.Errorf("no test has seen %s fire", name)
		}
	}
	named := regexp.MustCompile(`\bpdproxy_[a-z_]+`)
	for place, expr := range expressions(t) {
		for _, name := range named.FindAllString(expr, -1) {
			if !seen[name] {
				t.Errorf("%s: no proxy has shown the series %s", place, name)
			}
		}
	}
}

// note adds the names of the series that a Prometheus has, and evaluates every expression.
func note(t *testing.T, s *server, seen map[string]bool) {
	t.Helper()
	for _, name := range ask[[]string](t, s, "/api/v1/label/__name__/values") {
		seen[name] = true
	}
	for place, expr := range expressions(t) {
		t.Logf("%s: %d series", place, s.query(t, expr))
	}
}

// testLoad overloads a fleet, and breaks its processes and its configuration.
func testLoad(t *testing.T, tested, seen map[string]bool) {
	slow := []string{"--prefill-us-per-token", "1500"}
	_, lines := engines(t, "vllm-nixl", map[string][]string{"p0": slow, "p1": slow, "d0": nil, "d1": nil})
	p := run(t, nil, "[fleet]\nworkers = 2\n[limits]\nmax_exchanges = 16\nqueue = 8\nqueue_timeout = \"3s\"\nper_client = 0\n[policy]\nplan = \"always\"\n"+lines, "")
	p.ready(t)
	s := prometheus(t, p.metrics, "")
	stop := p.load(t, 2, 20)
	eventually(t, "requests are counted", func() bool { return s.query(t, `pdproxy_exchanges_total{model="sim",outcome="ok"} > 20`) > 0 })
	if names := s.firing(t); len(names) > 0 {
		t.Errorf("a healthy proxy has alerts: %s", names)
	}
	stop()

	stop = p.load(t, 40, 4000)
	s.fires(t, tested, "PdproxyQueue", "PdproxySheds", "PdproxySaturated", "PdproxySlowFirstToken")
	note(t, s, seen)
	stop()

	bad := strings.Replace(p.config, `plan = "always"`, `plan = "bad"`, 1)
	p.write(t, bad+fmt.Sprintf("[[plugin]]\nname = \"bad\"\npath = %q\nphase = \"policy\"\nconfig = \"plan=trap\"\n", buildGuest(t)))
	p.signal(t, syscall.SIGHUP)
	stop = p.load(t, 2, 20)
	s.fires(t, tested, "PdproxyPolicyFails")
	stop()
	p.write(t, "[server]\nlisten = 1\n")
	p.signal(t, syscall.SIGHUP)
	s.fires(t, tested, "PdproxyConfigRefused")

	if err := syscall.Kill(p.worker(t), syscall.SIGKILL); err != nil { // the next one cannot read the file
		t.Fatal(err)
	}
	s.fires(t, tested, "PdproxyWorkersMissing")
	note(t, s, seen)
	p.kill()
	s.fires(t, tested, "PdproxyDown")
}

// buildGuest builds the policy whose configuration selects its action.
func buildGuest(t *testing.T) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "guest.wasm")
	build := exec.Command("go", "build", "-buildmode=c-shared", "-o", out, "./plugins/policy/testdata/guest")
	build.Dir, build.Env = "../..", append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm")
	if text, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the policy: %v\n%s", err, text)
	}
	return out
}

// worker returns the process id of one of the proxy's workers. Each thread has its own list
// of the children that it has started.
func (p *proxy) worker(t *testing.T) int {
	t.Helper()
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range lists {
		children, err := os.ReadFile(list)
		if err != nil {
			continue // the thread has ended
		}
		for _, child := range strings.Fields(string(children)) {
			line, err := os.ReadFile("/proc/" + child + "/cmdline")
			if err != nil || !slices.Contains(strings.Split(string(line), "\x00"), "worker") {
				continue
			}
			id, err := strconv.Atoi(child)
			if err != nil {
				t.Fatal(err)
			}
			return id
		}
	}
	t.Fatal("the proxy has no worker")
	return 0
}

// testEngines breaks engines.
func testEngines(t *testing.T, tested, seen map[string]bool) {
	running, lines := engines(t, "trtllm", map[string][]string{"p0": nil, "d0": {"--fail", "0.5:500"}, "d1": {"--fail", "0.5:500"}})
	p := run(t, nil, "[limits]\nno_engine_timeout = \"3s\"\n[health]\ninterval = \"200ms\"\n[policy]\nplan = \"always\"\n[retry]\nattempts = 2\n[circuit]\nfailures = 1000000\n"+lines, "")
	p.ready(t)
	s := prometheus(t, p.metrics, "")
	p.load(t, 4, 50)
	s.fires(t, tested, "PdproxyLegErrors", "PdproxyErrors", "PdproxyKVLeft")
	running["d1"].kill()
	s.fires(t, tested, "PdproxyEngineDown")
	running["d0"].kill()
	s.fires(t, tested, "PdproxyWaitsForEngine", "PdproxyNoEngine")
	note(t, s, seen)
}
