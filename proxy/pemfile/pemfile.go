// Package pemfile reads certificates and private keys from PEM files. Its errors name the
// file and the configuration key that names the file. They never contain the content of a
// file.
//
// The decisions behind this package are in docs/design/edge.md.
package pemfile

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"hash"
	"os"
	"strings"
)

// File is a file that a configuration key names.
type File struct{ Key, Path string }

// Error reports that a file cannot be used.
type Error struct {
	Key string // that names the file
	Err error
}

// Error implements error.
func (e *Error) Error() string { return e.Key + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Errors are the errors of all files of a Reader.
type Errors []*Error

// Error implements error.
func (es Errors) Error() string {
	texts := make([]string, len(es))
	for i, e := range es {
		texts[i] = e.Error()
	}
	return strings.Join(texts, "; ")
}

// Reader reads files and collects their errors. The zero value is ready. Not safe for
// concurrent use.
type Reader struct {
	errs Errors
	sum  hash.Hash // of the content; nil: no file was read
}

// Pair reads a certificate chain and its private key.
func (r *Reader) Pair(cert, key File) tls.Certificate {
	chain, hasChain := r.read(cert)
	hasChain = hasChain && r.checkChain(cert, chain)
	secret, hasSecret := r.read(key)
	if hasSecret && firstBlock(secret, "PRIVATE KEY") == nil {
		hasSecret = false
		r.fail(key, fmt.Errorf("no private key (PEM) in %s", key.Path))
	}
	if !hasChain || !hasSecret {
		return tls.Certificate{}
	}
	pair, err := tls.X509KeyPair(chain, secret)
	if err != nil {
		r.fail(key, fmt.Errorf("%s is not the private key of %s, which %s names: %w", key.Path, cert.Path, cert.Key, err))
	}
	return pair
}

// checkChain reports whether text begins with a certificate that can be parsed.
func (r *Reader) checkChain(cert File, text []byte) bool {
	block := firstBlock(text, "CERTIFICATE")
	if block == nil {
		r.fail(cert, noCertificate(cert))
		return false
	}
	if _, err := x509.ParseCertificate(block.Bytes); err != nil {
		r.fail(cert, fmt.Errorf("%s: %w", cert.Path, err))
		return false
	}
	return true
}

// Pool reads certificates of CAs.
func (r *Reader) Pool(ca File) *x509.CertPool {
	pool := x509.NewCertPool()
	if text, ok := r.read(ca); ok && !pool.AppendCertsFromPEM(text) {
		r.fail(ca, noCertificate(ca))
	}
	return pool
}

// Sum returns the hash of the content of all files, or the error Errors.
func (r *Reader) Sum() (sum [sha256.Size]byte, err error) {
	if len(r.errs) > 0 {
		return sum, r.errs
	}
	if r.sum != nil {
		r.sum.Sum(sum[:0])
	}
	return sum, nil
}

func (r *Reader) read(f File) (text []byte, ok bool) {
	text, err := os.ReadFile(f.Path)
	if err != nil {
		r.fail(f, err)
		return nil, false
	}
	if r.sum == nil {
		r.sum = sha256.New()
	}
	fmt.Fprintf(r.sum, "%d ", len(text)) // a hash returns no error
	r.sum.Write(text)
	return text, true
}

func (r *Reader) fail(f File, err error) { r.errs = append(r.errs, &Error{f.Key, err}) }

func noCertificate(f File) error { return errors.New("no certificate (PEM) in " + f.Path) }

// firstBlock returns the first PEM block of text whose type has that end, nil for none.
func firstBlock(text []byte, end string) *pem.Block {
	block, rest := pem.Decode(text)
	for block != nil && !strings.HasSuffix(block.Type, end) {
		block, rest = pem.Decode(rest)
	}
	return block
}
