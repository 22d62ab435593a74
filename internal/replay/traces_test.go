package replay

import (
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/traces"
)

// wholeTrace is the trace of Mooncake's conversations, on which parameters are tuned.
func wholeTrace(t testing.TB) *Trace { return publicTrace(t, "mooncake") }

// publicTrace reads a trace of testdata.
func publicTrace(t testing.TB, name string) *Trace {
	t.Helper()
	lines, err := traces.Lines("testdata/" + name + ".gz")
	if err != nil {
		t.Fatal(err)
	}
	tr, err := ReadTrace(name, lines, traces.BlockTokens)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]int{"mooncake": 12031, "mooncake_synthetic": 3993, "azure_code": 8819, "azure_conv": 19366}
	if len(tr.Requests) != want[name] {
		t.Fatalf("%s: got %d requests, want %d", name, len(tr.Requests), want[name])
	}
	return tr
}
