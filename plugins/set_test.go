package plugins

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/policy"
	"github.com/pdproxy/pdproxy/plugins/policy/policytest"
	"github.com/pdproxy/pdproxy/plugins/source"
	"github.com/pdproxy/pdproxy/policies"
)

// TestBuiltins: the built-in policies decide the same in both runtimes.
func TestBuiltins(t *testing.T) {
	w := newWorld(t)
	for _, native := range []bool{true, false} {
		w.config.Native = native
		for _, name := range []string{"round_robin", "least_load", "power_of_two"} {
			w.config.Place = name
			w.apply()
			runtime := "wasm"
			if native {
				runtime = "native"
			}
			d, by, ok := w.place("")
			if !ok || by != name || d.Prefill < 0 || d.Prefill > 1 || d.Decode < 2 || d.Decode > 3 {
				t.Errorf(`%s, %s: w.place("") = %+v, %q, %v`, runtime, name, d, by, ok)
			}
			r := w.row(name, "place")
			if r.Calls != 1 || r.Runtime != runtime || r.State != "active" || (r.SHA256 == "") != native {
				t.Errorf("row %+v", r)
			}
		}
		if a, by, ok := w.Plan(t.Context(), &abi.PlanFacts{PrefillTargets: 1, DecodeTargets: 1}); !ok || by != "auto" || a.Decision != abi.PlanDisaggregate {
			t.Errorf("plan: %+v, %q, %v", a, by, ok)
		}
		if id, by, ok := w.Mint(t.Context(), &abi.MintFacts{UnixMilli: abi.DisaggEpochMilli}); !ok || by != "snowflake" || id != abi.MinDisaggID {
			t.Errorf("mint: %d, %q, %v", id, by, ok)
		}
		if d, by, ok := w.Retain(&abi.RetainFacts{MostMillis: 9}); !ok || by != "likely" || d.Millis != 9 {
			t.Errorf("retain: %+v, %q, %v", d, by, ok)
		}
		if w.HasLegs() {
			t.Error("the built-in policies have a leg hook")
		}
	}
	if n := len(w.Rows()); n != 4 {
		t.Errorf("got %d rows", n)
	}
	sha := w.row("auto", "plan").SHA256
	if err := w.Reload(t.Context(), "auto"); err != nil {
		t.Error(err)
	}
	if r := w.row("auto", "plan"); r.SHA256 != sha || r.Calls != 0 {
		t.Errorf("row after a reload: %+v", r)
	}
	if _, _, ok := w.place(""); !ok {
		t.Error("no decision after a reload")
	}
}

func TestPluginDecides(t *testing.T) {
	w := newWorld(t, guest(t, "leg=edit"))
	w.config.Plan, w.config.Place, w.config.Mint = []string{"p"}, "p", "p"
	w.apply()
	if a, by, ok := w.Plan(t.Context(), &abi.PlanFacts{}); a.Decision != abi.PlanAggregate || by != "p" || !ok {
		t.Errorf("plan: %+v, %q, %v", a, by, ok)
	}
	if d, by, ok := w.place(""); d != (abi.PlaceDecision{Prefill: 1, Decode: 3}) || by != "p" || !ok {
		t.Errorf("place: %+v, %q, %v", d, by, ok)
	}
	if id, by, ok := w.Mint(t.Context(), &abi.MintFacts{}); id != abi.MinDisaggID || by != "p" || !ok {
		t.Errorf("mint: %d, %q, %v", id, by, ok)
	}
	if !w.HasLegs() {
		t.Error("no leg hook")
	}
	if d, list, reason := w.Leg(t.Context(), &abi.LegFacts{Engine: "p0"}, nil); d != abi.LegEdited || len(list) == 0 || reason != "" {
		t.Errorf("leg: %v, %d bytes, %q", d, len(list), reason)
	}
	w.Finish(&abi.FinishFacts{})
	if r := w.row("p", "finish"); r.Calls != 1 || r.Failures != 0 {
		t.Errorf("finish: %+v", r)
	}
}

func TestNamedPolicies(t *testing.T) {
	w := newWorld(t, guest(t, "names=yes"))
	w.config.Place = "p/first"
	w.apply()
	if d, by, ok := w.place(""); d != (abi.PlaceDecision{Prefill: 0, Decode: 2}) || by != "p/first" || !ok {
		t.Errorf("place: %+v, %q, %v", d, by, ok)
	}
	w.config.Plan = []string{"p"} // the only one of its hook
	w.apply()
	if _, by, ok := w.Plan(t.Context(), &abi.PlanFacts{}); by != "p/gate" || !ok {
		t.Errorf("plan: %q, %v", by, ok)
	}
	if needs := w.Needs(); needs != abi.NeedPrompt|abi.NeedConversation {
		t.Errorf("needs %v", needs.Names())
	}
	if err := w.Reload(t.Context(), "p/first"); err != nil {
		t.Error(err)
	}
}

// TestPlanOrder: the first policy that does not pass decides, and a failure
// ends the search.
func TestPlanOrder(t *testing.T) {
	first, second := guest(t, "plan=pass"), guest(t, "plan=reject")
	first.Name, second.Name = "first", "second"
	w := newWorld(t, first, second)
	ask := func(f abi.PlanFacts) (abi.PlanAnswer, string, bool) { return w.Plan(t.Context(), &f) }
	w.config.Plan = []string{"first", "second"}
	w.apply()
	if a, by, ok := ask(abi.PlanFacts{}); a != (abi.PlanAnswer{Decision: abi.PlanReject, Status: 429}) || by != "second" || !ok {
		t.Errorf("ask = %+v, %q, %v", a, by, ok)
	}
	w.config.Plan = []string{"first", "auto"}
	w.apply()
	if a, by, ok := ask(abi.PlanFacts{BothTargets: 1}); a.Decision != abi.PlanAggregate || by != "auto" || !ok {
		t.Errorf("ask = %+v, %q, %v", a, by, ok)
	}
	if _, by, ok := ask(abi.PlanFacts{Request: abi.RequestFacts{Model: "do:trap"}}); by != policy.Trap || ok {
		t.Errorf("a trap: %q, %v", by, ok)
	}
	w.config.Plan = []string{"first"}
	w.apply()
	if a, by, ok := ask(abi.PlanFacts{}); a.Decision != abi.PlanPass || by != "first" || !ok {
		t.Errorf("all pass: %+v, %q, %v", a, by, ok)
	}
}

// TestApplyRefuses: a configuration that cannot be used changes nothing, and
// the error names the key.
func TestApplyRefuses(t *testing.T) {
	good := guest(t, "")
	w := newWorld(t, good)
	w.config.Place = "p"
	w.apply()
	garbage := filepath.Join(t.TempDir(), "g.wasm")
	if err := os.WriteFile(garbage, []byte("no module"), 0o600); err != nil {
		t.Fatal(err)
	}
	changed := func(change func(*Spec)) Config {
		c, spec := w.config, good
		change(&spec)
		c.Plugins = []Spec{good, spec}
		c.Plugins[1].Name = "q"
		return c
	}
	named := guest(t, "names=yes")
	named.Name = "n"
	for name, tt := range map[string]struct {
		config    Config
		key, want string
	}{
		"no file":          {changed(func(s *Spec) { s.Source.Location += "x" }), "plugin[1].path", "no such file"},
		"no module":        {changed(func(s *Spec) { s.Source.Location = garbage }), "plugin[1]", "not WebAssembly"},
		"other digest":     {changed(func(s *Spec) { s.Source.SHA256 = strings.Repeat("0", 64) }), "plugin[1].sha256", "sha256"},
		"configure false":  {changed(func(s *Spec) { s.Config = "configure=false" }), "plugin[1]", "proxy_on_configure"},
		"configure traps":  {changed(func(s *Spec) { s.Config = "configure=trap" }), "plugin[1]", "configure"},
		"memory too small": {changed(func(s *Spec) { s.MemoryPages = 3 }), "plugin[1]", "memory"},
		"unknown place":    {Config{Plan: []string{"auto"}, Place: "x", Mint: "snowflake", Retain: "likely", Native: true}, "policy.place", `"x" is neither`},
		"unknown plan":     {Config{Plan: []string{"y", "auto"}, Place: "least_load", Mint: "snowflake", Retain: "likely", Native: true}, "policy.order[0]", `"y" is neither`},
		"unknown mint":     {Config{Plan: []string{"auto"}, Place: "least_load", Mint: "z", Native: true}, "policy.mint", `"z" is neither`},
		"unknown retain":   {Config{Plan: []string{"auto"}, Place: "least_load", Mint: "snowflake", Retain: "z", Native: true}, "policy.retain", `"z" is neither`},
		"unknown in wasm":  {Config{Plan: []string{"auto"}, Place: "least_load", Mint: "z", Budget: time.Second}, "policy.mint", `"z" is neither`},
		"several named":    {Config{Plugins: []Spec{named}, Plan: []string{"auto"}, Place: "n", Mint: "snowflake", Retain: "likely", Native: true}, "policy.place", "n/last, n/first"},
		"unknown named":    {Config{Plugins: []Spec{named}, Plan: []string{"auto"}, Place: "n/x", Mint: "snowflake", Retain: "likely", Native: true}, "policy.place", "n/last, n/first"},
		"hook is absent":   {Config{Plugins: []Spec{named}, Plan: []string{"auto"}, Place: "n/last", Mint: "n", Native: true}, "policy.mint", "pdproxy_v1_on_mint"},
	} {
		t.Run(name, func(t *testing.T) {
			tt.config.Natives = w.config.Natives
			err := w.Apply(t.Context(), tt.config)
			var e *Error
			if !errors.As(err, &e) || e.Key != tt.key || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got error %v, want %s with %q", err, tt.key, tt.want)
			}
			if strings.HasPrefix(tt.key, "plugin[1]") && !strings.HasPrefix(err.Error(), tt.key+" (q): ") {
				t.Errorf("got error %v, want one that names the plugin q", err)
			}
			if _, by, ok := w.place(""); by != "p" || !ok {
				t.Errorf("afterwards %q, %v", by, ok)
			}
		})
	}
	if len(w.Rows()) != 9 { // auto, snowflake, likely and the guest's six
		t.Errorf("rows %+v", w.Rows())
	}
}

// TestApplyKeeps: a version with the same module and settings continues.
func TestApplyKeeps(t *testing.T) {
	w := newWorld(t, guest(t, ""))
	w.config.Place = "p"
	w.apply()
	w.place("")
	w.config.Plan = []string{"always"}
	w.apply()
	if r := w.row("p", "place"); r.Calls != 1 {
		t.Errorf("the policy was loaded again: %+v", r)
	}
	w.config.Plugins = append([]Spec(nil), w.config.Plugins...)
	w.config.Plugins[0].Config = "mint=absent"
	w.apply()
	if r := w.row("p", "place"); r.Calls != 0 {
		t.Errorf("the policy was not loaded again: %+v", r)
	}
	if w.changed != 3 {
		t.Errorf("%d changes were reported", w.changed)
	}
}

// TestReloadKeepsTheOld: when a new version cannot be used, the old one
// continues, and its state says so until a reload succeeds.
func TestReloadKeepsTheOld(t *testing.T) {
	spec := guest(t, "")
	wasm, err := os.ReadFile(spec.Source.Location)
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, spec)
	w.config.Place = "p"
	w.apply()
	sha := w.row("p", "place").SHA256
	if err := os.WriteFile(spec.Source.Location, wasm[:1000], 0o600); err != nil {
		t.Fatal(err)
	}
	if err := w.Reload(t.Context(), "p"); err == nil || !strings.Contains(err.Error(), "compile") {
		t.Errorf("reload: %v", err)
	}
	w.lookAtFiles(t.Context())
	w.lookAtFiles(t.Context()) // it is not tried again
	if r := w.row("p", "place"); r.State != "failed" || r.SHA256 != sha || w.failed("p load failed") != 1 {
		t.Errorf("row %+v, metrics %v", r, w.fails)
	}
	if _, by, ok := w.place(""); by != "p" || !ok {
		t.Errorf("the old version: %q, %v", by, ok)
	}
	if err := os.WriteFile(spec.Source.Location, append(wasm, 0, 3, 1, 'x', 0), 0o600); err != nil { // a custom section
		t.Fatal(err)
	}
	if err := w.Reload(t.Context(), "p"); err != nil {
		t.Fatal(err)
	}
	if r := w.row("p", "place"); r.State != "active" || r.SHA256 == sha {
		t.Errorf("row %+v", r)
	}
	for _, name := range []string{"nobody", "auto"} {
		if err := w.Reload(t.Context(), name); err == nil {
			t.Errorf("reload of %s: no error", name)
		}
	}
}

// TestReloadOfAModuleThatIsTooLargeToCompile: a new file whose compilation would take too much time or
// memory is refused before it is compiled. The error names the function and the limit, and the
// old version decides.
func TestReloadOfAModuleThatIsTooLargeToCompile(t *testing.T) {
	for _, trusted := range []bool{false, true} {
		spec := guest(t, "")
		spec.Trusted = trusted
		w := newWorld(t, spec)
		w.config.Place = "p"
		w.apply()
		sha := w.row("p", "place").SHA256
		if err := os.WriteFile(spec.Source.Location, bomb(600), 0o600); err != nil {
			t.Fatal(err)
		}
		err := w.Reload(t.Context(), "p")
		if want := `too large to compile: function 0 ("bomb") has 602404 branches between blocks, the limit is 25000`; err == nil || !strings.Contains(err.Error(), want) || !errors.Is(err, host.ErrTooLarge) {
			t.Errorf("got %v, want %s", err, want)
		}
		if r := w.row("p", "place"); r.State != "failed" || r.SHA256 != sha {
			t.Errorf("row %+v", r)
		}
		if _, by, ok := w.place(""); by != "p" || !ok {
			t.Errorf("the old version: %q, %v", by, ok)
		}
		if err := os.WriteFile(spec.Source.Location, make([]byte, host.MaxSize+1), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := w.Reload(t.Context(), "p"); err == nil || !strings.Contains(err.Error(), "larger than 33554432 bytes") {
			t.Errorf("a file of %d bytes: %v", host.MaxSize+1, err)
		}
	}
}

// bomb returns a module with one function of n blocks, each with a jump table of 1,001 labels.
func bomb(n int) []byte {
	leb := func(n int) []byte { return binary.AppendUvarint(nil, uint64(n)) }
	section := func(id byte, data ...[]byte) []byte {
		body := slices.Concat(data...)
		return slices.Concat([]byte{id}, leb(len(body)), body)
	}
	block := slices.Concat([]byte{0x02, 0x40, 0x20, 0, 0x0e}, leb(1000), make([]byte, 1001), []byte{0x0b})
	body := slices.Concat([]byte{0}, bytes.Repeat(block, n), []byte{0x0b})
	return slices.Concat([]byte("\x00asm\x01\x00\x00\x00"),
		section(1, []byte{1, 0x60, 1, 0x7f, 0}), section(3, []byte{1, 0}),
		section(10, []byte{1}, leb(len(body)), body),
		section(0, []byte("\x04name"), section(1, []byte("\x01\x00\x04bomb"))))
}

// another writes another module with the same behaviour into the file of a plugin.
func another(t *testing.T, spec Spec) {
	t.Helper()
	wasm, err := os.ReadFile(spec.Source.Location)
	if err == nil {
		err = os.WriteFile(spec.Source.Location, append(wasm, 0, 3, 1, 'x', 0), 0o600) // a custom section
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestCanary: a new version first takes its share, and then all decisions or none.
func TestCanary(t *testing.T) {
	next := func(t *testing.T, share float64, config string) (*world, error) {
		spec := guest(t, "")
		spec.Canary = share
		w := newWorld(t, spec)
		w.config.Place = "p"
		w.apply()
		w.table.Load().plugins[0].spec.Config = config // for the next version
		return w, w.Reload(t.Context(), "p")
	}
	states := func(w *world) (states string) {
		for _, r := range w.Rows() {
			if r.Name == "p" && r.Phase == "place" {
				states += r.State + " "
			}
		}
		return strings.TrimSpace(states)
	}
	t.Run("no canary", func(t *testing.T) {
		w, err := next(t, 0, "place=nonsense")
		if _, by, ok := w.place(""); err != nil || ok || by != policy.Nonsense {
			t.Errorf(`%v: w.place("") = %q, %v, want %q, false`, err, by, ok, policy.Nonsense)
		}
	})
	t.Run("made-up requests", func(t *testing.T) {
		w, err := next(t, 0.5, "place=nonsense")
		if _, _, ok := w.place(""); err == nil || !ok || states(w) != "failed" {
			t.Errorf(`%v: w.place("") = %v, %s`, err, ok, states(w))
		}
	})
	t.Run("proves itself", func(t *testing.T) {
		w, err := next(t, 0.5, "mint=absent")
		if err != nil || states(w) != "active canary" {
			t.Fatalf(`next(0.5, "mint=absent") = %v, %s`, err, states(w))
		}
		for range 200 {
			if d, by, ok := w.place(""); d.Decode != 3 || by != "p" || !ok {
				t.Fatalf(`w.place("") = %+v, %q, %v`, d, by, ok)
			}
		}
		for _, r := range w.Rows() {
			if r.Phase == "place" && (r.Calls < 50 || r.Calls > 150) {
				t.Errorf("of 200 decisions %d fell to %s", r.Calls, r.State)
			}
		}
		w.endTrials(time.Now())
		if states(w) != "active canary" {
			t.Errorf("states before the end of the canary: %s", states(w))
		}
		w.endTrials(time.Now().Add(2 * time.Hour))
		if _, by, ok := w.Mint(t.Context(), &abi.MintFacts{}); states(w) != "active" || by != "snowflake" || !ok {
			t.Errorf("states after the end of the canary: %s", states(w))
		}
		if c := w.table.Load().plugins[0].spec.Config; c != "mint=absent" {
			t.Errorf("the version with %q serves", c)
		}
	})
	t.Run("fails", func(t *testing.T) {
		w, err := next(t, 1, "")
		if err != nil {
			t.Fatal(err)
		}
		if _, by, ok := w.place("nonsense"); ok || by != policy.Nonsense {
			t.Errorf(`w.place("nonsense") = %q, %v, want %q, false`, by, ok, policy.Nonsense)
		}
		w.endTrials(time.Now())
		if _, _, ok := w.place(""); states(w) != "failed" || !ok || w.failed("p load failed") != 1 {
			t.Errorf(`%s: w.place("") = %v, want true`, states(w), ok)
		}
	})
	t.Run("configuration is applied", func(t *testing.T) {
		spec := guest(t, "")
		spec.Canary = 0.5
		w := newWorld(t, spec)
		w.config.Place = "p"
		w.apply()
		another(t, spec)
		for range 2 { // a second reload continues the canary
			w.apply()
			if _, by, ok := w.place(""); by != "p" || !ok || states(w) != "active canary" {
				t.Fatalf(`w.place("") = %q, %v, %s`, by, ok, states(w))
			}
		}
		fresh := w.table.Load().canaries[0].fresh
		w.lookAtFiles(t.Context())
		w.lookAtFiles(t.Context())
		if c := w.table.Load().canaries; len(c) != 1 || c[0].fresh != fresh {
			t.Errorf("the canary was started again: %+v", c)
		}
		w.endTrials(time.Now().Add(2 * time.Hour))
		if states(w) != "active" || w.table.Load().plugins[0] != fresh {
			t.Errorf("states after the end of the canary: %s", states(w))
		}
	})
	t.Run("configuration is applied with a bad version", func(t *testing.T) {
		spec := guest(t, "finish=trap")
		spec.Canary = 0.5
		w := newWorld(t, spec)
		w.config.Place = "p"
		w.apply()
		old := w.table.Load().plugins[0]
		another(t, spec)
		if err := w.Apply(t.Context(), w.config); err == nil || !strings.Contains(err.Error(), "hook finish: trap") || w.table.Load().plugins[0] != old || states(w) != "active" {
			t.Errorf("applied with %v, %s", err, states(w))
		}
	})
	t.Run("reloads meanwhile", func(t *testing.T) {
		w, _ := next(t, 1, "")
		if err := w.Reload(t.Context(), "p"); err != nil || states(w) != "active canary" {
			t.Errorf(`w.Reload("p") = %v, %s`, err, states(w))
		}
		w.apply()
		if _, by, ok := w.place(""); by != "p" || !ok || states(w) != "active" {
			t.Errorf(`w.place("") = %q, %v, %s`, by, ok, states(w))
		}
	})
}

func TestParkedAndBack(t *testing.T) {
	spec := guest(t, "")
	spec.CrashBudget = 2
	w := newWorld(t, spec)
	w.config.Place = "p"
	w.apply()
	for i := range 5 {
		want := policy.Nonsense
		if i > 2 {
			want = policy.Parked
		}
		if _, by, ok := w.place("nonsense"); by != want || ok {
			t.Errorf("failure %d: %q, %v", i, by, ok)
		}
	}
	if r := w.row("p", "place"); r.State != "parked" || r.Failures != 5 {
		t.Errorf("row %+v", r)
	}
	if err := w.Reload(t.Context(), "p"); err != nil {
		t.Fatal(err)
	}
	if _, by, ok := w.place(""); by != "p" || !ok || w.row("p", "place").State != "active" {
		t.Errorf("decision after the reload: %q, %v", by, ok)
	}
	for range 3 {
		w.place("nonsense")
	}
	w.apply()
	if _, _, ok := w.place(""); !ok {
		t.Error("Apply of the same configuration does not enable the parked policy")
	}
}

func TestFileChange(t *testing.T) {
	spec := guest(t, "")
	w := newWorld(t, spec)
	w.config.Place = "p"
	w.apply()
	sha := w.row("p", "place").SHA256
	wasm, err := os.ReadFile(spec.Source.Location)
	if err != nil {
		t.Fatal(err)
	}
	w.lookAtFiles(t.Context())
	w.lookAtFiles(t.Context())
	if w.changed != 1 {
		t.Fatal("reloaded without a change")
	}
	other := spec.Source.Location + ".new"
	if err := os.WriteFile(other, append(wasm, 0, 3, 1, 'y', 0), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(other, spec.Source.Location); err != nil {
		t.Fatal(err)
	}
	w.lookAtFiles(t.Context())
	w.lookAtFiles(t.Context())
	if r := w.row("p", "place"); r.SHA256 == sha || w.changed != 2 {
		t.Errorf("row %+v, %d changes", r, w.changed)
	}
	w.lookAtFiles(t.Context())
	w.lookAtFiles(t.Context())
	if w.changed != 2 {
		t.Errorf("got %d changes", w.changed)
	}
}

func TestModuleOverHTTP(t *testing.T) {
	spec := guest(t, "")
	server := httptest.NewServer(http.FileServer(http.Dir(filepath.Dir(spec.Source.Location))))
	defer server.Close()
	spec.Source = source.Source{Location: server.URL + "/guest.wasm"}
	w := newWorld(t, spec)
	w.config.Place = "p"
	w.apply()
	if _, by, ok := w.place(""); by != "p" || !ok {
		t.Errorf(`w.place("") = %q, %v, want "p", true`, by, ok)
	}
	if err := w.Reload(t.Context(), "p"); err != nil {
		t.Error(err)
	}
}

// TestHammerReload: many reloads lose no decision and leave nothing over.
func TestHammerReload(t *testing.T) { synctest.Test(t, hammerReload) }

func hammerReload(t *testing.T) {
	w := newWorld(t, guest(t, ""))
	w.config.Place = "p"
	w.apply()
	before := runtime.NumGoroutine()
	var wg sync.WaitGroup
	var stop atomic.Bool
	var decided atomic.Int64
	for range 4 {
		wg.Go(func() {
			for !stop.Load() {
				if d, by, ok := w.Place(context.Background(), policytest.Pair("")); !ok || by != "p" || d.Decode != 3 {
					t.Errorf(`w.Place(policytest.Pair("")) = %+v, %q, %v`, d, by, ok)
					return
				}
				decided.Add(1)
				w.Finish(&abi.FinishFacts{})
			}
		})
	}
	times := reloads
	if testing.Short() {
		times = 5
	}
	for range times {
		if err := w.Reload(t.Context(), "p"); err != nil {
			t.Error(err)
		}
	}
	stop.Store(true)
	wg.Wait()
	w.draining.Wait()
	if decided.Load() == 0 {
		t.Error("no decision was made")
	}
	// Goroutines with a stop signal end in synctest.Wait. The runtime's goroutine of
	// finalizers counts while it runs one, and this test cannot wait for it.
	var after int
	for range 100_000 {
		synctest.Wait()
		if after = runtime.NumGoroutine(); after <= before {
			return
		}
		runtime.Gosched()
	}
	t.Errorf("%d goroutines before, %d after", before, after)
}

// waiting is a log handler that ends a context when a line reports that the proxy waits for a
// plugin.
type waiting struct {
	slog.Handler
	end  context.CancelFunc
	said atomic.Pointer[string]
}

// Enabled implements slog.Handler.
func (*waiting) Enabled(context.Context, slog.Level) bool { return true }

// WithAttrs implements slog.Handler and ignores the attributes.
func (h *waiting) WithAttrs([]slog.Attr) slog.Handler { return h }

// Handle implements slog.Handler.
func (h *waiting) Handle(_ context.Context, r slog.Record) error {
	if strings.HasPrefix(r.Message, "waiting") {
		line := ""
		r.Attrs(func(a slog.Attr) bool { line += a.String() + " "; return true })
		h.said.Store(&line)
		h.end()
	}
	return nil
}

// TestStartThatLoops: a log line names the plugin that the proxy waits for and
// the duration, and the wait can be ended.
func TestStartThatLoops(t *testing.T) {
	w := newWorld(t, guest(t, "configure=loop"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	h := &waiting{end: cancel}
	w.deps.Log = slog.New(h)
	err := w.Apply(ctx, w.config)
	if err == nil || !strings.Contains(err.Error(), `plugin[0] (p): configure plugin: `) {
		t.Errorf("got error %v", err)
	}
	if said := h.said.Load(); said == nil || *said != "plugin=p limit=10s " {
		t.Errorf("log line of the wait: %v", said)
	}
}

func TestClosed(t *testing.T) {
	w := newWorld(t, guest(t, ""))
	w.config.Plan, w.config.Place, w.config.Mint = []string{"p"}, "p", "p"
	w.apply()
	if err := w.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, by, ok := w.place(""); ok || by != policy.Closed {
		t.Errorf("place: %q, %v", by, ok)
	}
	if _, _, ok := w.Plan(t.Context(), &abi.PlanFacts{}); ok {
		t.Error("plan decides")
	}
	if _, _, ok := w.Mint(t.Context(), &abi.MintFacts{}); ok {
		t.Error("mint decides")
	}
	if _, _, reason := w.Leg(t.Context(), &abi.LegFacts{}, nil); reason != policy.Closed {
		t.Errorf("leg: %q", reason)
	}
	if err := w.Apply(t.Context(), w.config); err == nil {
		t.Error("Apply succeeds after Close")
	}
	if err := w.Reload(t.Context(), "p"); err == nil {
		t.Error("Reload succeeds after Close")
	}
}

// TestCompileCache: the next Set finds a module that was compiled before.
func TestCompileCache(t *testing.T) {
	w := newWorld(t, guest(t, ""))
	w.apply()
	entries := 0
	err := filepath.WalkDir(bench.dir, func(_ string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			entries++
		}
		return err
	})
	if err != nil || entries == 0 {
		t.Errorf("%d files of compiled code, %v", entries, err)
	}
	w.deps.CacheDir = "/dev/null/no"
	if set, err := New(w.deps); err != nil {
		t.Errorf("without a directory: %v", err)
	} else if err := set.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestDecisionsDoNotAllocate(t *testing.T) {
	w := newWorld(t)
	w.config.Native = false
	w.apply()
	plan, place, mint, retain := &abi.PlanFacts{BothTargets: 1}, policytest.Pair(""), &abi.MintFacts{}, &abi.RetainFacts{}
	ctx := t.Context()
	all := func() { w.Plan(ctx, plan); w.Place(ctx, place); w.Mint(ctx, mint); w.Retain(retain) }
	all()
	if n := testing.AllocsPerRun(200, all); n != 0 {
		t.Errorf("got %v allocations in four decisions", n)
	}
}

func BenchmarkPlace(b *testing.B) {
	for _, native := range []bool{true, false} {
		name := "wasm"
		if native {
			name = "native"
		}
		b.Run(name, func(b *testing.B) {
			w := newWorld(b)
			w.config.Native = native
			w.apply()
			f := policytest.Pair("")
			for range 60 {
				f.Candidates = append(f.Candidates, abi.Candidate{Instance: 9, Group: 1, Roles: abi.RoleDecode, Tokens: 5})
			}
			ctx := b.Context()
			b.ReportAllocs()
			for b.Loop() {
				w.Place(ctx, f)
			}
		})
	}
}

// TestNeedsOfTheChosen: the proxy computes the facts that a policy needs only
// while that policy is in use.
func TestNeedsOfTheChosen(t *testing.T) {
	for _, native := range []bool{true, false} {
		w := newWorld(t)
		w.config.Native = native
		for _, tt := range []struct {
			place string
			want  abi.Needs
		}{{"least_load", 0}, {"kv_aware", policies.Needs("kv_aware")}, {"round_robin", 0}} {
			w.config.Place = tt.place
			w.apply()
			if got := w.Needs(); got != tt.want {
				t.Errorf("native %t, %s: needs %v, want %v", native, tt.place, got.Names(), tt.want.Names())
			}
		}
	}
	if policies.Needs("kv_aware")&abi.NeedBlocks == 0 {
		t.Error("kv_aware does without blocks")
	}
}

// TestParamsReachThePolicies: the module of the built-in policies also checks
// the bounds of a parameter.
func TestParamsReachThePolicies(t *testing.T) {
	w := newWorld(t)
	w.config.Native, w.config.Place = false, "kv_aware"
	w.apply()
	old := w.table.Load().builtin
	w.apply()
	if w.table.Load().builtin != old {
		t.Error("the same parameters load the module anew")
	}
	w.config.Params = policies.AllParams()[0].Policy + ".no_such=1\n"
	if err := w.Apply(t.Context(), w.config); err == nil || !strings.Contains(err.Error(), "configure") {
		t.Errorf("an unknown parameter: %v", err)
	}
	p := policies.AllParams()[0]
	w.config.Params = policies.Params{p.Policy: {p.Name: p.Most}}.Text()
	w.apply()
	if w.table.Load().builtin == old {
		t.Error("other parameters do not load the module anew")
	}
}
