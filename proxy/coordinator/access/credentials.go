// Package access secures the connections between workers and coordinators of
// different hosts: TLS 1.3 on both sides, and on the coordinator's side a Gate that
// sorts, limits and refuses what comes to an address that strangers can reach.
// Connections over Unix sockets stay as they are.
package access

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"slices"
	"sync"
	"time"
)

// Protocol is the ALPN name of the link between a worker and a coordinator.
const Protocol = "pdproxy-link"

// lookEvery is how old the certificates in memory may be before a handshake reads
// the files again.
const lookEvery = 2 * time.Second

// Files are the PEM files of fleet.tls: all three are set, or none.
type Files struct {
	Cert, Key string // this host's certificate, for both sides of the link
	CA        string // signs the certificates of all hosts
}

// Credentials are the certificates of one process. Safe for concurrent use.
type Credentials struct {
	files  Files
	bearer bool // HTTPS callers show a token, or need none
	log    *slog.Logger

	mu      sync.Mutex
	now     *material // guarded by mu
	looked  time.Time // when the files were read last; guarded by mu
	failing bool      // the last read failed; guarded by mu
}

// material is what a handshake uses.
type material struct {
	cert tls.Certificate
	ca   *x509.CertPool    // nil: the peer's certificate proves nothing, its token does
	sum  [sha256.Size]byte // of the files
}

// Options is what Credentials stand on.
type Options struct {
	Files Files // zero: the process makes a certificate that nobody is asked to trust
	// Bearer says that callers of the HTTP routes prove themselves by a token, or need
	// no proof. Otherwise HTTPS callers need a certificate of Files.CA.
	Bearer bool
	Log    *slog.Logger // nil: nothing is logged
}

// NewCredentials reads the files, or makes a certificate of the process's own. Later
// handshakes use the content that the files have then.
func NewCredentials(o Options) (*Credentials, error) {
	c := &Credentials{files: o.Files, bearer: o.Bearer, log: o.Log}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	var err error
	if o.Files == (Files{}) {
		c.now, err = ephemeral()
	} else {
		c.now, err = read(o.Files)
	}
	c.looked = time.Now()
	return c, err
}

// Proven reports whether both sides of a link prove themselves by certificates.
func (c *Credentials) Proven() bool { return c.files != (Files{}) }

// current returns what a handshake uses that begins now. Files that cannot be used
// leave the former content in use.
func (c *Credentials) current() *material {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.Proven() || time.Since(c.looked) < lookEvery {
		return c.now
	}
	c.looked = time.Now()
	m, err := read(c.files)
	switch {
	case err != nil && !c.failing:
		c.log.Warn("the certificates of fleet.tls cannot be read; the former ones stay in use", "error", err)
	case err == nil && m.sum != c.now.sum:
		c.log.Info("the certificates of fleet.tls have changed")
		c.now = m
	}
	c.failing = err != nil
	return c.now
}

// read reads certificate, key and CA.
func read(f Files) (*material, error) {
	var all [3][]byte
	for i, path := range []string{f.Cert, f.Key, f.CA} {
		var err error
		if all[i], err = os.ReadFile(path); err != nil {
			return nil, err
		}
	}
	m := &material{ca: x509.NewCertPool(), sum: sha256.Sum256(slices.Concat(all[:]...))}
	var err error
	if m.cert, err = tls.X509KeyPair(all[0], all[1]); err != nil {
		return nil, fmt.Errorf("%s, %s: %w", f.Cert, f.Key, err)
	}
	if !m.ca.AppendCertsFromPEM(all[2]) {
		return nil, fmt.Errorf("%s: no certificate in the file", f.CA)
	}
	return m, nil
}

// ephemeral makes a certificate for encryption alone. It depends on no secret but its
// own random key, so that a stranger who sees it learns nothing.
func ephemeral() (*material, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "pdproxy"},
		NotBefore: now.Add(-24 * time.Hour), NotAfter: now.AddDate(100, 0, 0), // nobody looks at it
		KeyUsage: x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	return &material{cert: tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}}, nil
}

var errNoCertificate = errors.New("HTTPS needs fleet.tls.cert")

// Server is the TLS configuration of a coordinator: for the link, and for HTTPS where
// there are certificates of Files. There is no resumption and no early data.
func (c *Credentials) Server() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, MaxVersion: tls.VersionTLS13,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			m := c.current()
			conf := &tls.Config{
				MinVersion: tls.VersionTLS13, MaxVersion: tls.VersionTLS13, SessionTicketsDisabled: true,
				DynamicRecordSizingDisabled: true, Certificates: []tls.Certificate{m.cert},
			}
			isLink := slices.Contains(hello.SupportedProtos, Protocol)
			switch {
			case isLink:
				conf.NextProtos = []string{Protocol}
			case m.ca == nil:
				return nil, errNoCertificate
			default:
				conf.NextProtos = []string{"http/1.1"}
			}
			if m.ca != nil && (isLink || !c.bearer) {
				conf.ClientCAs, conf.ClientAuth = m.ca, tls.RequireAndVerifyClientCert
			}
			return conf, nil
		},
	}
}

// Client is the TLS configuration of a worker, or a standby, that dials host. Without
// Files any certificate is taken: the token proves the coordinator, bound to the keys
// of this one connection.
func (c *Credentials) Client(host string) *tls.Config {
	m := c.current()
	conf := &tls.Config{
		MinVersion: tls.VersionTLS13, MaxVersion: tls.VersionTLS13, DynamicRecordSizingDisabled: true,
		NextProtos: []string{Protocol}, ServerName: host,
		VerifyConnection: func(s tls.ConnectionState) error {
			if s.NegotiatedProtocol != Protocol {
				return errors.New("the peer is no coordinator")
			}
			return nil
		},
	}
	if m.ca != nil {
		conf.RootCAs, conf.Certificates = m.ca, []tls.Certificate{m.cert}
	} else {
		conf.InsecureSkipVerify = true
	}
	return conf
}
