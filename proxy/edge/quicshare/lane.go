// Package quicshare lets several processes share one UDP port for QUIC. Each takes
// a lane, a number that it writes into its connection ids; the kernel deals
// packets to the processes by addresses alone, so whoever gets a packet of another
// lane's connection hands it to that lane over a Unix socket.
//
// All that the processes share lies in one directory, which must belong to the
// user and be closed to others: lane-K.lock is held by flock for as long as lane K
// lives and says the process, "starting", "serving" or "draining", and the UDP port;
// lane-K.sock takes forwarded packets; quic.key is the secret of stateless resets
// and address tokens; lanes.lock is held while a lane opens its port.
package quicshare

import (
	"context"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/quic-go/quic-go"
	"golang.org/x/sys/unix"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
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
	dir    *privatedir.Dir
	number byte
	port   int // of UDP; 0: not open yet
	lock   *os.File
	inlet  *net.UnixConn
	secret []byte
}

// takeLane takes the lowest free lane of dir.
func takeLane(dir *privatedir.Dir) (*lane, error) {
	l := &lane{dir: dir}
	var err error
	if l.secret, err = loadSecret(dir); err != nil {
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
	return nil, fmt.Errorf("take a lane: all %d of %s are taken", lanes, dir.Name())
}

// take takes the lane of l.number; the error is EWOULDBLOCK when somebody has it.
func (l *lane) take() (err error) {
	if l.lock, err = lockFile(l.dir, lockName(l.number)); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			l.lock.Close()
		}
	}()
	name := sockName(l.number)
	if alive(l.dir, l.number) {
		return unix.EWOULDBLOCK // its lock was swept away with other old files
	}
	if err := l.dir.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) { // a killed process leaves it
		return err
	}
	if l.inlet, err = l.dir.ListenUnixgram(name); err != nil {
		return err
	}
	if err := l.say(starting); err != nil {
		return errors.Join(err, l.dir.Remove(name), l.inlet.Close())
	}
	return nil
}

func lockName(n byte) string { return fmt.Sprintf("lane-%d.lock", n) }
func sockName(n byte) string { return fmt.Sprintf("lane-%d.sock", n) }

// lockFile opens the file and holds it by flock; the error is EWOULDBLOCK when
// somebody else does.
func lockFile(dir *privatedir.Dir, name string) (*os.File, error) {
	f, err := dir.OpenFile(name, os.O_RDWR|os.O_CREATE)
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
func state(dir *privatedir.Dir, n byte) (state string, port int) {
	text, err := dir.ReadFile(lockName(n), 64)
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
		names, _ := l.dir.Names("lane-", ".sock") // an error: as if there were none
		for _, name := range names {
			n, err := strconv.ParseUint(name[len("lane-"):len(name)-len(".sock")], 10, 8)
			if err == nil && byte(n) != l.number && !yield(byte(n)) {
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
func alive(dir *privatedir.Dir, n byte) bool {
	c, err := dir.Dial(context.Background(), "unixgram", sockName(n))
	if err != nil {
		return false
	}
	c.Close()
	return true
}

// close gives the lane back. The socket's file goes while the lock is held, so
// that it cannot be the next holder's.
func (l *lane) close() error {
	err := l.dir.Remove(sockName(l.number))
	return errors.Join(err, l.inlet.Close(), l.lock.Close())
}

// secretFile is the name of the file with the shared secret, which has secretLen bytes.
const (
	secretFile = "quic.key"
	secretLen  = 32
)

// loadSecret reads the shared secret, and makes it when there is none: of two
// processes that do so at once, one wins and both read its.
func loadSecret(dir *privatedir.Dir) ([]byte, error) {
	secret, err := dir.ReadFile(secretFile, secretLen)
	if errors.Is(err, fs.ErrNotExist) {
		fresh := make([]byte, secretLen)
		_, _ = rand.Read(fresh) // never fails
		if err = dir.CreateFile(secretFile, fresh); err == nil || errors.Is(err, fs.ErrExist) {
			secret, err = dir.ReadFile(secretFile, secretLen)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("load the lanes' key: %w", err)
	}
	if len(secret) != secretLen {
		return nil, fmt.Errorf("load the lanes' key: %s has %d bytes, not %d", dir.Path(secretFile), len(secret), secretLen)
	}
	return secret, nil
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
