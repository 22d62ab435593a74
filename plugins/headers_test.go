package plugins

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// declaring returns a plugin whose policies declare n headers, from the given number on.
func declaring(t *testing.T, name string, from, n int) Spec {
	spec := guest(t, declares(from, n))
	spec.Name = name
	return spec
}

// declares is the configuration of a guest that declares n headers, from the given number on.
func declares(from, n int) string {
	var names []string
	for i := range n {
		names = append(names, fmt.Sprint("x-", from+i))
	}
	return "needs=headers headers=" + strings.Join(names, ",")
}

// TestHeadersOfAllPolicies: all policies in use together may declare 32 different headers. A
// configuration and a new version that exceed this change nothing, and the error names the plugins.
func TestHeadersOfAllPolicies(t *testing.T) {
	var full []Spec
	for i := range abi.MaxAllHeaders / abi.MaxHeaders {
		full = append(full, declaring(t, fmt.Sprint("p", i), i*abi.MaxHeaders, abi.MaxHeaders))
	}
	w := newWorld(t, append(slices.Clone(full), declaring(t, "shares", 3, abi.MaxHeaders))...)
	w.apply()
	names := func() int { return len(w.Headers()) }
	if names() != abi.MaxAllHeaders || !slices.Contains(w.Headers(), "x-0") || w.Needs()&abi.NeedHeaders == 0 {
		t.Fatalf("got the headers %q and the needs %v", w.Headers(), w.Needs().Names())
	}
	const want = "the policies in use declare 33 different request headers, at most 32 are possible: p0 8, p1 8, p2 8, p3 8, more 1"
	c := w.config
	c.Plugins = append(slices.Clone(full), declaring(t, "more", abi.MaxAllHeaders, 1))
	var e *Error
	if err := w.Apply(t.Context(), c); !errors.As(err, &e) || e.Key != "plugin" || e.Err.Error() != want || names() != abi.MaxAllHeaders {
		t.Errorf("got error %v and %d headers", err, names())
	}
	w.table.Load().plugins[4].spec.Config = declares(abi.MaxAllHeaders, 1) // for the next version
	if err := w.Reload(t.Context(), "shares"); err == nil || !strings.Contains(err.Error(), "declare 33 different") || w.row("shares", "finish").State != "failed" || names() != abi.MaxAllHeaders {
		t.Errorf("got error %v, state %s and %d headers", err, w.row("shares", "finish").State, names())
	}
	w.config.Plugins = full[:1]
	w.apply()
	if names() != abi.MaxHeaders {
		t.Errorf("got the headers %q", w.Headers())
	}
	w.config.Plugins = nil
	w.apply()
	if names() != 0 || w.Needs()&abi.NeedHeaders != 0 {
		t.Errorf("without plugins: the headers %q and the needs %v", w.Headers(), w.Needs().Names())
	}
}

// TestHeadersOfACanary: a new version that takes a share of the decisions gets the headers that it
// declares, also after another plugin has been reloaded.
func TestHeadersOfACanary(t *testing.T) {
	spec, other := declaring(t, "p", 0, 1), declaring(t, "q", 1, 1)
	spec.Canary = 0.5
	w := newWorld(t, spec, other)
	w.apply()
	w.table.Load().plugins[0].spec.Config = declares(2, 1) // for the next version
	for _, name := range []string{"p", "q"} {
		if err := w.Reload(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		if got := w.Headers(); len(got) != 3 || !slices.Contains(got, "x-0") || !slices.Contains(got, "x-2") {
			t.Errorf("after the reload of %s: got the headers %q", name, got)
		}
	}
	w.endTrials(time.Now().Add(2 * time.Hour))
	if got := slices.Sorted(slices.Values(w.Headers())); !slices.Equal(got, []string{"x-1", "x-2"}) {
		t.Errorf("after the trial: got the headers %q", got)
	}
}
