package exchange

import (
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// TestDeclared: an absent header is not in the list, an empty one is. Values are UTF-8 and
// have a bound.
func TestDeclared(t *testing.T) {
	long := strings.Repeat("a", abi.MaxHeaderValue-1) + "é"
	h := http.Header{
		"X-Tier": {"gold"}, "X-Empty": {""}, "X-List": {"a", "b"}, "X-Long": {long}, "X-Bytes": {"a\xff\xfeb\xff"},
		"X-Garbage": {strings.Repeat("\x80", 300)}, "Authorization": {"Bearer secret"},
	}
	header := func(name, value string, cut bool) abi.RequestHeader {
		return abi.RequestHeader{Name: name, Value: value, Present: true, Cut: cut}
	}
	for _, tt := range []struct {
		names []string
		want  []abi.RequestHeader
	}{
		{nil, nil},
		{[]string{"x-absent"}, nil},
		{[]string{"x-empty", "x-absent", "x-tier"}, []abi.RequestHeader{header("x-empty", "", false), header("x-tier", "gold", false)}},
		{[]string{"x-list"}, []abi.RequestHeader{header("x-list", "a, b", false)}},
		{[]string{"x-long"}, []abi.RequestHeader{header("x-long", long[:abi.MaxHeaderValue-1], true)}},
		{[]string{"x-bytes", "x-garbage"}, []abi.RequestHeader{header("x-bytes", "a?b?", false), header("x-garbage", "?", true)}},
	} {
		if got := declared(h, tt.names); !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%v: got %+v, want %+v", tt.names, got, tt.want)
		}
	}
	if n := testing.AllocsPerRun(10, func() { declared(h, nil) }); n != 0 {
		t.Errorf("got %v allocations without names", n)
	}
}
