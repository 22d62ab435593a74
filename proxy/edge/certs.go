package edge

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"log/slog"
	"math/big"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge/acme"
	"github.com/pdproxy/pdproxy/proxy/pemfile"
)

// certCheck is the time between two checks of the certificate files.
const certCheck = 2 * time.Second

// Certs holds the TLS configuration of an address and replaces it when the files
// change. A handshake uses the configuration that is in force when it begins. Safe for
// concurrent use.
type Certs struct {
	key     string // of cfg in the configuration
	cfg     config.TLS
	own     []tls.Certificate // the self-signed certificate, made once; empty if files are used
	acme    *acme.Source      // writes the files; nil: cfg names them
	log     *slog.Logger
	current atomic.Pointer[tls.Config]
	mu      sync.Mutex
	sum     [sha256.Size]byte // of the loaded files; guarded by mu
}

// LoadCerts reads the files that cfg names, or makes a self-signed certificate. key is the
// configuration key of cfg. Errors about files are of type pemfile.Errors and name the keys
// below it. Run logs to log.
func LoadCerts(key string, cfg config.TLS, log *slog.Logger) (*Certs, error) {
	c := &Certs{key: key, cfg: cfg, log: log}
	if cfg.SelfSigned {
		cert, err := selfSigned()
		if err != nil {
			return nil, err
		}
		c.own = []tls.Certificate{cert}
	}
	if err := c.Reload(); err != nil {
		return nil, err
	}
	return c, nil
}

// ObtainCerts is LoadCerts for a server whose certificates come from an ACME server. Run orders
// and renews them. Their number may be 0 at first.
func ObtainCerts(cfg *config.Server, log *slog.Logger) (*Certs, error) {
	source, err := acme.New(cfg.ACME, log)
	if err != nil {
		return nil, err
	}
	c := &Certs{key: "server.acme", cfg: cfg.TLS, acme: source, log: log}
	return c, c.Reload()
}

// Reload reads the files again. After an error the old certificates stay in use. The error
// is of type pemfile.Errors.
func (c *Certs) Reload() error {
	_, err := c.refresh()
	return err
}

// refresh loads the files and reports whether their content has changed.
func (c *Certs) refresh() (changed bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	conf, sum, err := c.load()
	if err != nil || c.current.Load() != nil && sum == c.sum {
		return false, err
	}
	c.current.Store(conf)
	c.sum = sum
	return true, nil
}

// Run checks the files every two seconds and loads them again when their content has
// changed. It also obtains certificates from the ACME server, if there is one. It returns when
// ctx ends.
func (c *Certs) Run(ctx context.Context) {
	if c.acme != nil {
		var obtaining sync.WaitGroup
		defer obtaining.Wait()
		obtaining.Go(func() { c.acme.Run(ctx) })
	}
	tick := time.NewTicker(certCheck)
	defer tick.Stop()
	failures := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		changed, err := c.refresh()
		if err == nil {
			failures = 0
		} else if failures++; failures == 2 { // at the first failure a file may be half written
			c.log.Warn("certificate files cannot be used, the old ones stay", "key", c.key, "error", err)
		}
		if changed {
			c.log.Info("certificate files changed, loaded again", "key", c.key)
		}
	}
}

// Config returns the configuration of one listener. It reads the current certificates for
// each handshake.
func (c *Certs) Config(protos ...string) *tls.Config {
	type derived struct{ from, conf *tls.Config }
	var last atomic.Pointer[derived] // reusing the configuration keeps session tickets valid
	challenged := c.acme != nil && slices.Contains(protos, "http/1.1")
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: protos,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			if challenged {
				if conf := c.acme.Challenge(hello); conf != nil {
					return conf, nil
				}
			}
			from := c.current.Load()
			if d := last.Load(); d != nil && d.from == from {
				return d.conf, nil
			}
			conf := from.Clone()
			conf.NextProtos = protos
			last.Store(&derived{from, conf})
			return conf, nil
		},
	}
}

// load reads the files. The error is of type pemfile.Errors.
func (c *Certs) load() (*tls.Config, [sha256.Size]byte, error) {
	conf := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: c.own}
	var r pemfile.Reader
	switch {
	case c.acme != nil:
		for _, p := range c.acme.Pairs() {
			conf.Certificates = append(conf.Certificates, r.Pair(pemfile.File{Key: "server.acme.storage", Path: p.Cert}, pemfile.File{Key: "server.acme.storage", Path: p.Key}))
		}
	case !c.cfg.SelfSigned:
		conf.Certificates = []tls.Certificate{r.Pair(pemfile.File{Key: c.key + ".cert", Path: c.cfg.Cert}, pemfile.File{Key: c.key + ".key", Path: c.cfg.Key})}
	}
	if c.cfg.ClientCA != "" {
		at := c.key
		if c.acme != nil {
			at = "server.tls"
		}
		conf.ClientCAs = r.Pool(pemfile.File{Key: at + ".client_ca", Path: c.cfg.ClientCA})
		conf.ClientAuth = tls.RequireAndVerifyClientCert
	}
	sum, err := r.Sum()
	return conf, sum, err
}

// selfSigned makes a certificate for localhost that is valid for a year.
func selfSigned() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return tls.Certificate{}, err
	}
	host, _ := os.Hostname()
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "pdproxy self-signed"},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().AddDate(1, 0, 0),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:     []string{"localhost", host},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
