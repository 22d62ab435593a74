package exchange_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/accesslog"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestAccessLog: each ended request has one line, with its outcome and without its text.
func TestAccessLog(t *testing.T) { synctest.Test(t, testAccessLog) }

func testAccessLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "access.jsonl")
	access, err := accesslog.Open(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	w := world.New(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}, Options: func(d *proxy.Options) { d.AccessLog = access }})
	w.Post("/v1/completions", `{"model":"m","prompt":"a secret","max_tokens":3}`, "X-Request-Id", "good")
	w.Post("/v1/completions", `{"model":"m","prompt":"a secret","max_tokens":"many"}`, "X-Request-Id", "bad")
	synctest.Wait()
	if err := access.Close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(text, []byte("secret")) {
		t.Errorf("the log contains the text of a prompt: %s", text)
	}
	byID := map[string]accesslog.Entry{}
	for line := range bytes.Lines(text) {
		var e accesslog.Entry
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		byID[e.RequestID] = e
	}
	good, bad := byID["good"], byID["bad"]
	if good.Status != 200 || good.Outcome != "ok" || good.Model != "m" || good.Legs != 1 || good.Decode == "" || good.FirstByteMS == nil || good.PromptTokens == 0 {
		t.Errorf("line of a successful request: %+v", good)
	}
	if bad.Status != 400 || bad.Outcome == "ok" || bad.Legs != 0 || bad.FirstByteMS != nil {
		t.Errorf("line of a rejected request: %+v", bad)
	}
	if len(byID) != 2 {
		t.Errorf("got %d lines, want 2: %s", len(byID), text)
	}
}
