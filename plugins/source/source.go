// Package source reads a module from a file, over http(s), from a registry of OCI
// artifacts or from the program itself. It limits the size, and checks digest and signature. It also notices when the content of a file changes.
//
// The decisions behind this package are in docs/design/plugins.md.
package source

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"
)

// MaxSize is the largest module that is read, in bytes. An ordinary Go guest
// has 2 to 4 MiB. host.Load takes no larger one.
const MaxSize = 32 << 20

// downloadTimeout is the limit of a whole download, pushTimeout of a whole upload.
const downloadTimeout, pushTimeout = 30 * time.Second, 5 * time.Minute

// ErrDigest reports that the module's digest differs from the pinned one.
var ErrDigest = errors.New("the module does not have the pinned sha256")

// Source names the place of a module. Two equal values name the same place and
// the same pin.
type Source struct {
	// Location is a path, an http or https URL, or oci://REGISTRY/REPOSITORY with
	// :TAG or @sha256:DIGEST.
	Location string
	// Module is the module itself, if it is built into the program. Location is then only its
	// name.
	Module string
	// SHA256 is the digest that the module must have, 64 hex digits; "" allows
	// any.
	SHA256 string
	// PublicKey is the key of minisign that must have signed the module; "" allows
	// any module.
	PublicKey string
	// Signature is the path or URL of the signature. "" means Location with the
	// suffix .minisig, or the signature in the artifact of a registry.
	Signature string
}

// Content is a module that was read.
type Content struct {
	Wasm   []byte
	SHA256 string // of Wasm, 64 lower-case hex digits
}

// Remote reports whether the module comes over the network. Such a module is
// read only on request.
func (s Source) Remote() bool {
	return strings.HasPrefix(s.Location, "http://") || strings.HasPrefix(s.Location, "https://") || s.inRegistry()
}

// inRegistry reports whether the module is an artifact in a registry.
func (s Source) inRegistry() bool { return strings.HasPrefix(s.Location, ociPrefix) }

// Read reads the module and checks its digest and signature. cache is a private folder
// in which Read keeps modules of registries by their digest, "" for none. The error
// never contains an http(s) URL, because such a URL may hold a secret.
func (s Source) Read(ctx context.Context, cache string) (Content, error) {
	var wasm, signature []byte
	var err error
	switch {
	case s.Module != "":
		wasm = []byte(s.Module)
	case s.inRegistry():
		wasm, signature, err = s.pull(ctx, cache)
	default:
		wasm, err = s.bytes(ctx, MaxSize)
	}
	if err != nil {
		return Content{}, fmt.Errorf("read module: %w", err)
	}
	digest := sha256.Sum256(wasm)
	c := Content{Wasm: wasm, SHA256: hex.EncodeToString(digest[:])}
	if s.SHA256 != "" && !strings.EqualFold(s.SHA256, c.SHA256) {
		return Content{}, fmt.Errorf("read module: %w: it has %s", ErrDigest, c.SHA256)
	}
	if err := s.verify(ctx, wasm, signature); err != nil {
		return Content{}, fmt.Errorf("read module: %w", err)
	}
	return c, nil
}

// bytes reads at most limit bytes of a file or over http(s).
func (s Source) bytes(ctx context.Context, limit int64) ([]byte, error) {
	if s.Remote() {
		return s.download(ctx, limit)
	}
	f, err := os.Open(s.Location)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() { // opening a pipe could block forever
		return nil, fmt.Errorf("%s is not a regular file", s.Location)
	}
	return bounded(f, info.Size(), limit)
}

// download reads the module over http(s). It uses a separate client without keep-alive,
// so that no connection remains.
func (s Source) download(ctx context.Context, limit int64) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, downloadTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.Location, nil)
	if err != nil {
		return nil, errors.New("invalid URL")
	}
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, DisableKeepAlives: true, ForceAttemptHTTP2: true}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	var failed *url.Error
	switch {
	case errors.As(err, &failed): // the wrapped error, which has no URL
		return nil, fmt.Errorf("download: %w", failed.Err)
	case err != nil:
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("download: status %d", resp.StatusCode)
	}
	return bounded(resp.Body, resp.ContentLength, limit)
}

// bounded reads all of r, up to limit. size is the size that r announces, -1
// if it announces none.
func bounded(r io.Reader, size, limit int64) ([]byte, error) {
	tooLarge := fmt.Errorf("larger than %d bytes", limit)
	if size > limit {
		return nil, tooLarge
	}
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	switch {
	case err != nil:
		return nil, err
	case int64(len(data)) > limit:
		return nil, tooLarge
	case len(data) == 0:
		return nil, errors.New("empty")
	}
	return data, nil
}
