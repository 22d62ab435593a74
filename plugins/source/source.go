// Package source reads a module from a file or over http(s), limits its size
// and checks its digest. It also notices when the content of a file changes.
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
// has 2 to 4 MiB.
const MaxSize = 64 << 20

// downloadTimeout is the limit of a whole download over http(s).
const downloadTimeout = 30 * time.Second

// ErrDigest reports that the module's digest differs from the pinned one.
var ErrDigest = errors.New("the module does not have the pinned sha256")

// Source names the place of a module. Two equal values name the same place and
// the same pin.
type Source struct {
	// Location is a path, or an http or https URL.
	Location string
	// SHA256 is the digest that the module must have, 64 hex digits; "" allows
	// any.
	SHA256 string
}

// Content is a module that was read.
type Content struct {
	Wasm   []byte
	SHA256 string // of Wasm, 64 lower-case hex digits
}

// Remote reports whether the module comes over the network. Such a module is
// read only on request and never watched.
func (s Source) Remote() bool {
	return strings.HasPrefix(s.Location, "http://") || strings.HasPrefix(s.Location, "https://")
}

// Read reads the module and checks its digest. The error never contains a URL,
// because a URL may hold a secret.
func (s Source) Read(ctx context.Context) (Content, error) {
	wasm, err := s.bytes(ctx)
	if err != nil {
		return Content{}, fmt.Errorf("read module: %w", err)
	}
	digest := sha256.Sum256(wasm)
	c := Content{Wasm: wasm, SHA256: hex.EncodeToString(digest[:])}
	if s.SHA256 != "" && !strings.EqualFold(s.SHA256, c.SHA256) {
		return Content{}, fmt.Errorf("read module: %w: it has %s", ErrDigest, c.SHA256)
	}
	return c, nil
}

func (s Source) bytes(ctx context.Context) ([]byte, error) {
	if s.Remote() {
		return s.download(ctx)
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
	return bounded(f, info.Size())
}

// download reads the module over http(s). It uses a separate client without keep-alive,
// so that no connection remains.
func (s Source) download(ctx context.Context) ([]byte, error) {
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
	return bounded(resp.Body, resp.ContentLength)
}

// bounded reads all of r, up to MaxSize. size is the size that r announces, -1
// if it announces none.
func bounded(r io.Reader, size int64) ([]byte, error) {
	tooLarge := fmt.Errorf("larger than %d bytes", MaxSize)
	if size > MaxSize {
		return nil, tooLarge
	}
	data, err := io.ReadAll(io.LimitReader(r, MaxSize+1))
	switch {
	case err != nil:
		return nil, err
	case len(data) > MaxSize:
		return nil, tooLarge
	case len(data) == 0:
		return nil, errors.New("empty")
	}
	return data, nil
}
