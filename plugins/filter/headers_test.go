package filter

import (
	"net/http"
	"net/http/httptest"
	"reflect"
	"testing"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/budget"
)

func TestHeaderMap(t *testing.T) {
	r := httptest.NewRequest("POST", "/v1/x?q=1", nil)
	r.Header = http.Header{"X-B": {"1", "2"}, "Accept": {"*/*"}, "X-Request-Id": {"id"}}
	original := r.Header.Clone()
	f := &filter{p: &Plugin{deps: Deps{Host: budget.NewHost(0, nil)}}}
	m := &guestMap{new(headerMap), f}
	m.setRequest(r)
	want := host.Pairs{
		{Key: ":authority", Value: "example.com"}, {Key: ":method", Value: "POST"}, {Key: ":path", Value: "/v1/x?q=1"}, {Key: ":scheme", Value: "http"},
		{Key: "accept", Value: "*/*"}, {Key: "x-b", Value: "1"}, {Key: "x-b", Value: "2"}, {Key: "x-request-id", Value: "id"},
	}
	if got := m.Pairs(); !reflect.DeepEqual(got, want) || m.len() != len(want) {
		t.Fatalf("got %v", got)
	}
	for _, key := range []string{"HOST", ":authority", ":Authority"} {
		if value, ok := m.Value(key); value != "example.com" || !ok {
			t.Errorf("%s: got %q", key, value)
		}
	}
	if value, ok := m.Value("x-B"); value != "1" || !ok {
		t.Errorf("the first of several lines: got %q", value)
	}
	for _, tt := range []struct {
		name string
		got  host.Status
		want host.Status
	}{
		{"add", m.Add("x-b", "3"), host.OK},
		{"replace host", m.Replace("host", "h"), host.OK},
		{"add a pseudo-header", m.Add(":method", "PUT"), host.OK}, // each pseudo-header exists once
		{"remove", m.Remove("ACCEPT"), host.OK},
		{"remove nothing", m.Remove("none"), host.OK},
		{"bad name", m.Add("a b", "x"), host.BadArgument},
		{"no name", m.Add("", "x"), host.BadArgument},
		{"bad value", m.Replace("x-c", "a\nb"), host.BadArgument},
		{"bad pairs", m.SetPairs(host.Pairs{{Key: "ok", Value: "1"}, {Key: "x", Value: "\x00"}}), host.BadArgument},
		{"read-only", readOnly{m.headerMap}.Add("x-c", "1"), host.BadArgument},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: got %d, want %d", tt.name, tt.got, tt.want)
		}
	}
	want = host.Pairs{
		{Key: ":authority", Value: "h"}, {Key: ":method", Value: "PUT"}, {Key: ":path", Value: "/v1/x?q=1"}, {Key: ":scheme", Value: "http"},
		{Key: "x-b", Value: "1"}, {Key: "x-b", Value: "2"}, {Key: "x-b", Value: "3"}, {Key: "x-request-id", Value: "id"},
	}
	if got := m.Pairs(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
	if !reflect.DeepEqual(r.Header, original) {
		t.Errorf("the client's header was changed: %v", r.Header)
	}
	set := host.Pairs{{Key: ":path", Value: "/"}, {Key: "a", Value: "1"}, {Key: "a", Value: ""}}
	if status := m.SetPairs(set); status != host.OK || !reflect.DeepEqual(m.Pairs(), set) {
		t.Errorf("got %d %v", status, m.Pairs())
	}
	kept := m.size
	if m.known = false; m.sizeNow() != kept {
		t.Errorf("the size is %v, the stored size was %v", m.size, kept)
	}
	if f.free(); f.p.deps.Host.Held() != 0 {
		t.Errorf("%d bytes are held", f.p.deps.Host.Held())
	}
}

func TestRequestID(t *testing.T) {
	for id, keep := range map[string]bool{"r-1": true, "": false, "a b": false, "\x7f": false, string(make([]byte, 129)): false} {
		r := httptest.NewRequest("GET", "/", nil)
		if id != "" {
			r.Header["X-Request-Id"] = []string{id}
		}
		m := new(headerMap)
		m.setRequest(r)
		if got := m.get("X-Request-Id"); (got == id) != keep || got == "" {
			t.Errorf("%q became %q", id, got)
		}
	}
}
