// Package access secures the connections between workers and coordinators of
// different hosts. Both sides use TLS 1.3. On the coordinator's side a Gate limits
// and refuses connections, because any host can connect to the address. The Gate also
// separates workers from HTTP callers. Connections over Unix sockets do not use TLS.
//
// The decisions behind this package are in docs/design/fleet.md.
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
	"log/slog"
	"math/big"
	"slices"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/pemfile"
)

// Protocol is the ALPN name of the link between a worker and a coordinator.
const Protocol = "pdproxy-link"

// lookEvery is the largest age of the certificates in memory. A later handshake reads
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
	bearer bool // HTTPS callers need a token or nothing, but no certificate
	log    *slog.Logger

	mu      sync.Mutex
	now     *material // guarded by mu
	looked  time.Time // when the files were read last; guarded by mu
	failing bool      // the last read failed; guarded by mu
}

// material holds the certificates that a handshake uses.
type material struct {
	cert tls.Certificate
	ca   *x509.CertPool    // nil: the token proves the peer's identity, not its certificate
	sum  [sha256.Size]byte // hash of the files
}

// Options holds the settings of Credentials.
type Options struct {
	Files Files // zero: the process makes its own certificate, which peers do not verify
	// Bearer: callers of the HTTP routes send a token or need no authentication.
	// Otherwise HTTPS callers need a certificate of Files.CA.
	Bearer bool
	Log    *slog.Logger // nil: nothing is logged
}

// NewCredentials reads the files. Without files it makes a certificate of the process's
// own. A later handshake uses the content that the files have at that time. An error about
// files is of type pemfile.Errors.
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

// Proven reports whether both sides of a link authenticate with certificates.
func (c *Credentials) Proven() bool { return c.files != (Files{}) }

// current returns the certificates for a handshake that begins now. If the files cannot
// be used, current returns the former content.
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
		c.log.Warn("the certificates of fleet.tls cannot be read; the former certificates stay in use", "error", err)
	case err == nil && m.sum != c.now.sum:
		c.log.Info("the certificates of fleet.tls have changed")
		c.now = m
	}
	c.failing = err != nil
	return c.now
}

// read reads certificate, key and CA. The error is of type pemfile.Errors.
func read(f Files) (*material, error) {
	var r pemfile.Reader
	m := &material{
		cert: r.Pair(pemfile.File{Key: "fleet.tls.cert", Path: f.Cert}, pemfile.File{Key: "fleet.tls.key", Path: f.Key}),
		ca:   r.Pool(pemfile.File{Key: "fleet.tls.ca", Path: f.CA}),
	}
	var err error
	m.sum, err = r.Sum()
	return m, err
}

// ephemeral makes a certificate for encryption alone. The certificate depends only on
// its own random key, so it reveals no secret to a peer.
func ephemeral() (*material, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "pdproxy"},
		NotBefore: now.Add(-24 * time.Hour), NotAfter: now.AddDate(100, 0, 0), // no peer checks the dates
		KeyUsage: x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	return &material{cert: tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}}, nil
}

var errNoCertificate = errors.New("HTTPS needs fleet.tls.cert")

// Server returns the TLS configuration of a coordinator, for the link and for HTTPS.
// HTTPS needs the certificates of Files. TLS uses no resumption and no early data.
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

// Client returns the TLS configuration of a worker, or a standby, that dials host.
// Without Files the client accepts any certificate. Then the token authenticates the
// coordinator, with a proof that is bound to the keys of this connection.
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
