package node

import (
	"bytes"
	"context"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestLogOfAnUnreadyNode: the log lines name the key that cannot be used, and say why no
// request can be served. An engine that answers 404 is not ready, but it answers.
func TestLogOfAnUnreadyNode(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	var log bytes.Buffer
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen, cfg.Policy.Runtime = "127.0.0.1:0", "127.0.0.1:0", "native"
	n, err := New(&cfg, slog.New(slog.NewTextHandler(&log, nil)), Options{})
	if err != nil {
		t.Fatal(err)
	}
	n.listMissing()
	next := cfg
	e := config.DefaultEngine()
	e.Name, e.URL, e.Role = "e0", "http://127.0.0.1:1/v1", config.RoleBoth
	next.Engines = []config.Engine{e}
	next.Server.AccessLog = filepath.Join(t.TempDir(), "away", "access.log")
	if err := n.Reload(&next); err != nil {
		t.Error(err)
	}
	n.listMissing()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := n.Serve(ended); err != nil {
		t.Error(err)
	}
	for _, want := range []string{
		"clients get 503 until an engine is added",
		`msg="the access log stays in the old file" key=server.access_log`,
		"clients get 503 until the engines below are ready",
		`msg="engine is not ready" engine=e0`,
	} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log has no %q", want)
		}
	}
	if t.Failed() {
		t.Log(log.String())
	}
	if got := until(2, 0); !strings.Contains(got, "/v1/pairs") || strings.Contains(got, "below") {
		t.Errorf("all engines are ready: %q", got)
	}
}
