// Package acme obtains certificates from an ACME server and renews them. The certificates are
// files in a directory that all processes of the proxy share; package edge reads them like
// other certificate files. A handshake of a client starts no order and no other work here.
//
// The decisions behind this package are in docs/design/edge.md.
package acme

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/caddyserver/certmagic"
	"github.com/mholt/acmez/v3"
	rfc8555 "github.com/mholt/acmez/v3/acme"
	"go.uber.org/zap"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/pemfile"
)

// Protocol is the ALPN protocol of a connection that checks a name (RFC 8737).
const Protocol = acmez.ACMETLS1Protocol

// Source obtains the certificates of one configuration. Safe for concurrent use.
type Source struct {
	cfg     config.ACME
	eab     *rfc8555.EAB   // nil: no external account binding
	roots   *x509.CertPool // of the ACME server; nil: those of the system
	files   *certmagic.FileStorage
	address net.Addr // of the listener; set by Listen, before Run
	log     *slog.Logger
	// magic answers challenges. nil: Run does not run.
	magic atomic.Pointer[certmagic.Config]
}

// New reads the files that cfg names. Its errors are of type pemfile.Errors.
func New(cfg config.ACME, log *slog.Logger) (*Source, error) {
	s := &Source{cfg: cfg, files: &certmagic.FileStorage{Path: cfg.Storage}, log: log}
	var failed pemfile.Errors
	fail := func(key string, err error) {
		if err != nil {
			failed = append(failed, &pemfile.Error{Key: "server.acme." + key, Err: err})
		}
	}
	if cfg.DirectoryCA != "" {
		var r pemfile.Reader
		s.roots = r.Pool(pemfile.File{Key: "server.acme.directory_ca", Path: cfg.DirectoryCA})
		_, err := r.Sum()
		var files pemfile.Errors
		if errors.As(err, &files) {
			failed = append(failed, files...)
		}
	}
	if cfg.EABKeyFile != "" {
		key, err := config.ReadSecret(cfg.EABKeyFile)
		fail("eab_key_file", err)
		s.eab = &rfc8555.EAB{KeyID: cfg.EABKeyID, MACKey: strings.TrimRight(key, "=")}
	}
	fail("storage", checkStorage(cfg.Storage))
	if len(failed) > 0 {
		return nil, failed
	}
	return s, nil
}

// checkStorage rejects a directory that is no directory or that other users can read.
func checkStorage(path string) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil // Listen makes it
	case err != nil:
		return err
	case !info.IsDir():
		return fmt.Errorf("%s is not a directory", path)
	case info.Mode().Perm()&0o077 != 0:
		return fmt.Errorf("%s has mode %04o, so other users can reach the private keys: chmod 700 %s", path, info.Mode().Perm(), path)
	}
	return nil
}

// Listen notes the address of the listener that answers TLS-ALPN-01, and makes the directory.
func (s *Source) Listen(address net.Addr) error {
	s.address = address
	if err := os.MkdirAll(s.cfg.Storage, 0o700); err != nil {
		return fmt.Errorf("server.acme.storage: %w", err)
	}
	return nil
}

// Pair is the files of one certificate.
type Pair struct{ Domain, Cert, Key string }

// Pairs returns the certificates that exist, in the order of the configuration.
func (s *Source) Pairs() []Pair {
	issuer := (&certmagic.ACMEIssuer{CA: s.cfg.Directory}).IssuerKey()
	var pairs []Pair
	for _, domain := range s.cfg.Domains {
		cert := s.files.Filename(certmagic.StorageKeys.SiteCert(issuer, domain))
		if _, err := os.Stat(cert); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		pairs = append(pairs, Pair{domain, cert, s.files.Filename(certmagic.StorageKeys.SitePrivateKey(issuer, domain))})
	}
	return pairs
}

// Challenge returns the configuration of a handshake by which the ACME server checks one of the
// names; nil for any other handshake.
func (s *Source) Challenge(hello *tls.ClientHelloInfo) *tls.Config {
	magic := s.magic.Load()
	if magic == nil || len(hello.SupportedProtos) != 1 || hello.SupportedProtos[0] != Protocol || !slices.Contains(s.cfg.Domains, strings.ToLower(hello.ServerName)) {
		return nil
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{Protocol}, GetCertificate: magic.GetCertificate}
}

// Run orders the certificates that are absent and renews the others, until ctx ends. Of several
// processes with the same directory only one at a time orders a certificate.
func (s *Source) Run(ctx context.Context) {
	log := zapLogger(ctx, s.log)
	var magic *certmagic.Config
	cache := certmagic.NewCache(certmagic.CacheOptions{
		GetConfigForCert: func(certmagic.Certificate) (*certmagic.Config, error) { return magic, nil },
		Logger:           log,
	})
	defer cache.Stop()
	magic, port := s.manage(cache, log)
	defer port.close()
	s.magic.Store(magic)
	defer s.magic.Store(nil)
	for _, domain := range s.absent() {
		s.log.Warn("there is no certificate yet: TLS handshakes fail until the ACME server has issued one", "key", "server.acme.domains", "name", domain, "directory", s.cfg.Directory)
	}
	if err := magic.ManageAsync(ctx, s.cfg.Domains); err != nil {
		s.log.Warn("certificates are not managed", "key", "server.acme", "error", err)
	}
	<-ctx.Done()
	certmagic.CleanUpOwnLocks(context.WithoutCancel(ctx), log)
}

// absent returns the names without a certificate.
func (s *Source) absent() []string {
	names := slices.Clone(s.cfg.Domains)
	for _, pair := range s.Pairs() {
		names = slices.DeleteFunc(names, func(name string) bool { return name == pair.Domain })
	}
	return names
}

// manage returns the client of the ACME server, and its port for HTTP-01.
func (s *Source) manage(cache *certmagic.Cache, log *zap.Logger) (*certmagic.Config, *challengePort) {
	host, port := "", 0
	if tcp, ok := s.address.(*net.TCPAddr); ok {
		port = tcp.Port
		if !tcp.IP.IsUnspecified() {
			host = tcp.IP.String()
		}
	}
	challenges := &challengePort{address: net.JoinHostPort(host, strconv.Itoa(s.cfg.HTTPPort)), domains: s.cfg.Domains, log: s.log}
	magic := certmagic.New(cache, certmagic.Config{
		Storage: storage{s.files, challenges}, Logger: log, OnEvent: s.event,
		// The answers of a responder are not used: package edge reads only the files.
		OCSP: certmagic.OCSPConfig{DisableStapling: true},
	})
	challenges.issuer = certmagic.NewACMEIssuer(magic, certmagic.ACMEIssuer{
		CA: s.cfg.Directory, Email: s.cfg.Email, Agreed: true, ExternalAccount: s.eab, TrustedRoots: s.roots,
		// certmagic opens these ports if nobody listens there. The proxy itself listens at both:
		// challengePort and server.listen.
		ListenHost: host, AltHTTPPort: s.cfg.HTTPPort, AltTLSALPNPort: port,
		DisableHTTPChallenge: s.cfg.HTTPPort == 0, Logger: log,
	})
	magic.Issuers = []certmagic.Issuer{challenges.issuer}
	return magic, challenges
}

// event logs the result of an order.
func (s *Source) event(ctx context.Context, event string, data map[string]any) error {
	switch event {
	case "cert_obtained":
		s.log.Info("the ACME server has issued a certificate", "name", data["identifier"], "renewal", data["renewal"], "directory", s.cfg.Directory)
	case "cert_failed":
		if ctx.Err() != nil { // the process ends
			return nil
		}
		text := "no certificate from the ACME server; the proxy tries again after a minute, later after up to 6 hours"
		if data["renewal"] == true {
			text = "no renewed certificate from the ACME server, the old one stays; the proxy tries again after a minute, later after up to 6 hours"
		}
		s.log.Warn(text, "key", "server.acme", "name", data["identifier"], "directory", s.cfg.Directory, "error", data["error"])
	}
	return nil
}
