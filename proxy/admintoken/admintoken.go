// Package admintoken keeps the generated token of an admin address in a file that only
// the user can read, in the private folder of the user's processes. Commands of the
// same user find it there.
//
// Every process that serves with a token holds a shared lock on its file. A successor
// that takes over from another process therefore uses the same token. The file of a
// crashed process is recognized as stale: another process may listen at the address
// now, and must not receive the token.
//
// The decisions behind this package are in docs/design/edge.md.
package admintoken

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

const (
	// tokenBytes is the number of random bytes of a token.
	tokenBytes = 32
	// prefix and suffix are parts of the file names.
	prefix, suffix = "admin-", ".token"
	// attempts is how often a step is repeated after interference by another process.
	attempts = 20
	// pause is the time between two attempts.
	pause = 5 * time.Millisecond
)

// errDisturbed reports that another process has changed the file in the meantime.
var errDisturbed = errors.New("other processes change the file again and again")

// Token is the admin token of this process. Its methods are safe for concurrent use.
type Token struct {
	text, name string

	mu   sync.Mutex
	file *os.File // locked; nil: there is no file; guarded by mu
}

// Make returns the token of an admin address, host:port. If another process serves the
// address, Make returns the token of that process. Otherwise Make generates a token and
// stores it in a new file. If Make returns an error, the token is usable but no file
// contains it. The caller closes the token.
func Make(address string) (*Token, error) {
	random := make([]byte, tokenBytes)
	rand.Read(random) // never fails
	t := &Token{text: base64.RawURLEncoding.EncodeToString(random), name: fileName(address)}
	d, err := privatedir.Open(privatedir.Runtime())
	if err != nil {
		return t, err
	}
	defer d.Close()
	sweep(d)
	for range attempts {
		if err = t.join(d); !errors.Is(err, errDisturbed) {
			break
		}
		time.Sleep(pause)
	}
	return t, err
}

// Text is the token: 43 letters, digits, - and _.
func (t *Token) Text() string { return t.text }

// join reads the token of the file if a process serves with it, and otherwise creates a
// new file.
func (t *Token) join(d *privatedir.Dir) error {
	f, text, err := open(d, t.name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = d.CreateFile(t.name, t.line())
	case err != nil: // the file contains no usable token
		err = d.WriteFileNoSync(t.name, t.line())
	default:
		defer f.Close()
		if free(f) { // the lock keeps others from joining until the file is replaced
			err = d.WriteFileNoSync(t.name, t.line())
			break
		}
		t.text = text
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return t.hold(d)
}

// hold opens and locks the file if it contains the token.
func (t *Token) hold(d *privatedir.Dir) error {
	f, text, err := open(d, t.name)
	if err != nil {
		return errors.Join(errDisturbed, err)
	}
	if text != t.text || unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) != nil || !current(d, t.name, f) {
		f.Close()
		return errDisturbed
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.file != nil {
		t.file.Close()
	}
	t.file = f
	return nil
}

// Restore creates the file again if it was removed, for example by a cleaner of
// temporary folders. A file with another token stays.
func (t *Token) Restore() error {
	d, err := privatedir.Open(privatedir.Runtime())
	if err != nil {
		return err
	}
	defer d.Close()
	t.mu.Lock()
	there := t.file != nil && current(d, t.name, t.file)
	t.mu.Unlock()
	if there {
		return nil
	}
	if err := d.CreateFile(t.name, t.line()); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return t.hold(d)
}

// Close removes the file, unless other processes serve with the token. nil is allowed.
func (t *Token) Close() error {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.file == nil {
		return nil
	}
	defer func() {
		t.file.Close()
		t.file = nil
	}()
	d, err := privatedir.OpenExisting(privatedir.Runtime())
	if err != nil {
		return err
	}
	defer d.Close()
	if free(t.file) && current(d, t.name, t.file) {
		return d.Remove(t.name)
	}
	return nil
}

func (t *Token) line() []byte { return []byte(t.text + "\n") }

// Find returns the token for an admin address, host:port. The process that serves the
// address must belong to this user. Find searches every folder that such a process may
// use (privatedir.Runtimes). The error is fs.ErrNotExist if there is no such process.
func Find(address string) (text string, err error) {
	missing := fs.ErrNotExist
	for _, folder := range privatedir.Runtimes() {
		if text, err = findIn(folder, address); err == nil {
			return text, nil
		}
		if errors.Is(missing, fs.ErrNotExist) { // prefer the error of an unsafe file, because it is more informative
			missing = err
		}
	}
	return "", missing
}

func findIn(folder, address string) (string, error) {
	d, err := privatedir.OpenExisting(folder)
	if err != nil {
		return "", err
	}
	defer d.Close()
	f, text, err := open(d, fileName(address))
	if err != nil {
		return "", err
	}
	defer f.Close()
	if free(f) {
		return "", fmt.Errorf("%s is left over from a process that has ended: %w", f.Name(), fs.ErrNotExist)
	}
	return text, nil
}

// Path returns the file for the token of an admin address, host:port.
func Path(address string) string {
	return filepath.Join(privatedir.Runtime(), fileName(address))
}

// fileName returns the name of the file of an admin address.
func fileName(address string) string {
	return prefix + strings.Map(func(r rune) rune {
		if strings.ContainsRune("abcdefghijklmnopqrstuvwxyz0123456789.:-[]%", r) {
			return r
		}
		return '_'
	}, strings.ToLower(address)) + suffix
}

// open opens a file and reads its token. A file that other users may read is an error.
func open(d *privatedir.Dir, name string) (*os.File, string, error) {
	f, err := d.OpenFile(name, os.O_RDONLY)
	if err != nil {
		return nil, "", err
	}
	text, err := read(f)
	if err != nil {
		f.Close()
		return nil, "", err
	}
	return f, text, nil
}

func read(f *os.File) (string, error) {
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return "", fmt.Errorf("%s may be read by other users (mode %04o): its token is not used; remove the file and start the proxy again", f.Name(), info.Mode().Perm())
	}
	size := base64.RawURLEncoding.EncodedLen(tokenBytes)
	line, err := io.ReadAll(io.LimitReader(f, int64(size)+2))
	if err != nil {
		return "", err
	}
	text, whole := strings.CutSuffix(string(line), "\n")
	if random, err := base64.RawURLEncoding.DecodeString(text); err != nil || !whole || len(random) != tokenBytes {
		return "", fmt.Errorf("%s has no token in it", f.Name())
	}
	return text, nil
}

// free reports whether no other process has locked the file. If so, the caller has the
// lock until the caller closes f.
func free(f *os.File) bool { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil }

// current reports whether f is still the file of that name.
func current(d *privatedir.Dir, name string, f *os.File) bool {
	now, err := d.OpenFile(name, os.O_RDONLY)
	if err != nil {
		return false
	}
	defer now.Close()
	a, errA := f.Stat()
	b, errB := now.Stat()
	return errA == nil && errB == nil && os.SameFile(a, b)
}

// sweep removes the files of processes that have crashed.
func sweep(d *privatedir.Dir) {
	names, _ := d.Names(prefix, suffix) // after an error a later call removes the old files
	for _, name := range names {
		f, _, err := open(d, name)
		if err != nil {
			continue
		}
		if free(f) && current(d, name, f) {
			_ = d.Remove(name) // another process may have removed it
		}
		f.Close()
	}
}
