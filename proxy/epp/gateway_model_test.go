package epp_test

import (
	"strings"
	"testing"

	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/models"
	"github.com/pdproxy/pdproxy/proxy/poolobjects"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestGatewayModelLine: the line epp.model_header names the model instead of the body, unless the
// name in the body has a route. A tenant gets no model that it may not use. The engine never gets the
// line, and clients of the proxy itself have no such line.
func TestGatewayModelLine(t *testing.T) {
	const line = "x-llm-d-model-name-rewrite"
	named := func(model string) string { return `{"model":"` + model + `","prompt":"x"}` }
	for name, tt := range map[string]struct {
		body, value string
		keys        string
		status      int    // of a refusal
		text        string // in the body of the engine, or in the refusal
	}{
		"another model":       {named("m"), "m2", "", 0, `"model":"m2"`},
		"an unknown name":     {named("anything"), "m2", "", 0, `"model":"m2"`},
		"no line":             {named("m"), "", "", 0, `"model":"m"`},
		"the same model":      {named("m"), "m", "", 0, `"model":"m"`},
		"no model in body":    {`{"prompt":"x"}`, "m2", "", 0, ""},
		"a rewritten name":    {named("old"), "m2", "", 0, `"model":"m"`},
		"an alias":            {named("m2"), "alias", "", 0, `"model":"m"`},
		"no model":            {named("m"), "nothing", "", 404, "model_not_found"},
		"a remote":            {named("m"), "remote:x", "", 400, "bad_header"},
		"not a name":          {named("m"), "a b", "", 400, "bad_header"},
		"too long":            {named("m"), strings.Repeat("a", 300), "", 400, "bad_header"},
		"of another tenant":   {named("m"), "m2", world.TenantLine("a", "models=m"), 404, "model_not_found"},
		"of the tenant":       {named("m2"), "m", world.TenantLine("a", "models=m"), 0, `"model":"m"`},
		"of no tenant's list": {named("m2"), "", world.TenantLine("a", "models=m"), 404, "model_not_found"},
	} {
		for mode, m := range map[string]modes{"full duplex": duplex, "buffered": {filter.ProcessingMode_BUFFERED, filter.ProcessingMode_FULL_DUPLEX_STREAMED}} {
			t.Run(name+" "+mode, func(t *testing.T) {
				one := world.Answering("e0", "m,m2")
				one.At = "10.0.0.1:80"
				g := newGateway(t, world.Setup{Engines: []*world.Engine{one}, Keys: tt.keys, Config: func(c *config.Config) {
					c.EPP.ModelHeader, c.Models = line, []config.Model{{Name: "alias", AliasOf: "m"}}
				}})
				g.SetObjects(&poolobjects.Objects{Rewrites: []models.Rewrite{{Name: "old", Targets: []models.RewriteTarget{{Model: "m", Weight: 1}}}}})
				header := []string{"authorization", "Bearer a-key"}
				if tt.value != "" {
					header = append(header, line, tt.value)
				}
				x := g.ask(m, nil, header, tt.body).decided()
				if s := int(x.immediate.GetStatus().GetCode()); s != tt.status || s != 0 && !strings.Contains(string(x.immediate.GetBody()), tt.text) {
					t.Fatalf("got status %d %s, want %d", s, x.immediate.GetBody(), tt.status)
				}
				if tt.status != 0 {
					x.cancel()
					return
				}
				if !strings.Contains(x.body, tt.text) || tt.value != "" && !x.removed[line] {
					t.Errorf("the engine gets %s, without the lines %v", x.body, x.removed)
				}
				x.finish()
				if a := g.Post(world.CompletionsPath, named("m2"), line, "m", "Authorization", "Bearer a-key"); tt.keys == "" && (a.Status != 200 || !strings.Contains(one.Seen()[0].Body, `"model":"m2"`)) {
					t.Errorf("a client of the proxy: %d %s", a.Status, a.Body)
				}
			})
		}
	}
}
