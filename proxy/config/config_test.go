package config

import (
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestParseEmptyGivesDefaults(t *testing.T) {
	cfg, err := Parse(nil)
	if err != nil {
		t.Fatal(err)
	}
	cfg.lines = nil
	if want := Default(); !reflect.DeepEqual(cfg, want) {
		t.Errorf("got %+v\nwant %+v", cfg, want)
	}
}

// TestDefaults pins the defaults that INTERFACE and operators rely on,
// independently of the functions that set them.
func TestDefaults(t *testing.T) {
	c := Default()
	for _, tt := range []struct {
		key       string
		got, want any
	}{
		{"server.listen", c.Server.Listen, "127.0.0.1:8080"},
		{"server.http3", c.Server.HTTP3, ""},
		{"server.drain_timeout", c.Server.DrainTimeout.String(), "30s"},
		{"server.max_body", c.Server.MaxBody.String(), "16MiB"},
		{"server.max_header", c.Server.MaxHeader.String(), "64KiB"},
		{"server.read_header_timeout", c.Server.ReadHeaderTimeout.String(), "10s"},
		{"server.read_timeout", c.Server.ReadTimeout.String(), "1m0s"},
		{"server.idle_timeout", c.Server.IdleTimeout.String(), "2m0s"},
		{"server.write_timeout", c.Server.WriteTimeout.String(), "1m0s"},
		{"server.tls", c.Server.TLS, TLS{}},
		{"server.tls enabled", c.Server.TLS.Enabled(), false},
		{"admin.listen", c.Admin.Listen, "127.0.0.1:9090"},
		{"timeouts.prefill", time.Duration(c.Timeouts.Prefill), 120 * time.Second},
		{"timeouts.first_byte", time.Duration(c.Timeouts.FirstByte), 300 * time.Second},
		{"timeouts.stream_idle", time.Duration(c.Timeouts.StreamIdle), 60 * time.Second},
		{"timeouts.handshake", time.Duration(c.Timeouts.Handshake), 30 * time.Second},
		{"timeouts.transfer", time.Duration(c.Timeouts.Transfer), 120 * time.Second},
		{"timeouts.deferred_write", time.Duration(c.Timeouts.DeferredWrite), 60 * time.Second},
		{"timeouts.policy", time.Duration(c.Timeouts.Policy), 5 * time.Millisecond},
		{"timeouts.dial", time.Duration(c.Timeouts.Dial), 5 * time.Second},
		{"timeouts.cleanup", time.Duration(c.Timeouts.Cleanup), 5 * time.Second},
		{"limits", c.Limits, Limits{MaxExchanges: 10000, Queue: 1000, QueueTimeout: seconds(10), PerClient: 5000, clientHalf: 5000}},
		{"policy.plan", c.Policy.Plan, "auto"},
		{"policy.place", c.Policy.Place, "least_load"},
		{"policy.mint", c.Policy.Mint, "snowflake"},
		{"policy.runtime", c.Policy.Runtime, "wasm"},
		{"health", c.Health, Health{Interval: seconds(2), SuspectInterval: Duration(250 * time.Millisecond), Timeout: seconds(1), UnhealthyAfter: 3, HealthyAfter: 2, LoadInterval: seconds(1)}},
		{"retry.attempts", c.Retry.Attempts, 3},
		{"retry.budget", c.Retry.Budget, 0.2},
		{"retry.min_budget", c.Retry.MinBudget, 10},
		{"trtllm.schedule_style", c.TRTLLM.ScheduleStyle, "context_first"},
		{"pairs", c.Pairs, Pairs{SameLabels: []string{}}},
		{"circuit", c.Circuit, Circuit{Failures: 5, OpenFor: seconds(10)}},
		{"discovery.etcd.prefix", c.Discovery.Etcd.Prefix, "/pdproxy/engines/"},
		{"discovery.trtllm.refresh_interval", c.Discovery.TRTLLM.RefreshInterval.String(), "10s"},
		{"fleet", c.Fleet, Fleet{Patience: Duration(50 * time.Millisecond), Name: "pdproxy", Etcd: FleetEtcd{Lease: seconds(5)}, Lease: FleetLease{Duration: seconds(5)}}},
		{"sidecar", c.Sidecar, Sidecar{Role: "decode", Connector: "vllm-nixl", Header: "x-prefiller-host-port", EncoderHeader: "x-encoder-hosts-ports", PickerTimeout: Duration(200 * time.Millisecond)}},
		{"transport", c.Transport, Transport{MaxIdle: 256, IdleTimeout: seconds(4)}},
		{"plugin.memory", DefaultPlugin().Memory.String(), "64MiB"},
		{"plugin.crash_budget", DefaultPlugin().CrashBudget, 20},
		{"engine.ranks", DefaultEngine().Ranks, 1},
		{"engine.connector", DefaultEngine().Connector, "none"},
	} {
		if !reflect.DeepEqual(tt.got, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.key, tt.got, tt.want)
		}
	}
}

func TestParseValues(t *testing.T) {
	cfg, err := Parse([]byte(`
server.listen = ":8443"
server.tls = { self_signed = true }
server.http3 = ":8443"
server.expose_placement = true
[limits]
queue = 0
queue_timeout = "0s"
[retry]
budget = 1
[policy]
plan = "never"
place = 'round_robin'
runtime = "native"
[[engine]]
name = "s0"
url = "https://[2001:db8::1]:30000/v2"
role = "prefill"
connector = "sglang"
ranks = 8
bootstrap_port = 8_998
[[engine]]
name = "s1"
url = "http://s1"
role = "decode"
connector = "sglang"
[[engine]]
name = "plain"
url = "http://plain:1/"
role = "both"
[[upstream]]
name = "outbound|80||auth.svc"
url = "http://auth.svc"
`))
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Server.Listen != ":8443" || !cfg.Server.TLS.Enabled() || !cfg.Server.ExposePlacement {
		t.Errorf("server: %+v", cfg.Server)
	}
	if cfg.Server.MaxBody != 16<<20 {
		t.Errorf("max_body lost its default: %v", cfg.Server.MaxBody)
	}
	if cfg.Retry.Budget != 1 || cfg.Limits.Queue != 0 || cfg.Policy.Runtime != "native" {
		t.Errorf("retry %+v limits %+v policy %+v", cfg.Retry, cfg.Limits, cfg.Policy)
	}
	want := []Engine{
		{Name: "s0", URL: "https://[2001:db8::1]:30000/v2", Role: RolePrefill, Connector: ConnectorSGLang, Ranks: 8, BootstrapPort: 8998},
		{Name: "s1", URL: "http://s1", Role: RoleDecode, Connector: ConnectorSGLang, Ranks: 1},
		{Name: "plain", URL: "http://plain:1/", Role: RoleBoth, Connector: ConnectorNone, Ranks: 1},
	}
	if !reflect.DeepEqual(cfg.Engines, want) {
		t.Errorf("engines: got %+v\nwant %+v", cfg.Engines, want)
	}
	if warnings := cfg.Warnings(); len(warnings) != 0 {
		t.Errorf("warnings: %v", warnings)
	}
}

func TestProblemsError(t *testing.T) {
	_, err := Parse([]byte("[server]\nlisten = \"8080\"\nmax_bdy = \"1MiB\"\n\n[[engine]]\nname = \"p0\"\nurl = \"http://p0\"\nrole = 'prefil'\n"))
	var problems Problems
	if !errors.As(err, &problems) {
		t.Fatalf("error is %T, want Problems", err)
	}
	want := strings.Join([]string{
		`config: line 2: server.listen: invalid address "8080": want host:port`,
		`config: line 3: server.max_bdy: unknown key, did you mean max_body?`,
		`config: line 8: engine[0].role (p0): must be one of "prefill", "decode", "both", "encode", found "prefil", did you mean prefill?`,
	}, "\n")
	if err.Error() != want {
		t.Errorf("got\n%s\nwant\n%s", err, want)
	}
	for want, p := range map[string]Problem{
		"config: m":                         {Message: "m"},
		"bad.toml:3: server.htttp3: m":      {File: "bad.toml", Line: 3, Key: "server.htttp3", Message: "m"},
		"bad.toml:3: engine[0].url (p0): m": {File: "bad.toml", Line: 3, Key: "engine[0].url", Name: "p0", Message: "m"},
		"bad.toml: m":                       {File: "bad.toml", Message: "m"},
	} {
		if got := p.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// TestValidateInCode checks a Config that was never text: problems have keys
// and no lines.
func TestValidateInCode(t *testing.T) {
	cfg := Default()
	if problems := cfg.Validate(); len(problems) != 0 {
		t.Fatalf("defaults: %v", problems)
	}
	cfg.Server.MaxBody = -1
	problems := cfg.Validate()
	if len(problems) != 1 || problems[0] != (Problem{Key: "server.max_body", Message: "must be more than 0"}) {
		t.Errorf("got %v", problems)
	}
}
