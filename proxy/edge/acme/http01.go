package acme

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/certmagic"
	rfc8555 "github.com/mholt/acmez/v3/acme"

	"github.com/pdproxy/pdproxy/proxy/connlimit"
	"github.com/pdproxy/pdproxy/proxy/takeover"
)

// Limits of a connection of the challenge port, which anybody can reach.
const (
	challengeTime   = 5 * time.Second // for a request, and for its answer
	challengeHeader = 4 << 10         // bytes; net/http adds 4 KiB
)

// challengePort is the port of HTTP-01, open while a challenge of this process runs. certmagic
// would open the port without limits; it opens none where somebody listens (solvers.go,
// robustTryListen). The processes of the proxy share the port: each answers the challenges of all.
type challengePort struct {
	address string
	domains []string
	issuer  *certmagic.ACMEIssuer // knows the challenges
	log     *slog.Logger

	mu      sync.Mutex
	running []string       // names of the running challenges in the storage; guarded by mu
	serving *http.Server   // nil while the port is closed; guarded by mu
	ended   sync.WaitGroup // of serving
}

// open opens the port for a challenge.
func (p *challengePort) open(key string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.serving == nil {
		l, err := takeover.Shared().Listen(context.Background(), "tcp", p.address)
		if err != nil {
			return fmt.Errorf("server.acme.http_port: %w", err)
		}
		server := p.server()
		p.serving = server
		p.ended.Go(func() { _ = server.Serve(l) }) // returns when shut closes the server
	}
	if !slices.Contains(p.running, key) {
		p.running = append(p.running, key)
	}
	return nil
}

// done closes the port after the last challenge.
func (p *challengePort) done(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running = slices.DeleteFunc(p.running, func(k string) bool { return k == key })
	if len(p.running) == 0 {
		p.shut()
	}
}

// close closes the port.
func (p *challengePort) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shut()
}

// shut closes the port and its connections. The caller holds mu.
func (p *challengePort) shut() {
	if p.serving != nil {
		_ = p.serving.Close() // its errors are those of closed sockets
		p.ended.Wait()
		p.serving = nil
	}
}

// server returns the server of the port.
func (p *challengePort) server() *http.Server {
	s := &http.Server{
		Handler:     p,
		ReadTimeout: challengeTime, WriteTimeout: challengeTime, MaxHeaderBytes: challengeHeader,
		ErrorLog: slog.NewLogLogger(p.log.Handler(), slog.LevelDebug),
	}
	s.SetKeepAlivesEnabled(false)
	connlimit.HTTP(s)
	return s
}

// ServeHTTP answers a check of the ACME server. A name that is not configured reads no file.
func (p *challengePort) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	host, _, err := net.SplitHostPort(r.Host)
	if err != nil {
		host = r.Host
	}
	if !slices.Contains(p.domains, strings.ToLower(host)) || !p.issuer.HandleHTTPChallenge(w, r) {
		http.NotFound(w, r)
	}
}

// storage is the directory. A challenge begins with the Store of its token and ends with the
// Delete. The directory does not list accounts: certmagic (account.go, setEmail) would take the
// directory of an account without an address, "default", for an address while another process
// makes it.
type storage struct {
	*certmagic.FileStorage
	port *challengePort
}

// List implements certmagic.Storage.
func (storage) List(context.Context, string, bool) ([]string, error) { return nil, fs.ErrNotExist }

// Store implements certmagic.Storage.
func (s storage) Store(ctx context.Context, key string, value []byte) error {
	if isToken(key) {
		var c rfc8555.Challenge
		if json.Unmarshal(value, &c) == nil && c.Type == rfc8555.ChallengeTypeHTTP01 {
			if err := s.port.open(key); err != nil {
				return err
			}
		}
	}
	return s.FileStorage.Store(ctx, key, value)
}

// Delete implements certmagic.Storage.
func (s storage) Delete(ctx context.Context, key string) error {
	if isToken(key) {
		defer s.port.done(key)
	}
	return s.FileStorage.Delete(ctx, key)
}

// isToken reports whether certmagic (solvers.go, challengeTokensKey) keeps a running challenge at
// key.
func isToken(key string) bool { return path.Base(path.Dir(key)) == "challenge_tokens" }
