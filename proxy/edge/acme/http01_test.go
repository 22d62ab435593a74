package acme

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/certmagic"
	rfc8555 "github.com/mholt/acmez/v3/acme"

	"github.com/pdproxy/pdproxy/proxy/config"
)

const name, token, authorization = "a.example.org", "t0k3n", "t0k3n.thumbprint"

// challenged returns the storage of a source whose challenge port is free, and the address of
// the port.
func challenged(t *testing.T) (s storage, address string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	source, err := New(config.ACME{Storage: t.TempDir() + "/new", Domains: []string{name}, HTTPPort: port, Directory: "https://ca.example/dir"}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := source.Listen(&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 443}); err != nil {
		t.Fatal(err)
	}
	log := zapLogger(t.Context(), source.log)
	cache := certmagic.NewCache(certmagic.CacheOptions{GetConfigForCert: func(certmagic.Certificate) (*certmagic.Config, error) { return nil, nil }, Logger: log})
	t.Cleanup(cache.Stop)
	magic, challenges := source.manage(cache, log)
	t.Cleanup(challenges.close)
	return magic.Storage.(storage), l.Addr().String()
}

// key is where certmagic (solvers.go, challengeTokensKey) keeps a running challenge.
var key = "acme/" + (&certmagic.ACMEIssuer{CA: "https://ca.example/dir"}).IssuerKey() + "/challenge_tokens/" + name + ".json"

// present does what certmagic does when a challenge begins.
func present(t *testing.T, s storage, kind string) {
	t.Helper()
	text, err := json.Marshal(rfc8555.Challenge{Type: kind, Token: token, KeyAuthorization: authorization, Identifier: rfc8555.Identifier{Type: "dns", Value: name}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Store(t.Context(), key, text); err != nil {
		t.Fatal(err)
	}
}

func listens(address string) bool {
	c, err := net.Dial("tcp", address)
	if err == nil {
		c.Close()
	}
	return err == nil
}

// ask returns the status and the body of the answer to a request.
func ask(t *testing.T, address, method, host, path string) (int, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+address+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Host = host
	resp, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// TestChallengePort: the port is open while a challenge HTTP-01 runs, and answers this challenge
// alone.
func TestChallengePort(t *testing.T) {
	s, address := challenged(t)
	present(t, s, "tls-alpn-01")
	if listens(address) {
		t.Error("the port is open for TLS-ALPN-01")
	}
	present(t, s, "http-01")
	const path = "/.well-known/acme-challenge/"
	for _, tt := range []struct {
		method, host, path string
		status             int
	}{
		{"GET", name, path + token, 200},
		{"GET", strings.ToUpper(name) + ":80", path + token, 200},
		{"GET", name, path + "other", 404},
		{"GET", name, path, 404},
		{"GET", name, "/", 404},
		{"GET", name, path + "../../v1/models", 404},
		{"POST", name, path + token, 404},
		{"GET", "b.example.org", path + token, 404},
		{"GET", "../" + name, path + token, 404},
	} {
		status, body := ask(t, address, tt.method, tt.host, tt.path)
		if status != tt.status || (body == authorization) != (status == 200) {
			t.Errorf("%s %s%s: %d %q, want %d", tt.method, tt.host, tt.path, status, body, tt.status)
		}
	}
	if err := s.Delete(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	if listens(address) {
		t.Error("the port is open without a challenge")
	}
}

// TestChallengePortIsTaken: two processes of the proxy share the port, and a foreign server at the
// port is an error of the order.
func TestChallengePortIsTaken(t *testing.T) {
	s, address := challenged(t)
	present(t, s, "http-01")
	second := &challengePort{address: address, log: slog.New(slog.DiscardHandler)}
	if err := second.open("x"); err != nil {
		t.Errorf("a second process: %v", err)
	}
	second.close()
	if err := s.Delete(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	foreign, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	if err := s.Store(t.Context(), key, []byte(`{"type":"http-01"}`)); err == nil || !strings.Contains(err.Error(), "server.acme.http_port: ") {
		t.Errorf("a foreign server: %v", err)
	}
}

// TestIdleConnectionsOfThePort: idle connections make room for the check of the ACME server.
func TestIdleConnectionsOfThePort(t *testing.T) {
	s, address := challenged(t)
	present(t, s, "http-01")
	const most, more = 512, 40 // most of one address: connlimit
	var conns []net.Conn
	for range most + more {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	if status, body := ask(t, address, "GET", name, "/.well-known/acme-challenge/"+token); status != 200 || body != authorization {
		t.Errorf("%d %q", status, body)
	}
	for i, c := range conns[:more] {
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !strings.Contains(fmt.Sprint(err), "reset") {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
}

// pipes is a listener whose connections are in memory, so that their time is simulated.
type pipes struct {
	conns chan net.Conn
	end   context.Context
	close context.CancelFunc
}

func (l pipes) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.end.Done():
		return nil, net.ErrClosed
	}
}
func (l pipes) Close() error { l.close(); return nil }
func (pipes) Addr() net.Addr { return &net.TCPAddr{} }

// TestHeadsOfThePort: a head that is slow or large ends the connection.
func TestHeadsOfThePort(t *testing.T) {
	for name, tt := range map[string]struct{ head, want string }{
		"slow":  {"GET / HTTP/1.1\r\nHost: a\r\nX: ", ""},
		"large": {"GET / HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("x", 16<<10) + "\r\n\r\n", "HTTP/1.1 431 "},
		"none":  {"", ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := &challengePort{log: slog.New(slog.DiscardHandler)}
				l := pipes{conns: make(chan net.Conn)}
				l.end, l.close = context.WithCancel(t.Context())
				server := p.server()
				var wg sync.WaitGroup
				wg.Go(func() { _ = server.Serve(l) }) // returns after Close
				client, c := net.Pipe()
				l.conns <- c
				wg.Go(func() { io.WriteString(client, tt.head) }) // the server may close first
				answer, err := bufio.NewReader(client).ReadString('\n')
				if !strings.HasPrefix(answer, tt.want) || tt.want == "" && (answer != "" || err == nil) || errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("%q, %v", answer, err)
				}
				client.Close()
				server.Close()
				wg.Wait()
				time.Sleep(time.Second) // net/http waits before it closes a connection with unread bytes
			})
		})
	}
}
