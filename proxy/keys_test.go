package proxy_test

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// A reload adds and removes keys. The change applies to the next request.
func TestKeysReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, `{}`) }}
		w := newWorld(t, world.Setup{Engines: []*world.Engine{e}, Keys: world.KeyLine("old", "old-key")})
		try := func(key string) int {
			return w.Post(world.CompletionsPath, world.Completions(false), "Authorization", "Bearer "+key).Status
		}
		if a, b := try("old-key"), try("new-key"); a != 200 || b != 401 {
			t.Fatalf("status before the reload: got %d and %d", a, b)
		}
		keys, err := admission.ParseKeys([]byte(world.KeyLine("new", "new-key")))
		if err != nil {
			t.Fatal(err)
		}
		w.Reload(w.Config, keys)
		if a, b := try("old-key"), try("new-key"); a != 401 || b != 200 {
			t.Fatalf("status after the reload: got %d and %d", a, b)
		}
		open := *w.Config
		open.Server.Auth = config.Auth{}
		w.Reload(&open, nil)
		if a := try(""); a != 200 {
			t.Fatalf("without keys: %d", a)
		}
		for _, client := range []string{"old", "new"} {
			if n := w.Metric("pdproxy_client_exchanges_total", client, "ok"); n != 1 {
				t.Errorf("exchanges of client %s: got %v, want 1", client, n)
			}
		}
		if strings.Contains(w.Logged.String(), "new-key") {
			t.Error("the log contains a key")
		}
	})
}
