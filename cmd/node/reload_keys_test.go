package node

import (
	"bytes"
	"context"
	"log/slog"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// reloadedKeys are the keys whose new values apply to the whole process after a reload. An
// array of tables is one key.
var reloadedKeys = []string{
	"server.drain_timeout", "server.takeover_timeout", "server.read_timeout", "server.min_body_rate", "server.expose_placement",
	"server.trust_pd_fields", "server.trust_engine_fields", "server.access_log", "server.access_log_format", "server.trusted_proxies", "server.cors_origins", "server.engine_routes", "server.auth.keys_file",
	"admin.trust_added_engines", "epp.fallbacks", "epp.pass_through", "epp.metadata", "epp.drain_quiet", "epp.model_header",
	"timeouts.prefill", "timeouts.first_byte", "timeouts.stream_idle", "timeouts.handshake", "timeouts.transfer", "timeouts.deferred_write",
	"timeouts.policy", "timeouts.cleanup",
	"limits.max_exchanges", "limits.queue", "limits.queue_timeout", "limits.no_engine_timeout", "limits.max_reading", "limits.per_client",
	"limits.max_connections", "limits.max_connections_per_address", "limits.buffer_memory", "limits.priority_header", "limits.deadline_header", "limits.token_time_header",
	"limits.fairness_header", "limits.saturation_queue_depth", "limits.saturation_kv_usage", "limits.trust_priority",
	"policy.plan", "policy.place", "policy.mint", "policy.retain", "policy.evict", "policy.order", "policy.runtime", "policy.params",
	"conversation.fields", "conversation.headers", "conversation.parent_headers", "conversation.late_fields",
	"scores", "plugin", "upstream", "model", "remote", "priority_class", "tenant", "jwt", "engine",
	"health.interval", "health.suspect_interval", "health.timeout", "health.unhealthy_after", "health.healthy_after", "health.load_interval",
	"retry.attempts", "retry.budget", "retry.min_budget", "retry.continue", "retry.continue_tokens", "circuit.failures", "circuit.open_for",
	"retry.move_after",
	"pairs.allow_incompatible", "pairs.same_labels", "pairs.warm_up",
	"sleep.wake", "sleep.after", "sleep.timeout",
	"trtllm.auth_key_file", "trtllm.schedule_style",
	"sidecar.local", "sidecar.role", "sidecar.connector", "sidecar.header", "sidecar.encoder_header", "sidecar.policies", "sidecar.policy_header",
	"sidecar.profile_header", "sidecar.callers", "sidecar.picker", "sidecar.picker_timeout", "sidecar.picker_failure_mode_allow",
	"sidecar.picker_subset", "sidecar.picker_ca", "sidecar.picker_insecure_skip_verify",
}

// keysOf lists the keys of a table.
func keysOf(table string, t reflect.Type) (keys []string) {
	for i := range t.NumField() {
		f := t.Field(i)
		tag, tagged := f.Tag.Lookup("toml")
		switch key := table + tag; {
		case !tagged:
		case f.Type.Kind() == reflect.Struct:
			keys = append(keys, keysOf(key+".", f.Type)...)
		default:
			keys = append(keys, key)
		}
	}
	return keys
}

// TestEveryKeyHasAReload: for each key, one list says what a reload does. A new key must be
// added to one of them.
func TestEveryKeyHasAReload(t *testing.T) {
	keys := keysOf("", reflect.TypeFor[config.Config]())
	for _, key := range keys {
		_, partly := partlyFixed[key]
		lists := 0
		for _, in := range []bool{covers(fixedKeys, key), covers(engineKeys, key), partly, slices.Contains(reloadedKeys, key)} {
			if in {
				lists++
			}
		}
		if lists != 1 {
			t.Errorf("%s is in %d lists, want 1: what does a reload do?", key, lists)
		}
	}
	for _, key := range reloadedKeys {
		if !slices.Contains(keys, key) {
			t.Errorf("%s is no key", key)
		}
	}
}

// TestReloadNamesFixedKeys: the log names each changed key that keeps its old value, and no
// other key.
func TestReloadNamesFixedKeys(t *testing.T) {
	var logged bytes.Buffer
	start := config.Default()
	start.Server.Listen, start.Admin.Listen, start.Policy.Runtime = "127.0.0.1:0", "127.0.0.1:0", "native"
	n, err := New(&start, slog.New(slog.NewTextHandler(&logged, nil)), Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := n.Serve(ctx); err != nil {
			t.Error(err)
		}
	})
	warned := regexp.MustCompile(`level=WARN .* key=(\S+)`)
	engine := config.DefaultEngine()
	engine.Name, engine.URL, engine.Role = "e0", "http://127.0.0.1:1", "both"
	for _, tt := range []struct {
		name   string
		change func(*config.Config)
		want   []string
		logged string // a part of the log; "" for any
	}{
		{"limits", func(c *config.Config) { c.Limits.Queue, c.Server.MaxBody = 7, 1<<20 }, nil, `level=INFO msg="configuration reloaded" changes="server.max_body, limits.queue"`},
		{"connections", func(c *config.Config) {
			c.Server.ReadHeaderTimeout, c.Server.IdleTimeout, c.Server.WriteTimeout = config.Duration(time.Second), config.Duration(time.Second), config.Duration(time.Second)
			c.Server.MaxHeader = 32 << 10
		}, []string{"server.max_header", "server.read_header_timeout", "server.idle_timeout", "server.write_timeout"}, ""},
		{"no change since the start", func(*config.Config) {}, nil, `changes="server.max_header, server.read_header_timeout, server.idle_timeout, server.write_timeout"`},
		{"no change", func(*config.Config) {}, nil, `changes="none; files that keys name were read again"`},
		{"a new engine", func(c *config.Config) { c.Engines = []config.Engine{engine} }, nil, `changes="engine.e0 added"`},
		{"an engine less", func(*config.Config) {}, nil, `changes="engine.e0 removed"`},
		{"engines", func(c *config.Config) { c.Timeouts.Dial, c.Transport.MaxIdle = config.Duration(time.Second), 3 }, []string{"timeouts.dial", "transport.max_idle"}, ""},
		{"the same engines", func(c *config.Config) { c.Timeouts.Dial, c.Transport.MaxIdle = config.Duration(time.Second), 3 }, nil, ""},
		{"tables", func(c *config.Config) {
			c.Fleet.Patience, c.Discovery.DNS.Interval = config.Duration(time.Second), config.Duration(time.Second)
			c.Timeouts.Dial, c.Transport.MaxIdle = config.Duration(time.Second), 3
		}, []string{"discovery.dns.interval", "fleet.patience"}, ""},
	} {
		next := start
		tt.change(&next)
		logged.Reset()
		if err := n.Reload(&next); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, m := range warned.FindAllStringSubmatch(logged.String(), -1) {
			got = append(got, m[1])
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: the log names %q, want %q:\n%s", tt.name, got, tt.want, logged.String())
		}
		if text := logged.String(); !strings.Contains(text, tt.logged) || strings.Count(text, "configuration reloaded") != 1 {
			t.Errorf("%s: the log lacks %s:\n%s", tt.name, tt.logged, text)
		}
	}
}
