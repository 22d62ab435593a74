package proxy

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// keyLine is the line of a keys file for a key.
func keyLine(name, key string) string {
	sum := sha256.Sum256([]byte(key))
	return name + " " + hex.EncodeToString(sum[:]) + "\n"
}

// A reload adds and removes keys. The change applies to the next request.
func TestKeysReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, `{}`) }}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, keys: keyLine("old", "old-key")})
		try := func(key string) int {
			return w.post(completionsPath, completions(false), "Authorization", "Bearer "+key).status
		}
		if a, b := try("old-key"), try("new-key"); a != 200 || b != 401 {
			t.Fatalf("status before the reload: got %d and %d", a, b)
		}
		keys, err := admission.ParseKeys([]byte(keyLine("new", "new-key")))
		if err != nil {
			t.Fatal(err)
		}
		w.Reload(w.cfg.Load(), keys)
		if a, b := try("old-key"), try("new-key"); a != 401 || b != 200 {
			t.Fatalf("status after the reload: got %d and %d", a, b)
		}
		open := *w.cfg.Load()
		open.Server.Auth = config.Auth{}
		w.Reload(&open, nil)
		if a := try(""); a != 200 {
			t.Fatalf("without keys: %d", a)
		}
		for _, client := range []string{"old", "new"} {
			if n := w.metric("pdproxy_client_exchanges_total", client, "ok"); n != 1 {
				t.Errorf("exchanges of client %s: got %v, want 1", client, n)
			}
		}
		if strings.Contains(w.logged.String(), "new-key") {
			t.Error("the log contains a key")
		}
	})
}
