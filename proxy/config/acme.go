package config

import (
	"net"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// LetsEncrypt is the default of ACME.Directory.
const LetsEncrypt = "https://acme-v02.api.letsencrypt.org/directory"

// ACME obtains certificates from an ACME server (RFC 8555) and renews them.
type ACME struct {
	// Domains are the names, one certificate each, and never wildcards. Clients that name no
	// server, or another one, get the certificate of the first. Default empty: off.
	Domains []string `toml:"domains"`
	// Storage is the directory of the account, the certificates, the keys and the running
	// challenges. The proxy creates it. Processes and hosts that serve the same names share
	// one: only one process at a time orders a certificate, and each answers the challenges of
	// all. Default "": required with Domains.
	Storage string `toml:"storage"`
	// Email is the address of the account, for messages of the ACME server. Default "": none.
	Email string `toml:"email"`
	// Directory is the https URL of the ACME server's directory. Default: Let's Encrypt.
	// Domains accepts the server's terms of service.
	Directory string `toml:"directory"`
	// DirectoryCA is a file of CA certificates (PEM) for the connection to Directory. Default
	// "": the CAs of the system.
	DirectoryCA string `toml:"directory_ca"`
	// HTTPPort is the TCP port for the challenge HTTP-01, on the host of server.listen. It is
	// open only while the ACME server checks a name. The ACME server calls port 80. Default 0:
	// only TLS-ALPN-01, which the ACME server checks at port 443.
	HTTPPort int `toml:"http_port"`
	// EABKeyID is the key id of an external account binding. Default "": none; set together
	// with EABKeyFile.
	EABKeyID string `toml:"eab_key_id"`
	// EABKeyFile is the file of the HMAC key of the external account binding, base64url.
	// Default "": none; set together with EABKeyID.
	EABKeyFile string `toml:"eab_key_file"`
}

// Enabled reports whether an ACME server gives the certificates.
func (a *ACME) Enabled() bool { return len(a.Domains) > 0 }

// Complete reports whether the table has the keys that need each other.
func (a *ACME) Complete() bool {
	return a.Enabled() && a.Storage != "" && (a.EABKeyID != "") == (a.EABKeyFile != "")
}

// UsesTLS reports whether the public side uses TLS.
func (s *Server) UsesTLS() bool { return s.TLS.Enabled() || s.ACME.Enabled() }

// domainName matches a DNS name in its ASCII form, in lower case.
var domainName = regexp.MustCompile(`^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// acme checks [server.acme].
func (k *checker) acme() {
	s := k.config.Server
	a := s.ACME
	for i, name := range a.Domains {
		k.domain(indexKey("server.acme.domains", i), name, a.Directory)
		if slices.Contains(a.Domains[:i], name) {
			k.add(indexKey("server.acme.domains", i), "%q is there twice", name)
		}
	}
	if a.Enabled() && s.TLS.Enabled() {
		k.add("server.acme.domains", "must not be set together with server.tls.cert, server.tls.key and server.tls.self_signed")
	}
	if a.Enabled() && a.Storage == "" {
		k.add("server.acme.storage", "is required with server.acme.domains: the directory of the account and the certificates, such as /var/lib/pdproxy/acme")
	}
	if u, err := url.Parse(a.Directory); err != nil || u.Scheme != "https" || u.Host == "" {
		k.add("server.acme.directory", "must be an https URL, found %q", a.Directory)
	}
	k.within("server.acme.http_port", a.HTTPPort, 0, 65535)
	if _, port, err := net.SplitHostPort(s.Listen); err == nil && a.HTTPPort != 0 && port == strconv.Itoa(a.HTTPPort) {
		k.add("server.acme.http_port", "is also the port of server.listen")
	}
	k.together("server.acme.eab_key_id", a.EABKeyID, "server.acme.eab_key_file", a.EABKeyFile)
}

// domain checks one name of server.acme.domains.
func (k *checker) domain(at, name, directory string) {
	switch {
	case strings.HasPrefix(name, "*."):
		k.add(at, "%q is a wildcard, which needs the challenge DNS-01: obtain it with another client and use server.tls.cert and server.tls.key", name)
	case net.ParseIP(name) != nil:
		k.add(at, "%q is an IP address: only names are supported", name)
	case len(name) > 253 || !domainName.MatchString(name):
		k.add(at, "must be a DNS name in lower case (a name with other letters in its form xn--...), found %q", name)
	case directory == LetsEncrypt && !strings.Contains(name, "."):
		k.add(at, "%q is no public name, and the default of server.acme.directory gives certificates only for public names", name)
	}
}

// warnACME warns if the ACME server may not reach the proxy.
func (k *checker) warnACME() {
	s := k.config.Server
	_, port, err := net.SplitHostPort(s.Listen)
	if !s.ACME.Enabled() || s.ACME.HTTPPort != 0 || err != nil || port == "443" {
		return
	}
	k.add("server.acme.domains", "the ACME server checks each name at port 443: without server.acme.http_port, port 443 of the names must lead to %s", s.Listen)
}
