package sidecar

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// caller is the exchange of a test. It places on the engines for which fits returns true.
type caller struct {
	ask   *coordinator.PlacementRequest
	fits  func(coordinator.Within) bool
	calls []string // the policies used, and those skipped with their reasons
}

// place asks until the route has no further policy or destination.
func (c *caller) place(r *Route) error {
	for {
		if err := r.Restrict(); err != nil {
			return err
		}
		var err error
		if !c.fits(c.ask.Within) {
			err = &coordinator.NoTargetError{}
		}
		if !r.Judge(err) {
			return err
		}
	}
}

func (c *caller) Fallback(policy, reason string) { c.calls = append(c.calls, policy+" "+reason) }
func (c *caller) Coordinated(policy string)      { c.calls = append(c.calls, policy) }

// sidecarOf returns a decode engine's sidecar with two prefill engines, p0 and p1.
func sidecarOf(t *testing.T, edit func(*config.Sidecar)) *Sidecar {
	t.Helper()
	cfg := config.Default()
	for _, e := range [][2]string{{"d0", config.RoleDecode}, {"p0", config.RolePrefill}, {"p1", config.RolePrefill}} {
		cfg.Engines = append(cfg.Engines, config.Engine{Name: e[0], URL: "http://" + e[0] + ":8000", Role: e[1], Connector: config.ConnectorVLLMNixl, Ranks: 1})
	}
	cfg.Sidecar.Local, cfg.Sidecar.Role, cfg.Sidecar.Connector = "http://d0:8000", config.RoleDecode, config.ConnectorVLLMNixl
	cfg.Sidecar.Header, cfg.Sidecar.PolicyHeader, cfg.Sidecar.ProfileHeader = "X-Prefill", "X-Policy", "X-Profile"
	if edit != nil {
		edit(&cfg.Sidecar)
	}
	registry := engine.New(engine.Options{
		Protocols: func(name string) (engine.Protocol, bool) { return connector.ByName(name) },
		NewClient: func(config.Engine) (upstream.Client, error) { return nil, nil },
	})
	if err := registry.Apply(engine.SourceStatic, cfg.Engines, time.Hour); err != nil {
		t.Fatal(err)
	}
	return New(&cfg, registry, nil)
}

// read begins the route of a request with that header line.
func read(sc *Sidecar, line string) (*Route, *caller, error) {
	c := &caller{ask: new(coordinator.PlacementRequest), fits: func(coordinator.Within) bool { return true }}
	h := http.Header{}
	if name, value, ok := strings.Cut(line, ": "); ok {
		h.Set(name, value)
	}
	r := new(Route)
	err := r.Read(sc, Request{Body: &openai.Request{API: openai.Completions}, Ask: c.ask, Journal: c}, h, "10.0.0.9:1234")
	return r, c, err
}

// names lists the names of instances.
func names(list []*engine.Instance) string {
	var b []string
	for _, i := range list {
		b = append(b, i.Spec.Name)
	}
	return strings.Join(b, " ")
}

func TestRead(t *testing.T) {
	tests := []struct {
		name, line string
		callers    []string
		named      string // the engines that are named
		status     int    // of the refusal; 0: none
	}{
		{"nothing", "", nil, "", 0},
		{"one engine", "X-Prefill: p1:8000", nil, "p1", 0},
		{"as URLs, in other spellings", "X-Prefill: HTTP://P0:8000/, p1.:8000", nil, "p0 p1", 0},
		{"an unknown engine", "X-Prefill: p2:8000", nil, "", 403},
		{"another port", "X-Prefill: p0:8001", nil, "", 403},
		{"the local engine", "X-Prefill: d0:8000", nil, "", 403},
		{"of a caller that is not trusted", "X-Prefill: p2:8000", []string{"10.0.0.8"}, "", 0},
		{"of a caller that is trusted", "X-Prefill: p0:8000", []string{"10.0.0.0/24"}, "p0", 0},
		{"a policy", "X-Policy: local", nil, "", 0},
		{"a policy that is not in use", "X-Policy: decode_placed", nil, "", 400},
		{"a phase", "X-Profile: DECODE", nil, "", 0},
		{"a phase of another engine", "X-Profile: prefill", nil, "", 400},
		{"no phase", "X-Profile: both", nil, "", 400},
	}
	for _, tt := range tests {
		sc := sidecarOf(t, func(c *config.Sidecar) { c.Callers = tt.callers })
		r, _, err := read(sc, tt.line)
		var oe *openai.Error
		if errors.As(err, &oe) != (tt.status != 0) || oe != nil && oe.Status != tt.status {
			t.Errorf("%s: %v, want status %d", tt.name, err, tt.status)
		}
		if got := names(r.named); err == nil && got != tt.named {
			t.Errorf("%s: the engines %q are named, want %q", tt.name, got, tt.named)
		}
	}
}

// The first policy that can serve the request places it. Policies that should have served
// it are counted.
func TestPlace(t *testing.T) {
	tests := []struct {
		name, line string
		failed     []string // engines on which an attempt has failed
		fits       func(coordinator.Within) bool
		want       string
	}{
		{"nothing is named", "", nil, nil, "local"},
		{"an engine is named", "X-Prefill: p0:8000", nil, nil, "prefill_named"},
		{"another policy first", "X-Policy: prefill_placed", nil, nil, "prefill_placed"},
		{"first, but not for this request", "X-Policy: prefill_named", nil, nil, "prefill_named not_applicable, local"},
		{"the named engine is not ready", "X-Prefill: p0:8000", nil, func(w coordinator.Within) bool { return w.Prefill == nil }, "prefill_named no_target, local"},
		{"the named engine has failed", "X-Prefill: p0:8000", []string{"p0"}, nil, "prefill_named failed, local"},
		{"one of the named engines has failed", "X-Prefill: p0:8000,p1:8000", []string{"p0"}, nil, "prefill_named"},
		{"all have failed", "X-Prefill: p0:8000", []string{"p0", "d0"}, func(w coordinator.Within) bool { return w.Prefill != nil },
			"prefill_named failed, local failed, prefill_placed no_target, prefill_named"},
		{"a caller that coordinates", "X-Profile: decode", nil, nil, "profile_decode"},
	}
	for _, tt := range tests {
		sc := sidecarOf(t, nil)
		r, c, err := read(sc, tt.line)
		if err != nil {
			t.Fatal(err)
		}
		if tt.fits != nil {
			c.fits = tt.fits
		}
		for _, name := range tt.failed {
			c.ask.Excluded = append(c.ask.Excluded, engine.Target{Instance: sc.registry.Snapshot().Instance(name)})
		}
		if err := c.place(r); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if got := strings.Join(c.calls, ", "); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

// A request that no engine can serve has the error of the coordinator, and each policy is
// tried again after a failure only once.
func TestPlaceNowhere(t *testing.T) {
	r, c, err := read(sidecarOf(t, nil), "X-Prefill: p0:8000")
	if err != nil {
		t.Fatal(err)
	}
	c.fits = func(coordinator.Within) bool { return false }
	if err := c.place(r); !errors.Is(err, coordinator.ErrNoTarget) {
		t.Errorf("%v", err)
	}
	if want := []string{"prefill_named no_target", "local no_target", "prefill_placed no_target"}; !slices.Equal(c.calls, want) {
		t.Errorf("%q, want %q", c.calls, want)
	}
}

// The order that operators have set remains after a reload that does not change the
// sidecar's configuration.
func TestOrder(t *testing.T) {
	sc := sidecarOf(t, nil)
	configured := fmt.Sprint(sc.Order())
	if err := sc.SetOrder([]string{"decode_placed"}); err == nil || fmt.Sprint(sc.Order()) != configured {
		t.Errorf("a policy for prefill engines: %v, %v", err, sc.Order())
	}
	if err := sc.SetOrder([]string{"local"}); err != nil {
		t.Fatal(err)
	}
	cfg := config.Default()
	cfg.Engines = []config.Engine{{Name: "d0", URL: "http://d0:8000"}}
	cfg.Sidecar = sc.Config()
	if again := New(&cfg, sc.registry, sc); again != sc || fmt.Sprint(again.Order()) != "[local]" {
		t.Errorf("after a reload: %v", again.Order())
	}
	cfg.Sidecar.Header = "X-Other"
	if next := New(&cfg, sc.registry, sc); fmt.Sprint(next.Order()) != configured {
		t.Errorf("after a change: %v", next.Order())
	}
	sc.ResetOrder()
	if fmt.Sprint(sc.Order()) != configured {
		t.Errorf("after a reset: %v", sc.Order())
	}
	cfg.Sidecar.Local = ""
	if New(&cfg, sc.registry, sc) != nil {
		t.Error("a proxy without sidecar.local is a sidecar")
	}
}
