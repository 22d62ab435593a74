package epp_test

import (
	"slices"
	"strings"
	"testing"

	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestGatewayHeadersForPolicies: policies get the headers that they declare from the header that
// the gateway shows, and no other. Values have a bound and are UTF-8.
func TestGatewayHeadersForPolicies(t *testing.T) {
	long := strings.Repeat("a", abi.MaxHeaderValue)
	present := func(name, value string, cut bool) abi.RequestHeader {
		return abi.RequestHeader{Name: name, Value: value, Present: true, Cut: cut}
	}
	credentials := []string{"authorization", "Bearer a-key", "x-api-key", "secret", "cookie", "session=secret"}
	for _, tt := range []struct {
		name  string
		needs abi.Needs
		lines []string
		want  []abi.RequestHeader
	}{
		{"no policy needs headers", abi.NeedTraits, []string{"x-tier", "gold"}, nil},
		{"absent", abi.NeedHeaders, []string{"x-other", "1"}, nil},
		{"one of two", abi.NeedHeaders, []string{"x-tier", "gold", "x-other", "1"}, []abi.RequestHeader{present("x-tier", "gold", false)}},
		{"empty", abi.NeedHeaders, []string{"x-region", ""}, []abi.RequestHeader{present("x-region", "", false)}},
		{"several lines", abi.NeedHeaders, []string{"x-region", "a", "x-tier", "gold", "x-region", "b"},
			[]abi.RequestHeader{present("x-tier", "gold", false), present("x-region", "a, b", false)}},
		{"the longest value", abi.NeedHeaders, []string{"x-tier", long}, []abi.RequestHeader{present("x-tier", long, false)}},
		{"too long", abi.NeedHeaders, []string{"x-tier", long + "b"}, []abi.RequestHeader{present("x-tier", long, true)}},
		{"not UTF-8", abi.NeedHeaders, []string{"x-tier", "a\xff\xfeb"}, []abi.RequestHeader{present("x-tier", "a?b", false)}},
	} {
		for mode, m := range map[string]modes{
			"full duplex": duplex, "buffered": {filter.ProcessingMode_BUFFERED, filter.ProcessingMode_FULL_DUPLEX_STREAMED},
		} {
			t.Run(tt.name+" "+mode, func(t *testing.T) {
				g := newGateway(t, world.Setup{Engines: world.Wholes(), Needs: tt.needs, Keys: world.TenantLine("a", "rpm=9")})
				x := g.ask(m, nil, append(credentials, tt.lines...), world.Completions(false)).decided()
				if x.immediate != nil {
					t.Fatalf("the picker answers %v", x.immediate)
				}
				if got := g.Decider.Asked.Load().(abi.RequestFacts).Headers; !slices.Equal(got, tt.want) {
					t.Errorf("got %+v, want %+v", got, tt.want)
				}
				x.finish()
			})
		}
	}
}

// TestGatewayPairLabels: with pairs.same_labels, every endpoint of an answer is in the zone of the
// prefill engine that the header line names, also those after the first. Without a pair in the
// subset, the client gets an error.
func TestGatewayPairLabels(t *testing.T) {
	zones := map[string]string{}
	at := func(e *world.Engine, zone string) *world.Engine {
		zones[e.At], e.Labels = zone, config.LabelsOf(map[string]string{"zone": zone})
		return e
	}
	for _, tt := range []struct {
		name, subset string
		zones        string // in which the request may run; "": none
	}{
		{"all", "", "a b"},
		{"one endpoint", "10.0.0.4:80,10.0.0.1:80,10.0.0.2:80", "a"},
		{"two endpoints of a zone", "10.0.0.5:80,10.0.0.6:80,10.0.0.1:80,10.0.0.2:80", "b"},
		{"a decode engine without prefill", "10.0.0.7:80,10.0.0.1:80,10.0.0.2:80", ""},
		{"a prefill engine without decode", "10.0.0.3:80,10.0.0.4:80,10.0.0.5:80", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := newGateway(t, world.Setup{Engines: []*world.Engine{
				at(world.PrefillAt("p0", "10.0.0.1:80"), "a"), at(world.PrefillAt("p1", "10.0.0.2:80"), "b"), at(world.PrefillAt("p2", "10.0.0.3:80"), "c"),
				at(world.DecodeAt("d0", "10.0.0.4:80"), "a"), at(world.DecodeAt("d1", "10.0.0.5:80"), "b"), at(world.DecodeAt("d2", "10.0.0.6:80"), "b"), at(world.DecodeAt("d3", "10.0.0.7:80"), "d"),
			}, Config: func(c *config.Config) {
				c.Pairs.SameLabels, c.EPP.Fallbacks = []string{"zone"}, 3
			}})
			limits := subset(structpb.NewStringValue(tt.subset))
			if tt.subset == "" {
				limits = nil
			}
			for range 6 {
				x := g.ask(duplex, limits, nil, world.Completions(false)).decided()
				if tt.zones == "" {
					if s := x.immediate.GetStatus().GetCode(); s != 503 || !strings.Contains(string(x.immediate.GetBody()), `"code":"no_target"`) {
						t.Errorf("got status %d %s, want 503", s, x.immediate.GetBody())
					}
					x.cancel()
					continue
				}
				zone := zones[x.set["x-prefiller-host-port"]]
				if zone == "" || !strings.Contains(tt.zones, zone) {
					t.Errorf("prefill runs on %q, in zone %q", x.set["x-prefiller-host-port"], zone)
				}
				for endpoint := range strings.SplitSeq(x.set["x-gateway-destination-endpoint"], ",") {
					if zones[endpoint] != zone {
						t.Errorf("prefill runs in zone %q, the endpoint %s is in zone %q", zone, endpoint, zones[endpoint])
					}
				}
				x.finish()
			}
		})
	}
}
