// Package quiclane lets several processes share one UDP port for QUIC. Each takes
// a lane, a number that it writes into its connection ids; the kernel deals
// packets to the processes by addresses alone, so whoever gets a packet of another
// lane's connection hands it to that lane over a Unix socket.
//
// All that the processes share lies in one directory, which must belong to the
// user and be closed to others: lane-K.lock is held by flock for as long as lane K
// lives and says the process, "starting", "serving" or "draining", and the UDP port;
// lane-K.sock takes forwarded packets; quic.key is the secret of stateless resets
// and address tokens; lanes.lock is held while a lane opens its port.
package quiclane

import (
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/quic-go/quic-go"
	"golang.org/x/sys/unix"
)

const (
	// lanes is how many there are: a lane is one byte.
	lanes = 256
	// idLen is the length of a connection id in bytes: the lane, then random
	// ones. A client's first id has 8 or more (RFC 9000, 7.2), so that the length
	// tells who made an id.
	idLen = 7

	// Only a serving lane is given new clients.
	starting = "starting"
	serving  = "serving"
	draining = "draining"
)

// lane is the claim to one number of a directory, and the socket where its
// packets are handed in.
type lane struct {
	dir    string
	number byte
	port   int // of UDP; 0: not open yet
	lock   *os.File
	inlet  *net.UnixConn
	secret []byte
}

// takeLane takes the lowest free lane of dir.
func takeLane(dir string) (*lane, error) {
	l := &lane{dir: dir}
	var err error
	if l.secret, err = loadSecret(filepath.Join(dir, "quic.key")); err != nil {
		return nil, err
	}
	for n := range lanes {
		l.number = byte(n)
		switch err = l.take(); {
		case err == nil:
			return l, nil
		case !errors.Is(err, unix.EWOULDBLOCK):
			return nil, fmt.Errorf("take lane %d: %w", n, err)
		}
	}
	return nil, fmt.Errorf("take a lane: all %d of %s are taken", lanes, dir)
}

// take takes the lane of l.number; the error is EWOULDBLOCK when somebody has it.
func (l *lane) take() (err error) {
	if l.lock, err = lockFile(lockPath(l.dir, l.number)); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			l.lock.Close()
		}
	}()
	at := &net.UnixAddr{Name: sockPath(l.dir, l.number), Net: "unixgram"}
	if alive(l.dir, l.number) {
		return unix.EWOULDBLOCK // its lock was swept away with other old files
	}
	if err := os.Remove(at.Name); err != nil && !errors.Is(err, fs.ErrNotExist) { // a killed process leaves it
		return err
	}
	if l.inlet, err = net.ListenUnixgram(at.Net, at); err != nil {
		return err
	}
	if err := l.say(starting); err != nil {
		return errors.Join(err, os.Remove(at.Name), l.inlet.Close())
	}
	return nil
}

func lockPath(dir string, n byte) string { return filepath.Join(dir, fmt.Sprintf("lane-%d.lock", n)) }
func sockPath(dir string, n byte) string { return filepath.Join(dir, fmt.Sprintf("lane-%d.sock", n)) }

// lockFile opens the file and holds it by flock; the error is EWOULDBLOCK when
// somebody else does.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// say writes what the lane does into its lock file. The length never changes, so
// that a reader sees the one or the other.
func (l *lane) say(state string) error {
	if _, err := l.lock.WriteAt(fmt.Appendf(nil, "%10d %-8s %5d\n", os.Getpid(), state, l.port), 0); err != nil {
		return fmt.Errorf("write lane %d: %w", l.number, err)
	}
	return nil
}

// state is what lane n of dir says of itself, and of which UDP port. A dead one
// may say so still.
func state(dir string, n byte) (state string, port int) {
	text, err := os.ReadFile(lockPath(dir, n))
	if err != nil {
		return "", 0
	}
	fields := strings.Fields(string(text))
	if len(fields) != 3 {
		return "", 0
	}
	if port, err = strconv.Atoi(fields[2]); err != nil {
		return "", 0
	}
	return fields[1], port
}

// others are the other lanes of the directory whose sockets are there.
func (l *lane) others() iter.Seq[byte] {
	return func(yield func(byte) bool) {
		entries, _ := os.ReadDir(l.dir) // an error: as if there were none
		for _, e := range entries {
			name, isLane := strings.CutPrefix(e.Name(), "lane-")
			name, isSock := strings.CutSuffix(name, ".sock")
			n, err := strconv.ParseUint(name, 10, 8)
			if isLane && isSock && err == nil && byte(n) != l.number && !yield(byte(n)) {
				return
			}
		}
	}
}

// shares reports whether another living lane has the port open.
func (l *lane) shares(port int) bool {
	for n := range l.others() {
		if _, its := state(l.dir, n); its == port && alive(l.dir, n) {
			return true
		}
	}
	return false
}

// alive reports whether somebody reads the socket of lane n of dir.
func alive(dir string, n byte) bool {
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: sockPath(dir, n), Net: "unixgram"})
	if err != nil {
		return false
	}
	c.Close()
	return true
}

// close gives the lane back. The socket's file goes while the lock is held, so
// that it cannot be the next holder's.
func (l *lane) close() error {
	err := os.Remove(sockPath(l.dir, l.number))
	return errors.Join(err, l.inlet.Close(), l.lock.Close())
}

// loadSecret reads the shared secret, and makes it when there is none: of two
// processes that do so at once, one wins and both read its.
func loadSecret(path string) ([]byte, error) {
	secret, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = makeSecret(path); err == nil {
			secret, err = os.ReadFile(path)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("load the lanes' key: %w", err)
	}
	if len(secret) != 32 {
		return nil, fmt.Errorf("load the lanes' key: %s has %d bytes, not 32", path, len(secret))
	}
	return secret, nil
}

func makeSecret(path string) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".quic.key-*") // of mode 0600
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }() // linked, or of no use
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // never fails
	if _, err := f.Write(secret[:]); err != nil {
		f.Close()
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Link(f.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// key derives one key of the shared secret.
func (l *lane) key(purpose string) (k [32]byte, err error) {
	b, err := hkdf.Key(sha256.New, l.secret, nil, "pdproxy quic "+purpose, len(k))
	copy(k[:], b)
	return k, err
}

// GenerateConnectionID implements quic.ConnectionIDGenerator.
func (l *lane) GenerateConnectionID() (quic.ConnectionID, error) {
	var id [idLen]byte
	_, _ = rand.Read(id[1:]) // never fails
	id[0] = l.number
	return quic.ConnectionIDFromBytes(id[:]), nil
}

// ConnectionIDLen implements quic.ConnectionIDGenerator.
func (l *lane) ConnectionIDLen() int { return idLen }
