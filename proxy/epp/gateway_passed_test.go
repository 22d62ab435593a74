package epp_test

import (
	"slices"
	"strings"
	"testing"

	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// TestGatewayPasses: requests for paths that are no endpoint of the picker run on an engine. Path,
// query and method stay, and a body that is no JSON passes as it is.
func TestGatewayPasses(t *testing.T) {
	for _, tt := range []struct {
		name   string
		header []string
		parts  []string
	}{
		{"GET", []string{":method", "GET", ":path", "/foo?b=2&a=%2F"}, nil},
		{"the root", []string{":method", "GET", ":path", "/"}, nil},
		{"a path with escapes and a slash", []string{":method", "DELETE", ":path", "/v1/files/a%20b%2Fc/?x"}, nil},
		{"GET of a route that takes POST", []string{":method", "GET", ":path", "/llama/tokenize"}, nil},
		{"JSON", []string{":path", "/v1/conversations?x=1"}, []string{`{"items":`, `[1]}`}},
		{"JSON of another method", []string{":method", "PUT", ":path", "/v1/conversations/1"}, []string{`{"model":"m"}`}},
		{"another type", []string{":path", "/v1/files", "content-type", "application/octet-stream"}, []string{"\x00\x01", "\xff"}},
		{"GET of a gRPC method", []string{":method", "GET", ":path", "/vllm.Inference/Generate", "content-type", "application/grpc"}, nil},
		{"gRPC", []string{":path", "/other.Service/Call", "content-type", "application/grpc"}, []string{"\x00\x00\x00\x00\x01a"}},
		{"an empty body", []string{":path", "/foo"}, []string{""}},
	} {
		for _, m := range []modes{duplex, {filter.ProcessingMode_BUFFERED, filter.ProcessingMode_BUFFERED}} {
			if m != duplex && len(tt.parts) > 0 {
				tt.parts = []string{strings.Join(tt.parts, "")}
			}
			t.Run(tt.name+" "+m.request.String(), func(t *testing.T) {
				g := newGateway(t, world.Setup{Engines: world.Wholes()})
				x := g.ask(m, nil, tt.header, tt.parts...).decided()
				if x.immediate != nil {
					t.Fatalf("%d %s", x.immediate.GetStatus().GetCode(), x.immediate.GetBody())
				}
				if to := x.set["x-gateway-destination-endpoint"]; !strings.HasPrefix(to, "10.0.0.") || to != x.metadata {
					t.Errorf("the header has %q, the metadata %q", to, x.metadata)
				}
				if path, changed := x.set[":path"]; changed {
					t.Errorf("the path became %q", path)
				}
				if kind, changed := x.set["content-type"]; changed || x.removed["content-type"] {
					t.Errorf("the type became %q", kind)
				}
				if _, set := x.set["content-length"]; set != (tt.parts != nil) || x.body != strings.Join(tt.parts, "") {
					t.Errorf("the engine gets %q, %v", x.body, x.set)
				}
				if g.Local.Open() != 1 {
					t.Errorf("%d leases are open before the answer", g.Local.Open())
				}
				x.answers(404, "text/plain", "", "no")
				if err := x.ended(); err != nil {
					t.Error(err)
				}
				g.Outcome(telemetry.OutcomeClientError)
				if n := g.at(x.metadata).Breaker.Failures(); n != 0 {
					t.Errorf("the engine has %d failures", n)
				}
			})
		}
	}
}

// TestGatewayPassesWithin: a passed request runs on any engine of any model, within the subset.
func TestGatewayPassesWithin(t *testing.T) {
	a, b := world.Answering("a", "one"), world.Answering("b", "two")
	a.At, b.At = "10.0.0.1:80", "10.0.0.2:80"
	g := newGateway(t, world.Setup{Engines: []*world.Engine{a, b}})
	seen := map[string]int{}
	for range 64 {
		x := g.ask(duplex, nil, []string{":method", "GET", ":path", "/foo"}).decided()
		seen[x.metadata]++
		x.finish()
	}
	if len(seen) != 2 || seen["10.0.0.1:80"] == 0 || seen["10.0.0.2:80"] == 0 {
		t.Errorf("the requests went to %v", seen)
	}
	for _, only := range []string{"10.0.0.1:80", "10.0.0.2:80"} {
		x := g.ask(duplex, subset(structpb.NewStringValue(only)), []string{":path", "/foo"}, `{"x":1}`).decided()
		if x.metadata != only {
			t.Errorf("got %q, want %q", x.metadata, only)
		}
		x.finish()
	}
	x := g.ask(duplex, subset(structpb.NewStringValue("10.0.0.9:80")), []string{":method", "GET", ":path", "/foo"}).decided()
	if s := x.immediate.GetStatus().GetCode(); s != 503 {
		t.Errorf("outside the subset: %d %s", s, x.immediate.GetBody())
	}
	x.cancel()
}

// TestGatewayDoesNotPass: paths by which engines are managed, and paths that an engine may read as
// another one.
func TestGatewayDoesNotPass(t *testing.T) {
	g := newGateway(t, world.Setup{Engines: world.Wholes()})
	for _, path := range []string{
		"/sleep", "/sl%65ep", "/llama/sleep?level=1", "/reset_prefix_cache", "/v1/load_lora_adapter", "/update_weights_from_disk", "/flush_cache", "/metrics",
		"/vllm.Control/ResetPrefixCache", "/vllm.grpc.engine.VllmEngine/Abort", "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents", "/vllm.Control/GetKvEventSources",
		"/llama/v1/%63ompletions", "/v1/completions%0A", "/foo//bar", "/foo/../bar", "/foo/./bar", "/foo%2F..%2Fbar", "/foo%5Cbar",
	} {
		for _, parts := range [][]string{nil, {`{"model":"m","prompt":"x","kv_transfer_params":{}}`}} {
			x := g.ask(duplex, nil, []string{":path", path}, parts...).decided()
			if s := x.immediate.GetStatus().GetCode(); s != 404 || x.metadata != "" {
				t.Errorf("%s: got %d, %q", path, s, x.metadata)
			}
			x.cancel()
		}
	}
	x := g.ask(duplex, nil, []string{":path", "/v1/%63ompletions"}, `{"model":"m","prompt":"x","kv_transfer_params":{}}`).decided()
	if x.set[":path"] != "/v1/completions" || strings.Contains(x.body, "kv_transfer_params") {
		t.Errorf("an escaped endpoint: %v %q", x.set, x.body)
	}
	x.finish()
}

// TestGatewayPassesByTheRules: keys, tenants, limits and the rules for bodies hold for passed
// requests.
func TestGatewayPassesByTheRules(t *testing.T) {
	get := []string{":method", "GET", ":path", "/foo"}
	status := func(g *gateway, header []string, parts ...string) int32 {
		x := g.ask(duplex, nil, header, parts...).decided()
		defer x.cancel()
		if x.immediate == nil {
			x.finish()
		}
		return int32(x.immediate.GetStatus().GetCode())
	}
	g := newGateway(t, world.Setup{Engines: world.Wholes(), Keys: world.TenantLine("a", "rpm=2") + world.TenantLine("b", "models=m")})
	if s := status(g, get); s != 401 {
		t.Errorf("without a key: %d", s)
	}
	x := g.ask(duplex, nil, append(slices.Clone(get), "authorization", "Bearer a-key")).decided()
	if !x.removed["authorization"] {
		t.Errorf("the engine would get the key of the client: %v", x.removed)
	}
	x.finish()
	for n, want := range []int32{0, 429} {
		if s := status(g, []string{":path", "/foo", "authorization", "Bearer a-key"}, `{"x":1}`); s != want {
			t.Errorf("request %d of a tenant with two: %d, want %d", n+2, s, want)
		}
	}
	key := []string{":path", "/foo", "authorization", "Bearer b-key"}
	for body, want := range map[string]int32{`{"model":"m"}`: 0, `{"model":"other"}`: 404, "text": 404} {
		header := key
		if body == "text" {
			header = append(slices.Clone(key), "content-type", "text/plain")
		}
		if s := status(g, header, body); s != want {
			t.Errorf("%s of a tenant with one model: %d, want %d", body, s, want)
		}
	}
	g = newGateway(t, world.Setup{Engines: world.Wholes()})
	for _, kind := range []string{"application/json", "text/plain"} {
		x := g.ask(duplex, nil, []string{":path", "/invocations", "content-type", kind}, `{"prompt":"x","kv_transfer_params":{"remote_host":"h"}}`).decided()
		if strings.Contains(x.body, "kv_transfer_params") || x.set["content-type"] != "" {
			t.Errorf("%s: the engine gets %q as %q", kind, x.body, x.set["content-type"])
		}
		x.finish()
	}
	g = newGateway(t, world.Setup{Engines: world.Wholes(), Config: func(c *config.Config) { c.Limits.MaxExchanges, c.Limits.Queue = 1, 0 }})
	first := g.ask(duplex, nil, get).decided()
	if s := status(g, get); s != 429 {
		t.Errorf("above limits.max_exchanges: %d", s)
	}
	first.finish()
}
