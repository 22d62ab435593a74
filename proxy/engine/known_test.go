package engine

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// TestKnownModels: a registry stores models with their roles, up to a limit, and notifies of each
// new snapshot.
func TestKnownModels(t *testing.T) {
	r := New(Options{})
	changed := r.Changed()
	r.Know([]Known{{"llama", 1 << abi.RolePrefill}, {"llama", 1 << abi.RoleDecode}, {"", 1 << abi.RoleBoth}})
	select {
	case <-changed:
	default:
		t.Error("the new snapshot was not announced")
	}
	select {
	case <-r.Changed():
		t.Error("a snapshot that did not come was announced")
	default:
	}
	s := r.Snapshot()
	if roles := s.Roles("llama"); !s.Knows("llama") || s.Knows("") || s.Knows("other") || !slices.Equal(roles, []abi.Role{abi.RolePrefill, abi.RoleDecode}) {
		t.Errorf("known %q, roles %v", s.Known(), roles)
	}
	for i := range 2 * maxKnown {
		r.Know([]Known{{fmt.Sprint("adapter-", i), 1 << abi.RoleBoth}})
	}
	if got := r.Snapshot().Known(); len(got) != maxKnown || !slices.IsSorted(got) {
		t.Errorf("got %d known models, want %d in order", len(got), maxKnown)
	}
	long := New(Options{})
	for i := range 32 {
		long.Know([]Known{{fmt.Sprint(strings.Repeat("a", maxKnownText/16), i), 1 << abi.RoleBoth}})
	}
	long.Know([]Known{{"short", 1 << abi.RoleBoth}})
	if got := long.Snapshot(); len(got.Known()) != 16 || !got.Knows("short") {
		t.Errorf("got %d known models with long names, want 15, and \"short\": %v", len(got.Known()), got.Knows("short"))
	}
	r.Know([]Known{{"llama", 1 << abi.RoleBoth}})
	if roles := r.Snapshot().Roles("llama"); len(roles) != 3 {
		t.Errorf("a known model got the roles %v", roles)
	}
	if len(s.Roles("llama")) != 2 {
		t.Error("an old snapshot has changed")
	}
}
