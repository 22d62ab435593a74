package cmd

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/cmd/doctor"
	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// patient is the beginning of a configuration and the engines that it names.
type patient struct {
	t       *testing.T
	timeout string // health.timeout; "" is longer than a busy machine takes
	text    strings.Builder
}

// config returns the configuration.
func (p *patient) config() string {
	return fmt.Sprintf("[health]\ntimeout = %q\n%s", cmp.Or(p.timeout, "20s"), p.text.String())
}

// engine adds an [[engine]] with further lines.
func (p *patient) engine(name, url, role, connector string, more ...string) {
	fmt.Fprintf(&p.text, "[[engine]]\nname = %q\nurl = %q\nrole = %q\nconnector = %q\n%s\n", name, url, role, connector, strings.Join(more, "\n"))
}

// sim starts a simulated engine and adds it to the configuration. change may be nil.
func (p *patient) sim(name, role, connector string, change func(*enginesim.Config), more ...string) *enginesim.Engine {
	p.t.Helper()
	c := enginesim.Config{Connector: connector, Role: role, DevMode: true}
	if change != nil {
		change(&c)
	}
	e, err := enginesim.New(c)
	if err != nil {
		p.t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(e.Close)
	p.engine(name, e.URL(), role, connector, more...)
	return e
}

// publishes makes an engine publish KV events at ephemeral ports.
func publishes(c *enginesim.Config) {
	c.KVEvents.Endpoint, c.KVEvents.Replay = "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"
}

// closedPort returns an address at which no process listens.
func closedPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

const kvAware = "[policy]\nplace = \"kv_aware\"\n"

// doctorCases are the engines of a configuration, and the findings that must be all errors and
// warnings of the report: severity, engine, side, and a part of the problem and of the fix.
var doctorCases = []struct {
	name string
	make func(p *patient)
	want []string
}{
	{"vllm", func(p *patient) {
		p.text.WriteString(kvAware)
		p.sim("p", "prefill", "vllm-nixl", publishes)
		p.sim("d", "decode", "vllm-nixl", nil)
	}, nil},
	{"sglang", func(p *patient) {
		p.text.WriteString(kvAware)
		p.sim("p", "prefill", "sglang", publishes)
		p.sim("d", "decode", "sglang", nil)
	}, nil},
	{"trtllm", func(p *patient) {
		p.text.WriteString(kvAware)
		p.sim("p", "prefill", "trtllm", nil, `kv_events = "poll"`)
		p.sim("d", "decode", "trtllm", nil)
	}, nil},
	{"mooncake", func(p *patient) {
		p.sim("d", "decode", "vllm-mooncake", nil)
		boot := p.sim("p", "prefill", "vllm-mooncake", nil)
		fmt.Fprintf(&p.text, "bootstrap_port = %d\n", boot.BootstrapPort())
	}, nil},
	{"an engine alone", func(p *patient) { p.sim("e", "both", "none", nil) }, nil},
	{"a dead engine", func(p *patient) {
		p.sim("e", "both", "none", nil)
		p.engine("x", "http://"+closedPort(p.t), "both", "none")
	}, []string{"error x engine|no process listens|engine.url"}},
	{"no engine is ready", func(p *patient) {
		p.engine("x", "http://"+closedPort(p.t), "both", "none")
	}, []string{"error x engine|no process listens|engine.url", "error  config|no engine is ready|[[engine]]"}},
	{"a slow engine", func(p *patient) {
		p.timeout = "500ms"
		gone := make(chan struct{})
		s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			select {
			case <-r.Context().Done():
			case <-gone:
			}
		}))
		p.t.Cleanup(s.Close)
		p.t.Cleanup(func() { close(gone) })
		p.sim("e", "both", "none", nil)
		p.engine("x", s.URL, "both", "none")
	}, []string{"error x engine|does not answer in time|health.timeout"}},
	{"garbage", func(p *patient) {
		p.sim("e", "both", "none", nil)
		p.engine("x", answers(p.t, func(string) (int, string) { return 200, "\x1b[2J{garbage" }), "both", "vllm-nixl")
	}, []string{"error x engine|the probe failed|engine.connector"}},
	{"a refused key", func(p *patient) {
		p.sim("e", "both", "none", nil)
		p.engine("x", answers(p.t, func(string) (int, string) { return 401, `{"error":"SECRET"}` }), "both", "none", "api_key_file = '"+secretFile(p.t)+"'")
	}, []string{"error x config|refuses the key|engine.api_key_file"}},
	{"no TLS", func(p *patient) {
		e := p.sim("e", "both", "none", nil)
		p.engine("x", strings.Replace(e.URL(), "http:", "https:", 1), "both", "none")
	}, []string{"error x config|has no TLS|engine.url"}},
	{"an unknown certificate", func(p *patient) {
		s := httptest.NewUnstartedServer(http.NotFoundHandler())
		s.Config.ErrorLog = log.New(io.Discard, "", 0) // the refused handshakes
		s.StartTLS()
		p.t.Cleanup(s.Close)
		p.sim("e", "both", "none", nil)
		p.engine("x", s.URL, "both", "none")
	}, []string{"error x config|not trusted|engine.ca"}},
	{"another program", func(p *patient) {
		e := p.sim("e", "both", "vllm-nixl", nil)
		p.engine("x", strings.Replace(e.URL(), "127.0.0.1", "localhost", 1), "both", "sglang")
	}, []string{`error x config|is vllm, but connector "sglang"|engine.connector`}},
	{"another mode", func(p *patient) {
		p.sim("p", "prefill", "sglang", nil)
		p.sim("d", "decode", "sglang", nil)
		other := p.sim("q", "prefill", "sglang", nil)
		p.engine("x", strings.Replace(other.URL(), "127.0.0.1", "localhost", 1), "decode", "sglang")
	}, []string{"error x engine|runs with --disaggregation-mode prefill|--disaggregation-mode decode"}},
	{"no bootstrap server", func(p *patient) {
		p.sim("e", "both", "sglang", nil)
		_, port, _ := net.SplitHostPort(closedPort(p.t))
		p.sim("x", "prefill", "sglang", nil, "bootstrap_port = "+port)
	}, []string{"error x engine|bootstrap server of prefill does not|engine.bootstrap_port", "warning  config|no decode engine to pair with x|"}},
	{"no KV connector", func(p *patient) {
		p.sim("p", "prefill", "vllm-nixl", nil)
		p.sim("d", "decode", "vllm-nixl", nil)
		e := p.sim("e", "both", "none", nil)
		p.engine("x", strings.Replace(e.URL(), "127.0.0.1", "localhost", 1), "prefill", "vllm-nixl")
	}, []string{"error x engine|no KV connector NixlConnector|--kv-transfer-config"}},
	{"blocks that do not fit one decode engine", func(p *patient) {
		p.sim("p", "prefill", "vllm-nixl", nil)
		p.sim("q", "prefill", "vllm-nixl", func(c *enginesim.Config) { c.BlockSize = 24 })
		p.sim("d", "decode", "vllm-nixl", func(c *enginesim.Config) { c.BlockSize = 48 })
		p.sim("f", "decode", "vllm-nixl", func(c *enginesim.Config) { c.BlockSize = 16 })
	}, []string{"warning  engine|q and f cannot be a pair: prefill's blocks of 24 tokens|--block-size"}},
	{"blocks that fit no engine", func(p *patient) {
		p.sim("p", "prefill", "vllm-nixl", func(c *enginesim.Config) { c.BlockSize = 24 })
		p.sim("d", "decode", "vllm-nixl", nil)
	}, []string{"error  engine|p and d cannot be a pair|--block-size", `error  config|requests for the model "sim" cannot run in two legs|engine.role`}},
	{"other releases", func(p *patient) {
		p.sim("e", "both", "vllm-nixl", nil)
		p.sim("p", "prefill", "vllm-nixl", func(c *enginesim.Config) { c.Version = "0.31.0" })
	}, []string{"error  engine|p and e cannot be a pair: releases differ|the same release"}},
	{"one role", func(p *patient) {
		p.sim("p", "prefill", "vllm-nixl", nil)
	}, []string{`error  config|requests for the model "sim" cannot run in two legs|engine.role`, "warning  config|no decode engine to pair with p|"}},
	{"another model", func(p *patient) {
		p.sim("e", "both", "none", nil, `model = "other"`)
	}, []string{`error e config|engine.model is "other", but the engine serves "sim"|--served-model-name`}},
	{"a model that nobody serves", func(p *patient) {
		p.sim("e", "both", "none", nil)
		p.text.WriteString("[[model]]\nname = \"a\"\nalias_of = \"nowhere\"\n[[model]]\nname = \"b\"\nalias_of = \"sim\"\n[[model]]\nname = \"c\"\nalias_of = \"b\"\n")
	}, []string{`error  config|[[model]] "a" leads to "nowhere"|model[0].alias_of`}},
	{"ranks of SGLang", func(p *patient) {
		p.sim("e", "both", "sglang", func(c *enginesim.Config) { c.Ranks = 2 })
	}, []string{"warning e config|2 data-parallel ranks|engine.ranks = 2"}},
	{"ranks of vLLM", func(p *patient) {
		p.text.WriteString(kvAware)
		p.sim("e", "both", "none", func(c *enginesim.Config) { publishes(c); c.Ranks = 2 })
	}, []string{"warning e config|2 ranks publish KV events|engine.ranks = 2"}},
	{"an old release", func(p *patient) {
		p.sim("e", "both", "sglang", func(c *enginesim.Config) { c.SGLang.Version = "0.4.9" })
	}, []string{"warning e engine|SGLang 0.4.9 is older|0.5"}},
	{"no events", func(p *patient) {
		p.text.WriteString(kvAware)
		p.sim("e", "both", "none", nil)
	}, []string{"warning e engine|announces none|--kv-events-config"}},
	{"events that nobody polls", func(p *patient) {
		p.text.WriteString(kvAware)
		p.sim("e", "both", "trtllm", nil)
	}, []string{`warning e config|does not poll|engine.kv_events = "poll"`}},
	{"a wrong address of events", func(p *patient) {
		p.text.WriteString(kvAware)
		p.sim("e", "both", "none", publishes, fmt.Sprintf("kv_events = 'tcp://%s'", closedPort(p.t)))
	}, []string{"warning e config|the publisher of the KV events cannot be reached|engine.kv_events"}},
	{"a port of loads without a listener", func(p *patient) {
		p.text.WriteString(kvAware)
		other := &patient{t: p.t} // the engine behind the one that is examined
		sim := other.sim("e", "both", "sglang", func(c *enginesim.Config) { publishes(c); c.KVEvents.Loads = "tcp://127.0.0.1:0" })
		_, port, _ := net.SplitHostPort(closedPort(p.t))
		loads := regexp.MustCompile(`("load_endpoint_port_base":)\d+`)
		url := answers(p.t, func(path string) (int, string) {
			resp, err := http.Get(sim.URL() + path)
			if err != nil {
				return http.StatusBadGateway, err.Error()
			}
			defer resp.Body.Close()
			body, _ := io.ReadAll(resp.Body)
			return resp.StatusCode, loads.ReplaceAllString(string(body), "${1}"+port)
		})
		p.engine("e", url, "both", "sglang")
	}, []string{"warning e engine|the publisher of the loads cannot be reached|--load-publish-endpoint"}},
	{"an engine that sleeps", func(p *patient) { p.sim("e", "both", "none", nil).Sleep(1, true) },
		[]string{"warning e engine|sleeps|/wake_up"}},
	{"an engine that a request wakes", func(p *patient) {
		p.text.WriteString("[limits]\nno_engine_timeout = '1m'\n[sleep]\nwake = true\n")
		p.sim("e", "both", "none", func(c *enginesim.Config) { c.DevMode = false })
	}, []string{"warning e engine|no routes of the sleep mode|VLLM_SERVER_DEV_MODE=1"}},
	{"two engines with one id", func(p *patient) {
		p.sim("d", "decode", "vllm-mooncake", nil)
		for _, name := range []string{"p", "q"} {
			boot := p.sim(name, "prefill", "vllm-mooncake", func(c *enginesim.Config) { c.Nixl.EngineID = "twin" })
			fmt.Fprintf(&p.text, "bootstrap_port = %d\n", boot.BootstrapPort())
		}
	}, []string{"error q engine|the same engine_id as p|engine_id"}},
	{"a source of engines that is down", func(p *patient) {
		p.sim("e", "both", "none", nil)
		fmt.Fprintf(&p.text, "[discovery.etcd]\nendpoints = ['http://%s']\n", closedPort(p.t))
	}, []string{"error  config|sources of engines named none in time|[discovery]", "warning  config|discovery of engines failed|[discovery]"}},
}

// answers starts a server that answers every GET.
func answers(t *testing.T, say func(path string) (int, string)) (url string) {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		status, body := say(r.URL.Path)
		w.WriteHeader(status)
		io.WriteString(w, body)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func secretFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(path, []byte("SECRET"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestDoctor(t *testing.T) {
	for _, tt := range doctorCases {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			p := &patient{t: t}
			tt.make(p)
			cfg, err := loadConfig(write(t, p.config()))
			if err != nil {
				t.Fatal(err)
			}
			r, err := examine(t.Context(), cfg) // the check of the plugins would take most of the time
			if err != nil {
				t.Fatal(err)
			}
			code := exit.OK
			if err := doctorStatus(r); err != nil {
				var withCode *exit.Error
				if !errors.As(err, &withCode) {
					t.Fatal(err)
				}
				code = withCode.Code
			}
			left := slices.Clone(tt.want)
			status, wantCode := doctor.OK, exit.OK
			for _, f := range r.Findings {
				if f.Severity == doctor.Note {
					continue
				}
				at := slices.IndexFunc(left, func(w string) bool { return matchesFinding(f, w) })
				if at < 0 {
					t.Errorf("unexpected: %+v", f)
					continue
				}
				left = slices.Delete(left, at, at+1)
				if status != doctor.Errors {
					status, wantCode = doctor.Warnings, exit.Warnings
				}
				if f.Severity == doctor.Error {
					status, wantCode = doctor.Errors, exit.Failure
				}
			}
			if len(left) > 0 {
				t.Errorf("missing: %q in %+v", left, r.Findings)
			}
			if r.Status != status || code != wantCode {
				t.Errorf("status %q and code %d, want %q and %d", r.Status, code, status, wantCode)
			}
			var text, encoded strings.Builder
			if err := (&app{out: &text}).printReport(r); err != nil || !strings.HasSuffix(text.String(), "status: "+status+"\n") {
				t.Errorf("%v: %s", err, text.String())
			}
			if err := (&app{out: &encoded}).printJSON(r); err != nil {
				t.Error(err)
			}
			for _, secret := range []string{"SECRET", "\x1b"} {
				if strings.Contains(encoded.String()+text.String(), secret) {
					t.Errorf("the output contains %q", secret)
				}
			}
		})
	}
}

// matchesFinding compares a finding with "SEVERITY ENGINE SIDE|part of the problem|part of the fix".
func matchesFinding(f doctor.Finding, want string) bool {
	parts := strings.Split(want, "|")
	head := fmt.Sprintf("%s %s %s", f.Severity, f.Engine, f.Side)
	return head == parts[0] && strings.Contains(f.Problem, parts[1]) && (len(parts) < 3 || strings.Contains(f.Fix, parts[2]))
}

// TestDoctorReport: what a report says about a healthy pair whose KV events are used by no policy.
func TestDoctorReport(t *testing.T) {
	p := &patient{t: t}
	prefill := p.sim("p", "prefill", "vllm-nixl", publishes)
	p.sim("d", "decode", "vllm-nixl", nil)
	path := write(t, p.config())
	before := prefill.State()
	code, out, errs := run("doctor", "--json", path)
	var r doctor.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != exit.OK {
		t.Fatalf("code %d, %v: %s", code, err, errs)
	}
	if after := prefill.State(); after.PromptTokens != before.PromptTokens || after.BlocksUsed != 0 {
		t.Errorf("the examination computed a prompt: %+v", after)
	}
	if len(r.Pairs) != 1 || !r.Pairs[0].Fits || r.Fit != 1 || r.Misfits != 0 {
		t.Errorf("pairs %+v", r.Pairs)
	}
	e := r.Engines[1] // by name
	if e.Name != "p" || !e.Ready || e.Kind != "vllm" || e.Version == "" || e.Transfer != "nixl" || e.Events != "announced" || e.BlockTokens != 16 ||
		e.Load != "/metrics" || !e.DevMode || e.Caching != "on" || !slices.Contains(e.APIs, "/v1/chat/completions") || slices.Contains(e.APIs, "/generate") {
		t.Errorf("engine %+v", e)
	}
	if len(e.Publishers) != 1 || e.Publishers[0].Events != prefill.KVEventsEndpoint() || e.Publishers[0].Replay != prefill.KVEventsReplay() {
		t.Errorf("publishers %+v", e.Publishers)
	}
	unused := slices.ContainsFunc(r.Findings, func(f doctor.Finding) bool {
		return matchesFinding(f, `note p config|publishes KV events, which policy.place does not use|policy.place = "kv_aware"`)
	})
	if !unused {
		t.Errorf("findings %+v", r.Findings)
	}
	_, text, _ := run("doctor", path)
	for _, want := range []string{"ENGINES   2: 2 ready", "PAIRS     1: 1 fit, 0 do not", "note: p, d: ", "announced  yes"} {
		if !strings.Contains(strings.Replace(text, "note: d, p: ", "note: p, d: ", 1), want) {
			t.Errorf("the text lacks %q:\n%s", want, text)
		}
	}
}

// TestDoctorManyEngines: the findings of many dead engines become one line, and an invalid
// configuration is reported as by check.
func TestDoctorManyEngines(t *testing.T) {
	p := &patient{t: t}
	url := "http://" + closedPort(t)
	for n := range 1000 {
		p.engine(fmt.Sprintf("e%03d", n), fmt.Sprintf("%s/%d", url, n), "both", "none")
	}
	code, text, _ := run("doctor", write(t, p.config()))
	if code != exit.Failure || strings.Count(text, "no process listens") != 1 || !strings.Contains(text, "e007 and 992 more: no process listens") {
		t.Errorf("code %d: %.2000s", code, text)
	}
	code, _, errs := run("doctor", write(t, "[[engine]]\nname = 'e'\n"))
	if code != exit.Usage || !strings.Contains(errs, "engine[0].url") {
		t.Errorf("code %d: %s", code, errs)
	}
}
