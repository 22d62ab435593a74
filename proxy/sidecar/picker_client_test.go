package sidecar

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/sidecar/extproc"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// pickerClientOf returns a data plane with the decode engine d0 and the prefill engines p0 and p1.
func pickerClientOf(t *testing.T) *PickerClient {
	t.Helper()
	cfg := config.Default()
	cfg.Sidecar.Picker = "ext_proc://picker:9002"
	pl := NewPickerClient(&cfg, sidecarOf(t, nil).registry, nil, slog.New(slog.DiscardHandler))
	t.Cleanup(pl.Close)
	return pl
}

// TestPickerClientOfConfig: only an ext_proc picker makes a data plane, and a reload without a change
// keeps it.
func TestPickerClientOfConfig(t *testing.T) {
	pl := pickerClientOf(t)
	cfg := config.Default()
	log := slog.New(slog.DiscardHandler)
	for _, picker := range []string{"", "http://picker:9002"} {
		if cfg.Sidecar.Picker = picker; NewPickerClient(&cfg, pl.registry, pl, log) != nil {
			t.Errorf("the picker %q makes a data plane", picker)
		}
	}
	cfg.Sidecar.Picker = "ext_proc://picker:9002"
	if NewPickerClient(&cfg, pl.registry, pl, log) != pl {
		t.Error("the same configuration makes another data plane")
	}
	cfg.Sidecar.Picker, cfg.Sidecar.PickerCA = "ext_procs://picker:9002", "no such file"
	if NewPickerClient(&cfg, pl.registry, pl, log) != pl {
		t.Error("an unreadable file replaces the data plane")
	}
	other := NewPickerClient(&cfg, pl.registry, nil, log)
	if other == nil {
		t.Error("with an unreadable file, the proxy asks no picker")
	}
	other.Close()
	(*PickerClient)(nil).Close() // allowed
}

// TestFollow: the engines that a choice of the picker allows, in the order in which they are used.
func TestFollow(t *testing.T) {
	pl := pickerClientOf(t)
	for name, tt := range map[string]struct {
		d      extproc.Decision
		fits   func(coordinator.Within) bool // nil: any placement
		reason string
		calls  string
		within string // of the placement: prefill, decode, whole
	}{
		"nothing":     {reason: PickNoDestination},
		"unknown":     {d: extproc.Decision{Destinations: []string{"d1:8000"}}, reason: PickNotAllowed},
		"a prefiller": {d: extproc.Decision{Destinations: []string{"p0:8000"}}, reason: PickNotAllowed},
		"alone":       {d: extproc.Decision{Destinations: []string{"D0.:8000"}}, calls: "picker", within: "[] [] [d0]"},
		"pair":        {d: extproc.Decision{Destinations: []string{"d0:8000"}, Prefill: []string{"http://p1:8000", "p0:8000"}}, calls: "picker", within: "[p1 p0] [d0] [d0]"},
		"pair with unknown": {d: extproc.Decision{Destinations: []string{"x:1", "d0:8000"}, Prefill: []string{"x:1"}, Encoders: []string{"p0:8000"}},
			calls: "picker_destination not_allowed,picker_prefill not_allowed,picker_encoder not_allowed,picker", within: "[] [] [d0]"},
		"prefill is away": {d: extproc.Decision{Destinations: []string{"d0:8000"}, Prefill: []string{"p1:8000"}},
			fits:  func(w coordinator.Within) bool { return w.Prefill == nil },
			calls: "picker_prefill no_target,picker", within: "[] [] [d0]"},
	} {
		c := &caller{ask: new(coordinator.PlacementRequest), fits: func(coordinator.Within) bool { return true }}
		if tt.fits != nil {
			c.fits = tt.fits
		}
		var r Route
		reason := r.Follow(pl, Request{Body: &openai.Request{API: openai.Completions}, Ask: c.ask, Journal: c}, &tt.d)
		if reason != tt.reason || r.Restricted != (reason == "") {
			t.Errorf("%s: got %q, restricted %t", name, reason, r.Restricted)
		}
		if reason != "" {
			continue
		}
		if err := c.place(&r); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		w := c.ask.Within
		if got := fmt.Sprintf("[%s] [%s] [%s]", names(w.Prefill), names(w.Decode), names(w.Whole)); got != tt.within || strings.Join(c.calls, ",") != tt.calls {
			t.Errorf("%s: placed on %s with %v, want %s with %s", name, got, c.calls, tt.within, tt.calls)
		}
		if !r.Fixes(r.destinations[0]) || !slices.Equal(r.destinations, []*engine.Instance{r.local[0]}) {
			t.Errorf("%s: another engine may replace the only destination", name)
		}
	}
}

// TestMutate: a picker changes the lines that it may change, in the ways of Envoy.
func TestMutate(t *testing.T) {
	for _, tt := range []struct {
		action extproc.Action
		name   string
		want   string
	}{
		{extproc.Append, "x-a", "X-A=1 X-A=new"},
		{extproc.AddIfAbsent, "x-a", "X-A=1"},
		{extproc.AddIfAbsent, "x-b", "X-A=1 X-B=new"},
		{extproc.Overwrite, "x-a", "X-A=new"},
		{extproc.Overwrite, "x-b", "X-A=1 X-B=new"},
		{extproc.OverwriteOld, "x-a", "X-A=new"},
		{extproc.OverwriteOld, "x-b", "X-A=1"},
		{extproc.Overwrite, "x-prefiller-host-port", "X-A=1"},
		{extproc.Overwrite, "x-pdproxy-decode", "X-A=1"},
		{extproc.Overwrite, "x-request-id", "X-A=1"},
		{extproc.Overwrite, "x_request_id", "X-A=1"},
	} {
		fields := []upstream.Field{{Name: "X-A", Value: "1"}, {Name: "X-Gone", Value: "1"}}
		fields = Mutate(fields, &extproc.HeaderMutation{Remove: []string{"x-gone", "content-type"}, Set: []extproc.SetLine{
			{Field: upstream.Field{Name: tt.name, Value: "new"}, Action: tt.action},
		}}, false)
		var got []string
		for _, f := range fields {
			got = append(got, f.Name+"="+f.Value)
		}
		if strings.Join(got, " ") != tt.want {
			t.Errorf("%s by %d: %v, want %s", tt.name, tt.action, got, tt.want)
		}
	}
}
