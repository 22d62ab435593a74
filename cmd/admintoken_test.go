package cmd

import (
	"context"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/proxy/admintoken"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// servingNode starts a node that serves until the test ends.
func servingNode(t *testing.T, change func(*config.Config)) *node.Node {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_RUNTIME_DIR", dir)
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen, cfg.Policy.Runtime = "127.0.0.1:0", "127.0.0.1:0", "native"
	change(&cfg)
	n, err := node.New(&cfg, slog.New(slog.DiscardHandler), node.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, "pdproxy", "*.token")); len(left) > 0 {
			t.Errorf("remaining files %q", left)
		}
	})
	return n
}

// TestCommandsFindTheToken: commands find the token of a proxy that this user
// runs on a loopback address, by each of the address's names. They find no
// other token.
func TestCommandsFindTheToken(t *testing.T) {
	n := servingNode(t, func(*config.Config) {})
	address := strings.TrimPrefix(n.AdminURL(), "http://")
	_, port, _ := strings.Cut(address, ":")
	for _, admin := range []string{address, "localhost:" + port, "http://" + address + "/", "http://LOCALHOST:" + port, ":" + port} {
		if code, stdout, stderr := run("admin-token", "--admin", admin); code != exit.OK || stdout != n.AdminToken()+"\n" {
			t.Errorf("%s: exit %d, %q %s", admin, code, stdout, stderr)
		}
	}
	for _, admin := range []string{"127.0.0.1:1", "127.0.0.2:" + port, "[::1]:" + port, "10.0.0.1:" + port, "proxy.example:" + port, "127.0.0.1.evil.example:" + port} {
		if code, stdout, _ := run("admin-token", "--admin", admin); code != exit.Failure || stdout != "" {
			t.Errorf("%s: exit %d, %q", admin, code, stdout)
		}
	}
	flags := adminFlags{address: "localhost:" + port}
	target, err := flags.target()
	if err != nil || target.base.Host != address || target.token != n.AdminToken() {
		t.Errorf("the token is for %+v, error %v", target, err)
	}
	given := write(t, "given\n")
	t.Setenv(adminTokenVariable, given)
	if code, stdout, _ := run("admin-token", "--admin", "proxy.example:9090"); code != exit.OK || stdout != "given\n" {
		t.Errorf("by the environment: exit %d, %q", code, stdout)
	}
	if code, _, stderr := run("explain", "x", "--admin", address); code != exit.Failure || !strings.Contains(stderr, "no request of this id") {
		t.Errorf("a token that is not needed: exit %d %s", code, stderr) // reads are open
	}
}

// TestConfiguredToken: a configured token is also needed for reads, and the node makes no
// token of its own.
func TestConfiguredToken(t *testing.T) {
	file := write(t, "let-me-in\n")
	n := servingNode(t, func(cfg *config.Config) { cfg.Admin.TokenFile = file })
	address := strings.TrimPrefix(n.AdminURL(), "http://")
	if _, err := os.Stat(admintoken.Path(address)); !os.IsNotExist(err) {
		t.Errorf("a token was made: %v", err)
	}
	if code, _, stderr := run("explain", "x", "--admin", address); code != exit.Failure || !strings.Contains(stderr, adminTokenVariable) {
		t.Errorf("exit %d %s", code, stderr)
	}
	if code, _, stderr := run("explain", "x", "--admin", address, "--token-file", file); code != exit.Failure || !strings.Contains(stderr, "no request of this id") {
		t.Errorf("exit %d %s", code, stderr)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, n.AdminURL()+"/v1/drain", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer let-me-in")
	resp, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != 200 {
		t.Errorf("%d", resp.StatusCode)
	}
}
