package policies

import (
	"os"
	"runtime"
	"testing"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/filters"
	"github.com/pdproxy/pdproxy/policies"
)

// TestFilterIsItsSource builds the module of the built-in filter and compares it with the embedded
// one, byte for byte. Another version of Go gives other bytes; then the test compares the
// callbacks and imports of both.
func TestFilterIsItsSource(t *testing.T) {
	built := buildGo(t, "../../filters/stableprefix/wasm")
	if *update {
		if err := os.WriteFile("../../filters/"+filters.StablePrefix+".wasm", built, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	embedded := filters.Module(filters.StablePrefix)
	if string(built) == embedded {
		return
	}
	if runtime.Version() == policies.Toolchain() {
		t.Errorf("the embedded module (%d bytes) is not that of the sources (%d bytes): run make policies", len(embedded), len(built))
		return
	}
	t.Logf("the embedded module was built by %s, this is %s: callbacks are compared, not bytes", policies.Toolchain(), runtime.Version())
	want, got := inspect(t, built), inspect(t, []byte(embedded))
	if len(want.Callbacks) != len(got.Callbacks) {
		t.Errorf("callbacks %v, want %v", got.Callbacks, want.Callbacks)
	}
}

func inspect(t *testing.T, wasm []byte) host.Info {
	t.Helper()
	m, err := host.Load(t.Context(), wasm, host.LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close(t.Context()) }()
	return m.Info()
}
