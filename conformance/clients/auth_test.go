package clients

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/openai/openai-go/v3/option"
)

// TestAuth checks which clients may call: API keys, client certificates, the
// admin token.
func TestAuth(t *testing.T) {
	fleet := startFleet(t, "vllm-nixl")
	t.Run("API keys", func(t *testing.T) { apiKeys(t, fleet) })
	t.Run("client certificates", func(t *testing.T) { clientCertificates(t, fleet) })
	t.Run("admin token", func(t *testing.T) { adminToken(t, fleet) })
}

func keyLine(name, key string) string {
	return fmt.Sprintf("%s %x\n", name, sha256.Sum256([]byte(key)))
}

func apiKeys(t *testing.T, fleet *fleet) {
	dir := t.TempDir()
	keys := writeFile(t, dir, "keys", keyLine("alice", "sk-alice")+keyLine("bob", "sk-bob"))
	f := startProxy(t, fleet, setup{auth: fmt.Sprintf("keys_file = %q", keys)})
	for _, tt := range []struct {
		name, header string
		status       int
	}{
		{"none", "X-Nothing: 1", 401},
		{"wrong", "Authorization: Bearer sk-mallory", 401},
		{"empty", "Authorization: Bearer ", 401},
		{"begin of a key", "Authorization: Bearer sk-alic", 401},
		{"hash of a key", "Authorization: Bearer " + strings.Fields(keyLine("alice", "sk-alice"))[1], 401},
		{"other scheme", "Authorization: Basic sk-alice", 401},
		{"right", "Authorization: Bearer sk-alice", 200},
		{"second", "Authorization: Bearer sk-bob", 200},
		{"Anthropic's header", "X-Api-Key: sk-bob", 200},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := f.engines(t).Requests
			for _, args := range [][]string{{f.URL + chatPath, "-d", chatBody(2, false)}, {f.URL + "/v1/models"}} {
				runCurl(t, "", append(args, "-H", tt.header)...).want(t, tt.status, "invalid_api_key")
			}
			if n := f.engines(t).Requests - before; tt.status == 401 && n != 0 {
				t.Errorf("%d requests reached an engine", n)
			}
		})
	}
	t.Run("health needs none", func(t *testing.T) { runCurl(t, "", f.URL+"/health").want(t, 200, "") })
	t.Run("OpenAI's client", func(t *testing.T) {
		good, bad := newGoClient(f.URL, option.WithAPIKey("sk-alice")), newGoClient(f.URL, option.WithAPIKey("sk-mallory"))
		if _, err := good.Chat.Completions.New(t.Context(), chatParams(2)); err != nil {
			t.Error(err)
		}
		_, err := bad.Chat.Completions.New(t.Context(), chatParams(2))
		checkError(t, err, 401, "", "invalid_api_key")
	})
	t.Run("reload", func(t *testing.T) {
		writeFile(t, dir, "keys", keyLine("alice", "sk-alice")+keyLine("carol", "sk-carol"))
		f.cmd.Process.Signal(syscall.SIGHUP)
		eventually(t, "the new key", func() error {
			if a := runCurl(t, "", f.URL+"/v1/models", "-H", "Authorization: Bearer sk-carol"); a.status != 200 {
				return fmt.Errorf("status %d, %w", a.status, a.err)
			}
			return nil
		})
		runCurl(t, "", f.URL+"/v1/models", "-H", "Authorization: Bearer sk-bob").want(t, 401, "invalid_api_key")
	})
	if log := f.log.String(); strings.Contains(log, "sk-") {
		t.Error("a key is in the log")
	}
}

func clientCertificates(t *testing.T, fleet *fleet) {
	ours, theirs := newAuthority(t, "ours"), newAuthority(t, "theirs")
	server, member, stranger := ours.issue(t, "server"), ours.issue(t, "member"), theirs.issue(t, "stranger")
	f := startProxy(t, fleet, setup{
		http3: true,
		tls:   fmt.Sprintf("cert = %q\nkey = %q\nclient_ca = %q", server.certFile, server.key, ours.file),
	})
	for _, flag := range []string{"--http1.1", "--http2"} {
		for _, tt := range []struct {
			name string
			args []string
			ok   bool
		}{
			{"none", nil, false},
			{"of another authority", []string{"--cert", stranger.certFile, "--key", stranger.key}, false},
			{"ours", []string{"--cert", member.certFile, "--key", member.key}, true},
		} {
			t.Run(flag[2:]+"/"+tt.name, func(t *testing.T) {
				// The server's own certificate is checked too, because of
				// --cacert in place of -k.
				a := runCurl(t, "", append([]string{"--no-insecure", "--cacert", ours.file, flag, f.URL + chatPath, "-d", chatBody(2, false)}, tt.args...)...)
				if tt.ok {
					a.want(t, 200, "")
				} else if a.err == nil {
					t.Errorf("got status %d, want a refused handshake", a.status)
				}
			})
		}
	}
	t.Run("h3", func(t *testing.T) { http3ClientCertificates(t, f, ours, member, stranger) })
	t.Run("renewed files", func(t *testing.T) {
		renewed := newAuthority(t, "renewed")
		cert := renewed.issue(t, "server")
		for from, to := range map[string]string{cert.certFile: server.certFile, cert.key: server.key} {
			rename(t, from, to)
		}
		eventually(t, "the new certificate", func() error {
			return runCurl(t, "", "--no-insecure", "--cacert", renewed.file, "--cert", member.certFile, "--key", member.key, f.URL+"/health").err
		})
	})
}

// rename replaces a file at once, as certificate tools do.
func rename(t *testing.T, from, to string) {
	t.Helper()
	tmp := writeFile(t, filepath.Dir(to), "tmp", readFile(t, from))
	if err := os.Rename(tmp, to); err != nil {
		t.Fatal(err)
	}
}

func adminToken(t *testing.T, fleet *fleet) {
	f := startProxy(t, fleet, setup{adminToken: "let-me-in"})
	for _, tt := range []struct {
		name, path, token string
		status            int
	}{
		{"metrics without", "/metrics", "", 401},
		{"metrics with a wrong one", "/metrics", "let-me-inn", 401},
		{"metrics with it", "/metrics", "let-me-in", 200},
		{"engines without", "/v1/engines", "", 401},
		{"engines with it", "/v1/engines", "let-me-in", 200},
		{"unknown path without", "/nothing", "", 401},
		{"liveness needs none", "/healthz", "", 200},
		{"readiness needs none", "/readyz", "", 200},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := http.NewRequest("GET", f.Admin+tt.path, nil)
			if err != nil {
				t.Fatal(err)
			}
			if tt.token != "" {
				r.Header.Set("Authorization", "Bearer "+tt.token)
			}
			resp, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != tt.status {
				t.Errorf("got status %d, want %d", resp.StatusCode, tt.status)
			}
		})
	}
	t.Run("not on the public side", func(t *testing.T) {
		runCurl(t, "", f.URL+"/metrics").want(t, 404, "not_found")
		runCurl(t, "", f.URL+"/v1/engines").want(t, 404, "not_found")
	})
	if strings.Contains(f.log.String(), "let-me-in") {
		t.Error("the token is in the log")
	}
}
