package proxy_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// The endpoints without generation.
func TestPlainEndpoints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		started := time.Now().Unix() // simulated time
		w := newWorld(t, world.Setup{Keys: world.KeyLine("n", "k"), Engines: []*world.Engine{
			{Models: "a,b/c,d/", Cards: `"root":"/weights/a","parent":"base","max_model_len":4096`},
			{Name: "f", Models: "a", Cards: `"root":"/weights/other","max_model_len":1024`},
		}})
		get := func(path string) string {
			a := world.Ask(t.Context(), w.Client, "GET", "http://proxy"+path, "", "Authorization", "Bearer k")
			return fmt.Sprintf("%d %s", a.Status, strings.TrimSpace(a.Body))
		}
		row := func(id string) string {
			return fmt.Sprintf(`{"id":%q,"object":"model","created":%d,"owned_by":"pdproxy"}`, id, started)
		}
		cards := strings.Replace(row("a"), "}", `,"root":"/weights/a","parent":"base","max_model_len":1024}`, 1)
		list := `200 {"object":"list","data":[` + cards + "," + row("b/c") + "," + row("d/") + `]}`
		for path, want := range map[string]string{
			"/v1/models":       list,
			"/v1/models/":      list,
			"/v1/models/a":     "200 " + cards,
			"/v1/models/b/c":   "200 " + row("b/c"),
			"/v1/models/b/c/":  "200 " + row("b/c"),
			"/v1/models/b%2Fc": "200 " + row("b/c"),
			"/v1/models/d/":    "200 " + row("d/"),
			"/v1/models/x":     `404 {"error":{"message":"the model \"x\" does not exist; the engines serve a, b/c, d/","type":"invalid_request_error","param":"model","code":"model_not_found"}}`,
			"/health":          `200 {"status":"ok"}`,
			"/health/":         `200 {"status":"ok"}`,
			"/version":         `200 {"version":"1.2.3"}`,
			"/version/":        `200 {"version":"1.2.3"}`,
		} {
			if got := get(path); got != want {
				t.Errorf("%s: %s, want %s", path, got, want)
			}
		}
		if a := w.Get("/v1/models"); a.Status != 401 {
			t.Errorf("without a key: got status %d", a.Status)
		}
		if a := world.Ask(t.Context(), w.Client, "HEAD", "http://proxy/health", ""); a.Status != 200 || a.Body != "" {
			t.Errorf("HEAD: %+v", a)
		}
	})
}
