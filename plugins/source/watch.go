package source

import (
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"io"
	"os"
)

// Watch notices that a file holds other bytes than those that were loaded. It
// compares the bytes, because a new file may have the same size and time. A new
// signature file counts as new content, because it can arrive after the module. Only
// one goroutine may use it.
type Watch struct {
	path   string
	signed string // path of the signature, "" for none
	known  string // digest of the content that was loaded or tried
	before string // digest at the last poll, "" for a file that could not be read
	hash   hash.Hash
	buffer []byte
}

// NewWatch returns a watch on the file of s. loaded is the digest of the
// content that was loaded. A source that is not a file never changes.
func NewWatch(s Source, loaded string) *Watch {
	w := &Watch{hash: sha256.New()}
	if !s.Remote() && s.Module == "" {
		w.path, w.signed = s.Location, s.signatureFile()
	}
	w.known = loaded + w.signature()
	return w
}

// Changed reads the file. It reports whether the content differs from the known
// one and is the same as at the previous poll, so that a file that is still
// being written is not loaded. A reported content counts as known afterwards. A
// file that cannot be read has not changed.
func (w *Watch) Changed() bool {
	if w.path == "" {
		return false
	}
	digest := w.digest(w.path)
	if digest != "" {
		digest += w.signature()
	}
	rests := digest == w.before
	w.before = digest
	if !rests || digest == "" || digest == w.known {
		return false
	}
	w.known = digest
	return true
}

// signature returns the digest of the signature file, "" for none.
func (w *Watch) signature() string {
	if w.signed == "" {
		return ""
	}
	return w.digest(w.signed)
}

// digest returns the SHA-256 of the file, "" if the file cannot be read or Read
// would reject it.
func (w *Watch) digest(path string) string {
	f, err := os.Open(path)
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
