package node

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
)

// certificate returns a certificate and its private key (PEM).
func certificate(t *testing.T) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}))
}

// TestCertificateChangesAreLogged: the log of the process names the table whose files
// changed, and the file that cannot be used.
func TestCertificateChangesAreLogged(t *testing.T) {
	for _, table := range []string{"server.tls", "epp.tls"} {
		t.Run(table, func(t *testing.T) {
			cert, key := certificate(t)
			next, nextKey := certificate(t)
			tls := config.TLS{Cert: write(t, cert), Key: write(t, key)}
			synctest.Test(t, func(t *testing.T) {
				cfg := config.Default()
				if table == "epp.tls" {
					cfg.EPP.TLS = tls
				} else {
					cfg.Server.TLS = tls
				}
				var logged bytes.Buffer
				f, err := loadFiles(&cfg, slog.New(slog.NewTextHandler(&logged, nil)))
				if err != nil {
					t.Fatal(err)
				}
				certs := map[string]*edge.Certs{"server.tls": f.certs, "epp.tls": f.eppCerts}[table]
				stop := startUntil(certs.Run)
				defer stop()
				expect := func(want string) {
					t.Helper()
					time.Sleep(9 * time.Second)
					synctest.Wait()
					if text := logged.String(); !strings.Contains(text, want) || strings.Contains(text, "garbage") {
						t.Errorf("logged %q, want %q", text, want)
					}
					logged.Reset()
				}
				put := func(path, text string) {
					t.Helper()
					if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				put(tls.Cert, "garbage")
				expect("the old ones stay\" key=" + table + " error=\"" + table + ".cert: no certificate (PEM) in " + tls.Cert)
				put(tls.Cert, next)
				put(tls.Key, nextKey)
				expect("loaded again\" key=" + table)
			})
		})
	}
}

// TestProblemsOfFiles: a problem has the line of the key, names the key once and names the
// file.
func TestProblemsOfFiles(t *testing.T) {
	cert, key := certificate(t)
	_, other := certificate(t)
	dir := t.TempDir()
	for name, text := range map[string]string{"cert": cert, "key": key, "other": other, "garbage": "garbage sk-secret\n", "good.keys": "team " + strings.Repeat("0f", 32) + "\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, tt := range map[string]struct{ text, want string }{
		"no certificate":     {"[server.tls]\ncert = 'DIR/nope'\nkey = 'DIR/key'\n", "c.toml:2: server.tls.cert: open DIR/nope: no such file or directory"},
		"no file":            {"[epp.tls]\ncert = 'DIR/nope'\nkey = 'DIR/nada'\n", "c.toml:2: epp.tls.cert: open DIR/nope: no such file or directory\nc.toml:3: epp.tls.key: open DIR/nada: no such file or directory"},
		"no PEM":             {"[server.tls]\ncert = 'DIR/garbage'\nkey = 'DIR/key'\n", "c.toml:2: server.tls.cert: no certificate (PEM) in DIR/garbage"},
		"key of another":     {"[epp.tls]\ncert = 'DIR/cert'\nkey = 'DIR/other'\n", "c.toml:3: epp.tls.key: DIR/other is not the private key of DIR/cert, which epp.tls.cert names: tls: private key does not match public key"},
		"client CA":          {"[server.tls]\nself_signed = true\nclient_ca = 'DIR/garbage'\n", "c.toml:3: server.tls.client_ca: no certificate (PEM) in DIR/garbage"},
		"fleet":              {"[fleet.tls]\ncert = 'DIR/nope'\nkey = 'DIR/key'\nca = 'DIR/garbage'\n", "c.toml:2: fleet.tls.cert: open DIR/nope: no such file or directory\nc.toml:4: fleet.tls.ca: no certificate (PEM) in DIR/garbage"},
		"fleet, wrong key":   {"[fleet.tls]\ncert = 'DIR/cert'\nkey = 'DIR/other'\nca = 'DIR/cert'\n", "c.toml:3: fleet.tls.key: DIR/other is not the private key of DIR/cert, which fleet.tls.cert names: tls: private key does not match public key"},
		"etcd":               {"[discovery.etcd]\nendpoints = ['https://127.0.0.1:1']\ncert = 'DIR/garbage'\nkey = 'DIR/nope'\n", "c.toml:3: discovery.etcd.cert: no certificate (PEM) in DIR/garbage\nc.toml:4: discovery.etcd.key: open DIR/nope: no such file or directory"},
		"all discovery":      {"[discovery.file]\npath = 'DIR/key'\n[discovery.etcd]\nendpoints = ['http://127.0.0.1:1']\n[[discovery.dns.engine]]\nname = 'a.test'\n", ""},
		"keys":               {"[server.auth]\nkeys_file = 'DIR/garbage'\n", `c.toml:2: server.auth.keys_file: DIR/garbage: line 1 is not "NAME SHA256"`},
		"keys, missing":      {"[server.auth]\nkeys_file = 'DIR/nope'\n", "c.toml:2: server.auth.keys_file: open DIR/nope: no such file or directory"},
		"jwt":                {"[[jwt]]\nissuer = 'a'\n[[jwt]]\nissuer = 'b'\njwks_file = 'DIR/garbage'\n", "c.toml:5: jwt[1].jwks_file: DIR/garbage: the keys are not a JSON Web Key Set"},
		"incomplete TLS":     {"[server.tls]\ncert = 'DIR/cert'\n[fleet.tls]\nkey = 'DIR/key'\n", ""},
		"incomplete etcd":    {"[discovery.etcd]\nendpoints = ['https://127.0.0.1:1']\nusername = 'a'\n", ""},
		"jwt without source": {"[[jwt]]\nissuer = 'a'\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			cfg, _ := config.Draft("c.toml", []byte(strings.ReplaceAll(tt.text, "DIR", dir)))
			_, err := loadFiles(cfg, slog.New(slog.DiscardHandler))
			got, want := "", strings.ReplaceAll(tt.want, "DIR", dir)
			if err != nil {
				got = err.Error()
			}
			if !strings.HasPrefix(got, want) || strings.Count(got, "\n") != strings.Count(want, "\n") || want == "" && got != "" || strings.Contains(got, "sk-secret") {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
}
