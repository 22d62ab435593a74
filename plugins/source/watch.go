package source

import (
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"io"
	"os"
)

// Watch notices that a file holds other bytes than those that were loaded. It
// looks at the bytes, for a file may be replaced by one of the same size and
// time. For use by one goroutine.
type Watch struct {
	path   string
	known  string // digest of what was loaded, or tried
	before string // digest at the last poll, "" for a file that could not be read
	hash   hash.Hash
	buffer []byte
}

// NewWatch returns a watch over the file of s, which holds what has the digest
// loaded. A remote source never changes.
func NewWatch(s Source, loaded string) *Watch {
	w := &Watch{known: loaded, hash: sha256.New()}
	if !s.Remote() {
		w.path = s.Location
	}
	return w
}

// Changed reads the file and reports whether it holds something else than what
// is known, and has held it at the poll before too: a file that is being
// written is left alone until it rests. What it reports is known from then on.
// A file that cannot be read has not changed.
func (w *Watch) Changed() bool {
	if w.path == "" {
		return false
	}
	digest := w.digest()
	rests := digest == w.before
	w.before = digest
	if !rests || digest == "" || digest == w.known {
		return false
	}
	w.known = digest
	return true
}

// digest is the SHA-256 of the file, "" if it cannot be read or is no module
// that Read would take.
func (w *Watch) digest() string {
	f, err := os.Open(w.path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() || info.Size() > MaxSize || info.Size() == 0 {
		return ""
	}
	if w.buffer == nil {
		w.buffer = make([]byte, 64<<10)
	}
	w.hash.Reset()
	if _, err := io.CopyBuffer(struct{ io.Writer }{w.hash}, struct{ io.Reader }{f}, w.buffer); err != nil {
		return ""
	}
	return hex.EncodeToString(w.hash.Sum(nil))
}
