package epp

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"text/template"
)

// listener is one way to configure the filter of Envoy.
type listener struct {
	Name, Request, Response string
	Port                    int
	Open                    bool // failure_mode_allow
}

// world is Envoy in front of two decode engines with sidecars, and two prefill engines. A
// picker chooses the engines.
type world struct {
	listeners map[string]*listener
	lease     string     // of the engines
	running   int        // requests that an engine computes at the same time
	token     int        // microseconds that an engine needs for a token
	config    string     // of the picker
	admin     string     // URL of the picker's admin address
	kind      *kind      // of the sidecars
	sidecars  []string   // URLs of the admin addresses of the sidecars that have one
	beside    []*process // the sidecars
	picker    *process
	engines   map[string]*process
	addrs     map[string]string // of the engines
}

// setting are the variable parts of a world.
type setting struct {
	kind   *kind  // nil: pdproxy
	picker string // lines of the picker's configuration that come before its tables
	beside string // the same of pdproxy as a sidecar; llm-d's sidecar has no such settings
	lease  string // time that blocks wait for a transfer; "" is that of the engine, 30s
	tables string // tables of the picker's configuration

	running int // requests that an engine computes at the same time; 0 is the number of the engine, 256
	token   int // microseconds that an engine needs for a token of an answer
}

// newWorld starts all processes and waits until each of them serves.
func newWorld(t *testing.T, s setting) *world {
	if s.kind == nil {
		s.kind = &pdproxySidecar
	}
	w := &world{kind: s.kind, lease: s.lease, running: s.running, token: s.token, engines: map[string]*process{}, addrs: map[string]string{}, listeners: map[string]*listener{
		"closed":        {Request: "FULL_DUPLEX_STREAMED", Response: "FULL_DUPLEX_STREAMED"},
		"open":          {Request: "FULL_DUPLEX_STREAMED", Response: "FULL_DUPLEX_STREAMED", Open: true},
		"open-buffered": {Request: "BUFFERED", Response: "NONE", Open: true},
		"buffered":      {Request: "BUFFERED", Response: "BUFFERED"},
		"streamed":      {Request: "BUFFERED", Response: "STREAMED"},
		"blind":         {Request: "FULL_DUPLEX_STREAMED", Response: "NONE"},
	}}
	prefill, picked := "", ""
	for _, name := range []string{"p0", "p1"} {
		addr := w.engine(t, name, "prefill")
		prefill += fmt.Sprintf("[[engine]]\nname = %q\nurl = \"http://%s\"\nrole = \"prefill\"\nconnector = \"vllm-nixl\"\n", name, addr)
	}
	var ports []int
	for i, name := range []string{"d0", "d1"} {
		addr, side := w.engine(t, name, "decode"), free(t)
		s.kind.start(w, t, i+1, beside{engine: addr, listen: side, keys: s.beside, prefill: prefill})
		until(t, "sidecar of "+name, func() bool { status, _ := get("http://" + side + "/health"); return status == 200 })
		ports = append(ports, portOf(side))
		picked += fmt.Sprintf("[[engine]]\nname = %q\nurl = \"http://%s\"\nendpoint = %q\nrole = \"decode\"\nconnector = \"vllm-nixl\"\n", name, addr, side)
	}
	epp, admin := free(t), free(t)
	w.admin = "http://" + admin
	w.config = fmt.Sprintf("server.listen = %q\nadmin.listen = %q\nserver.expose_placement = true\nepp.listen = %q\n%s\n%s%s%s", free(t), admin, epp, s.picker, prefill, picked, s.tables)
	w.startPicker(t)
	w.startEnvoy(t, portOf(epp), strings.Contains(s.picker, "epp.tls"), ports)
	return w
}

// engine starts a simulated engine. If an engine of that name has been stopped, the new one has
// its address.
func (w *world) engine(t *testing.T, name, role string) (addr string) {
	t.Helper()
	if addr = w.addrs[name]; addr == "" {
		addr = free(t)
	}
	w.addrs[name] = addr
	w.engines[name] = start(t, name, pdproxy(t), "sim", "--connector", "vllm-nixl", "--role", role, "--listen", addr, "--name", name, "--kv-blocks", "200000", "--lease", cmp.Or(w.lease, "30s"), "--max-running", strconv.Itoa(cmp.Or(w.running, 256)), "--decode-us-per-token", strconv.Itoa(w.token))
	until(t, name, func() bool { status, _ := get("http://" + addr + "/health"); return status == 200 })
	return addr
}

// startPicker starts the picker, again after killPicker.
func (w *world) startPicker(t *testing.T) {
	t.Helper()
	w.picker = run(t, "picker", w.config)
	until(t, "picker", func() bool { status, _ := get(w.admin + "/readyz"); return status == 200 })
}

// takeOver starts a successor of the picker and waits until the picker has ended or serves
// nothing but its open streams.
func (w *world) takeOver(t *testing.T) *process {
	t.Helper()
	path := filepath.Join(t.TempDir(), "successor.toml")
	if err := os.WriteFile(path, []byte(w.config), 0o600); err != nil {
		t.Fatal(err)
	}
	before := w.started(t)
	p := start(t, "successor", pdproxy(t), "run", "--takeover", path)
	until(t, "the successor answers", func() bool { return w.started(t) > before })
	return p
}

// started returns the start time of the process that serves the picker's metrics, in seconds
// since 1970; 0 while none does.
func (w *world) started(t *testing.T) float64 {
	if status, _ := get(w.admin + "/readyz"); status != 200 {
		return 0
	}
	return w.metric(t, "process_start_time_seconds", "")
}

// privateDir returns a directory of mode 0700.
func privateDir(t *testing.T) string {
	dir := filepath.Join(t.TempDir(), "fleet")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func quoted(text string) string { return strconv.Quote(text) }

func (w *world) killPicker(t *testing.T) { w.picker.stop(t, syscall.SIGKILL) }

func (w *world) startEnvoy(t *testing.T, picker int, tls bool, engines []int) {
	t.Helper()
	text, err := template.ParseFiles("envoy.yaml.in")
	if err != nil {
		t.Fatal(err)
	}
	admin, list := free(t), []*listener{}
	for name, l := range w.listeners {
		l.Name, l.Port = name, portOf(free(t))
		list = append(list, l)
	}
	path := filepath.Join(t.TempDir(), "envoy.yaml")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := text.Execute(f, map[string]any{"Admin": portOf(admin), "Listeners": list, "Picker": picker, "TLS": tls, "Engines": engines}); err != nil {
		t.Fatal(err)
	}
	level := "warning"
	if l := os.Getenv("ENVOY_LOG"); l != "" {
		level = l
	}
	start(t, "envoy", envoyPath(t), "-c", path, "--disable-hot-restart", "--concurrency", "2", "-l", level)
	untilEnvoy(t, admin)
}

func portOf(addr string) int {
	_, port, _ := net.SplitHostPort(addr)
	n, _ := strconv.Atoi(port)
	return n
}

// url returns the URL of a listener of Envoy.
func (w *world) url(listener string) string {
	return "http://127.0.0.1:" + strconv.Itoa(w.listeners[listener].Port)
}

// metric returns the sum of a metric of the picker over the lines that contain all labels.
func (w *world) metric(t *testing.T, name string, labels ...string) (sum float64) {
	t.Helper()
	status, text := get(w.admin + "/metrics")
	if status != 200 {
		t.Fatalf("metrics: %d %s", status, text)
	}
lines:
	for _, m := range regexp.MustCompile(`(?m)^`+name+`(\{[^}]*\})? (\S+)$`).FindAllStringSubmatch(text, -1) {
		for _, label := range labels {
			if !strings.Contains(m[1], label) {
				continue lines
			}
		}
		n, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	return sum
}

// idle waits until no request runs and no lease is left, in the picker and in the sidecars, and
// no engine computes or holds KV blocks for another engine.
func (w *world) idle(t *testing.T) {
	t.Helper()
	until(t, "the picker is idle", func() bool {
		_, running := get(w.admin + "/v1/exchanges")
		return w.metric(t, "pdproxy_leases_open") == 0 && w.metric(t, "pdproxy_engine_load") == 0 && !strings.Contains(running, "request_id")
	})
	for _, admin := range w.sidecars {
		until(t, "the sidecar is idle", func() bool {
			status, text := get(admin + "/metrics")
			return status != 200 || strings.Contains(text, "\npdproxy_leases_open 0\n") // or it was killed
		})
	}
	for name := range w.engines {
		until(t, name+" holds nothing", func() bool {
			s, alive := w.state(t, name)
			return !alive || s.BlocksPinned == 0 && s.RequestsRunning == 0 && s.RequestsWaiting == 0
		})
	}
}

// state is a part of /sim/state.
type state struct {
	Requests        int
	Transfers       int
	BlocksPinned    int `json:"blocks_pinned"`
	RequestsRunning int `json:"requests_running"`
	RequestsWaiting int `json:"requests_waiting"`
	LeasesExpired   int `json:"leases_expired"`
}

// state returns the state of an engine; alive is false if it has been killed.
func (w *world) state(t *testing.T, engine string) (s state, alive bool) {
	t.Helper()
	status, text := get("http://" + w.addrs[engine] + "/sim/state")
	if status != 200 {
		return s, false
	}
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		t.Fatal(err, text)
	}
	return s, true
}
