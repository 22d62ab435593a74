package node

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// writeCert writes a certificate and its key to new files.
func writeCert(t *testing.T, cert, key string) {
	t.Helper()
	public, private := certificate(t)
	for path, text := range map[string]string{cert: public, key: private} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReloadKeepsOrChangesAll: a reload whose certificates have other names changes all other
// keys, names each key that needs a restart, and fails only if it changes nothing.
func TestReloadKeepsOrChangesAll(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	read := func(cert string, more string) *config.Config {
		t.Helper()
		text := fmt.Sprintf("[server]\nlisten='127.0.0.1:0'\ntls.cert='%s'\ntls.key='%s'\n%s\n[admin]\nlisten='127.0.0.1:0'\n[policy]\nruntime='native'\n", path(cert+".crt"), path(cert+".key"), more)
		cfg, err := config.Parse([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return &cfg
	}
	writeCert(t, path("old.crt"), path("old.key"))
	var log bytes.Buffer
	n, err := New(read("old", ""), slog.New(slog.NewTextHandler(&log, nil)), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		if err := n.Serve(ended); err != nil {
			t.Error(err)
		}
	}()

	writeCert(t, path("new.crt"), path("new.key"))
	for _, old := range []string{"old.crt", "old.key"} {
		if err := os.Remove(path(old)); err != nil {
			t.Fatal(err)
		}
	}
	next := read("new", "read_header_timeout='3s'\nidle_timeout='4s'\nmax_header='5KiB'\nwrite_timeout='6s'\n[limits]\nmax_exchanges=7\n[timeouts]\ndial='8s'\n[transport]\nmax_idle=9")
	err = n.Reload(next)
	if changed := n.cfg.Load().Limits.MaxExchanges == 7; (err == nil) != changed {
		t.Errorf("the reload has changed the limits: %t, with the error %v", changed, err)
	}
	for _, key := range []string{"server.tls", "server.read_header_timeout", "server.idle_timeout", "server.max_header", "key=server.write_timeout", "timeouts.dial", "transport.max_idle"} {
		if !strings.Contains(log.String(), key) {
			t.Errorf("the log does not name %s, which needs a restart", key)
		}
	}
}
