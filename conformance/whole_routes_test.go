package conformance

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// wholeRoute is a route that one engine answers alone, without text that it generates.
type wholeRoute struct {
	path, body string
	engines    string // the engines that have the route: vllm, sglang
	missing    string // a required field, whose absence the engine or the proxy reports
}

var wholeRoutes = []wholeRoute{
	{"/v1/embeddings", `{"model":"sim","input":["one","two words"]}`, "vllm sglang", "input"},
	{"/rerank", `{"model":"sim","query":"q","documents":["one","two","three"],"top_n":2}`, "vllm", "documents"},
	{"/v1/rerank", `{"model":"sim","query":"q","documents":["one","two","three"]}`, "vllm sglang", "documents"},
	{"/v2/rerank", `{"model":"sim","query":"q","documents":["one","two","three"]}`, "vllm", "query"},
	{"/score", `{"model":"sim","text_1":"q","text_2":["one","two"]}`, "vllm", "text_2"},
	{"/v1/score", `{"model":"sim","query":"q","items":["one","two"],"label_token_ids":[1,2],"text_1":"q","text_2":"one"}`, "vllm sglang", ""},
	{"/classify", `{"model":"sim","input":"one","text":"one"}`, "vllm sglang", ""},
	{"/v1/classify", `{"model":"sim","input":["one"]}`, "sglang", "input"},
	{"/pooling", `{"model":"sim","input":["one","two"]}`, "vllm", "input"},
	{"/v1/messages/count_tokens", `{"model":"sim","messages":[{"role":"user","content":"how many words"}]}`, "vllm sglang", "messages"},
}

// withoutIDs returns an answer without the members that differ from call to call.
func withoutIDs(t *testing.T, body string) string {
	var members map[string]any
	if json.Unmarshal([]byte(body), &members) != nil {
		return body // a list
	}
	for _, key := range []string{"id", "created", "meta_info"} {
		delete(members, key)
	}
	out, err := json.Marshal(members)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// TestWholeRoutes: one engine answers each of these routes, with the usual retries and
// errors, and no prefill engine takes part. Engines without the route are not asked.
func TestWholeRoutes(t *testing.T) {
	for _, connector := range []string{enginesim.ConnectorVLLMNixl, enginesim.ConnectorSGLang, enginesim.ConnectorTRTLLM} {
		t.Run(connector, func(t *testing.T) {
			f := startFleet(t, connector, fleetOptions{config: func(c *config.Config) { apiFaults(c); c.Retry.Attempts = 4 }})
			kind, _, _ := strings.Cut(connector, "-")
			for _, route := range wholeRoutes {
				t.Run(route.path, func(t *testing.T) {
					if !strings.Contains(route.engines, kind) {
						if got := f.try(route.path, route.body); route.path != "/v1/embeddings" && (got.status != 501 || !strings.Contains(got.body, `"code":"not_implemented"`)) {
							t.Errorf("got status %d: %s", got.status, got.body)
						}
						return
					}
					f.wholeRoute(t, route)
				})
			}
		})
	}
}

// TestEngineRoutes: a listed route of an engine behaves as the other whole routes; one that is
// not listed reaches no engine.
func TestEngineRoutes(t *testing.T) {
	route := wholeRoute{path: "/generative_scoring", body: `{"model":"sim","query":"q","items":["one","two"],"label_token_ids":[1,2]}`, missing: "items"}
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{config: func(c *config.Config) {
		apiFaults(c)
		c.Retry.Attempts = 4
		c.Server.EngineRoutes = []string{route.path}
	}})
	f.wholeRoute(t, route)
	for _, path := range []string{"/reset_prefix_cache", "/sim/fault", "/v1/chat/completions/render", route.path + "/x"} {
		if got := f.try(path, `{"model":"sim"}`); got.status != 404 || !strings.Contains(got.body, "not_found") {
			t.Errorf("%s: got status %d: %s", path, got.status, got.body)
		}
	}
}

// wholeRoute compares the answers of a route with those of one engine alone.
func (f *fleet) wholeRoute(t *testing.T, route wholeRoute) {
	want := f.post(context.Background(), f.alone.URL(), route.path, route.body)
	right := func(what string) {
		t.Helper()
		got := f.try(route.path, route.body)
		if got.status != 200 || want.status != 200 || withoutIDs(t, got.body) != withoutIDs(t, want.body) {
			t.Errorf("%s: got status %d: %s\nwant status %d: %s", what, got.status, got.body, want.status, want.body)
		}
		if got.header.Get("X-Pdproxy-Flow") != "aggregated" || got.header.Get("X-Pdproxy-Prefill") != "" {
			t.Errorf("%s: header %v", what, got.header)
		}
	}
	right("plain")
	for _, fault := range []string{"1:500", "1:close", "1:reset"} {
		before := f.metric("pdproxy_retries_total")
		if err := f.decode[0].SetFault(fault, 0, ""); err != nil {
			t.Fatal(err)
		}
		f.eventually("a request is tried again", func() bool {
			right(fault)
			return f.metric("pdproxy_retries_total") > before
		})
		if err := f.decode[0].SetFault("", 0, ""); err != nil {
			t.Fatal(err)
		}
	}
	for body, status := range map[string]int{
		"{": 400, "[]": 400, `{"model":7}`: 400, `{"a":1,"a":2}`: 400, `{"KV_transfer_params":1}`: 400,
		strings.Replace(route.body, `"sim"`, `"other"`, 1): 404,
	} {
		if got := f.try(route.path, body); got.status != status || !strings.Contains(got.body, `"error":{"message":`) {
			t.Errorf("body %s: got status %d: %s", body, got.status, got.body)
		}
	}
	if route.missing != "" {
		var members map[string]any
		if err := json.Unmarshal([]byte(route.body), &members); err != nil {
			t.Fatal(err)
		}
		delete(members, route.missing)
		body, err := json.Marshal(members)
		if err != nil {
			t.Fatal(err)
		}
		if got := f.try(route.path, string(body)); got.status != 400 || !strings.Contains(got.body, route.missing) {
			t.Errorf("without %s: got status %d: %s", route.missing, got.status, got.body)
		}
	}
}
