package acme

import (
	"crypto/tls"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/certmagic"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestNew: the errors of files name the key, and never the content.
func TestNew(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	open := filepath.Join(dir, "open")
	if err := os.Mkdir(open, 0o755); err != nil {
		t.Fatal(err)
	}
	two := write("two", "secret\nlines\n", 0o600)
	for name, tt := range map[string]struct {
		cfg  config.ACME
		want string
	}{
		"new storage":       {config.ACME{Storage: filepath.Join(dir, "new")}, ""},
		"storage is a file": {config.ACME{Storage: two}, "server.acme.storage: " + two + " is not a directory"},
		"storage is open":   {config.ACME{Storage: open}, "server.acme.storage: " + open + " has mode 0755, so other users can reach the private keys: chmod 700 " + open},
		"no CA file":        {config.ACME{Storage: dir + "/new", DirectoryCA: dir + "/absent"}, "server.acme.directory_ca: open " + dir + "/absent: no such file or directory"},
		"CA without PEM":    {config.ACME{Storage: dir + "/new", DirectoryCA: two}, "server.acme.directory_ca: no certificate (PEM) in " + two},
		"key of two lines":  {config.ACME{Storage: dir + "/new", EABKeyID: "k", EABKeyFile: two}, "server.acme.eab_key_file: the file must hold one line"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := New(tt.cfg, slog.New(slog.DiscardHandler))
			if tt.want == "" && err == nil {
				return
			}
			if err == nil || err.Error() != tt.want || strings.Contains(err.Error(), "secret") {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

// TestChallenge: only the handshake that checks a configured name is one of the ACME server.
func TestChallenge(t *testing.T) {
	s, err := New(config.ACME{Storage: t.TempDir() + "/new", Domains: []string{"a.example.org"}}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	check := func(name string, want bool, protocols ...string) {
		t.Helper()
		if got := s.Challenge(&tls.ClientHelloInfo{ServerName: name, SupportedProtos: protocols}) != nil; got != want {
			t.Errorf("%s %v: %t", name, protocols, got)
		}
	}
	check("a.example.org", false, Protocol) // Run does not run
	s.magic.Store(new(certmagic.Config))
	check("a.example.org", true, Protocol)
	check("A.example.org", true, Protocol)
	check("b.example.org", false, Protocol)
	check("", false, Protocol)
	check("a.example.org", false)
	check("a.example.org", false, "h2", Protocol)
}
