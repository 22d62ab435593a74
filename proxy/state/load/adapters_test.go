package load

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

func TestAdapters(t *testing.T) {
	const unknown, running, free, waiting, full = abi.AdapterUnknown, abi.AdapterRunning, abi.AdapterFree, abi.AdapterWaiting, abi.AdapterFull
	for _, tt := range []struct {
		name string
		of   Adapters
		want map[string]abi.AdapterState
	}{
		{"no report", Adapters{}, map[string]abi.AdapterState{"a": unknown, "": unknown}},
		{"idle", NewAdapters("", "", 1), map[string]abi.AdapterState{"a": free, "": free}},
		{"a place is left", NewAdapters("a,b", "b", 3), map[string]abi.AdapterState{"a": running, "b": running, "c": free, "a,b": free}},
		{"no place is left", NewAdapters("a, b", "c,a", 2), map[string]abi.AdapterState{"a": running, "b": running, "c": waiting, "d": full}},
		{"a waiting adapter takes the last place", NewAdapters("a", "b", 2), map[string]abi.AdapterState{"a": running, "b": free, "c": full}},
	} {
		for name, want := range tt.want {
			if got := tt.of.State(name); got != want {
				t.Errorf("%s: %q is %v, want %v", tt.name, name, got, want)
			}
		}
	}
	a := NewAdapters("a,b", "c", 2)
	if n := testing.AllocsPerRun(10, func() { a.State("d") }); n != 0 {
		t.Errorf("State makes %v allocations", n)
	}
}
