package conformance

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// typedAPIs are the routes that older releases of SGLang do not disaggregate, with the last such
// release.
func typedAPIs() map[string]api {
	return map[string]api{"0.5.19": apis[0], "0.5.21": apis[1]}
}

// TestOldSGLang: engines of a release without the transfer on a route get no leg of the route. An
// engine of role both, or newer engines, serve the request; without them the error names the release.
func TestOldSGLang(t *testing.T) {
	for old, a := range typedAPIs() {
		release := func(newer int) func(string, int, *enginesim.Config) {
			return func(role string, n int, c *enginesim.Config) {
				if role != enginesim.RoleBoth && n != newer {
					c.SGLang.Version = old
				}
			}
		}
		unused := func(t *testing.T, engines ...*enginesim.Engine) {
			t.Helper()
			for _, e := range engines {
				if s := e.State(); s.Requests+s.Errors != 0 {
					t.Errorf("an old engine got a leg: %+v", s)
				}
			}
		}
		t.Run(old+" alone", func(t *testing.T) {
			f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{prefill: 1, decode: 1, engine: release(-1)})
			for _, stream := range []bool{false, true} {
				got := f.try(a.path, a.body("x", 9, stream))
				if got.status != 501 || !strings.Contains(got.body, "on two SGLang engines need SGLang 0.5.") || !strings.Contains(got.body, a.path) {
					t.Errorf("got status %d: %s", got.status, got.body)
				}
				if typed := strings.HasPrefix(got.body, `{"type":"error"`); typed != (a.path == "/v1/messages") {
					t.Errorf("not an error of this API: %s", got.body)
				}
			}
			unused(t, f.prefill[0], f.decode[0])
			f.right(f.try(chatPath, chat("x", 9, true)), chatPath, chat("x", 9, true)) // older releases have this transfer
		})
		t.Run(old+" with an engine of role both", func(t *testing.T) {
			both := startEngine(t, enginesim.Config{Connector: enginesim.ConnectorSGLang, Role: enginesim.RoleBoth, SGLang: enginesim.SGLangConfig{Version: old}})
			f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{prefill: 1, decode: 1, engine: release(-1), config: func(c *config.Config) {
				c.Engines = append(c.Engines, engineSpec("b0", "both", enginesim.ConnectorSGLang, both))
			}})
			f.decode = append(f.decode, both)
			for n := range 4 {
				body := a.body(fmt.Sprint("x", n), 9, n%2 == 0)
				f.right(f.try(a.path, body), a.path, body)
			}
			unused(t, f.prefill[0], f.decode[0])
			if n, all := f.metric("pdproxy_fallbacks_total", `what="aggregated"`, `reason="old_engine"`), f.metric("pdproxy_fallbacks_total"); n != all {
				t.Errorf("%v of %v fallbacks name the release", n, all)
			}
		})
		t.Run(old+" beside a newer pair", func(t *testing.T) {
			f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{prefill: 2, decode: 2, engine: release(1)})
			for n := range 8 {
				body := a.body(fmt.Sprint("x", n), 9, n%2 == 0)
				got := f.try(a.path, body)
				f.right(got, a.path, body)
				if got.header.Get("X-Pdproxy-Prefill") != "p1" || got.header.Get("X-Pdproxy-Decode") != "d1" {
					t.Errorf("placed on %s and %s", got.header.Get("X-Pdproxy-Prefill"), got.header.Get("X-Pdproxy-Decode"))
				}
			}
			unused(t, f.prefill[0], f.decode[0])
			if n := f.metric("pdproxy_fallbacks_total"); n != 0 {
				t.Errorf("got %v fallbacks", n)
			}
		})
	}
	// The header lines carry the transfer of messages on older engines too.
	t.Run("header lines", func(t *testing.T) {
		f := startFleet(t, sglangHeaders, fleetOptions{prefill: 1, decode: 1, engine: func(_ string, _ int, c *enginesim.Config) { c.SGLang.Version = "0.5.19" }})
		for _, stream := range []bool{false, true} {
			body := apis[1].body("x", 9, stream)
			got := f.try(apis[1].path, body)
			if f.right(got, apis[1].path, body); got.header.Get("X-Pdproxy-Prefill") == "" {
				t.Errorf("one engine served the request: %v", got.header)
			}
		}
	})
}

// TestStatefulResponses: engines of a pair store no responses. The error names the field.
func TestStatefulResponses(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{prefill: 1, decode: 1})
	for field, body := range map[string]string{
		"background":           `{"model":"sim","input":"x","background":true}`,
		"previous_response_id": `{"model":"sim","input":"x","previous_response_id":"resp_1"}`,
	} {
		if got := f.try("/v1/responses", body); got.status != 400 || !strings.Contains(got.body, `"param":"`+field+`"`) || !strings.Contains(got.body, `"code":"not_pairable"`) {
			t.Errorf("%s: got status %d: %s", field, got.status, got.body)
		}
	}
	for _, e := range append(f.prefill, f.decode...) {
		if s := e.State(); s.Requests != 0 {
			t.Errorf("an engine got a leg: %+v", s)
		}
	}
	if a := f.try("/v1/responses", `{"model":"sim","input":"x","max_output_tokens":9}`); a.status != 200 || !strings.Contains(a.body, `{"id":"resp_`) {
		t.Errorf("got status %d: %s", a.status, a.body)
	}
}
