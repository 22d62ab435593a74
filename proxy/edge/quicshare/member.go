// Package quicshare lets several processes share one UDP port for QUIC. Each process
// becomes a member: it claims a number and writes the number into its connection ids.
// The kernel distributes packets by addresses alone. A process that receives a packet
// of another member's connection forwards the packet to that member over a Unix socket.
//
// The processes share one directory, which must belong to the user and be closed to
// other users. Its files:
//
//	lane-K.lock  held by flock while member K lives; contains the process id, the
//	             state ("starting", "serving" or "draining") and the UDP port
//	lane-K.sock  receives forwarded packets
//	quic.key     the secret from which the keys of stateless resets and address
//	             tokens are derived
//	lanes.lock   held while a member opens its port
//
// The decisions behind this package are in docs/design/edge.md.
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
	// maxMembers is the number of member numbers: a number is one byte.
	maxMembers = 256
	// idLen is the length of a connection id in bytes: the member number, then random bytes. The
	// first id of a client has 8 or more bytes (RFC 9000, 7.2), so the length distinguishes the two
	// apart.
	idLen = 7

	// The states of a member. Only a serving member accepts new clients.
	starting = "starting"
	serving  = "serving"
	draining = "draining"
)

// member is the claim to one member number of a directory, and the socket that receives
// forwarded packets.
type member struct {
	dir           *privatedir.Dir
	number        byte
	port          int // the UDP port; 0: not open yet
	lock          *os.File
	forwardSocket *net.UnixConn
	secret        []byte
}

// join claims the lowest free member number of dir.
func join(dir *privatedir.Dir) (*member, error) {
	l := &member{dir: dir}
	var err error
	if l.secret, err = loadSecret(dir); err != nil {
		return nil, err
	}
	for n := range maxMembers {
		l.number = byte(n)
		switch err = l.claim(); {
		case err == nil:
			return l, nil
		case !errors.Is(err, unix.EWOULDBLOCK):
			return nil, fmt.Errorf("claim member %d: %w", n, err)
		}
	}
	return nil, fmt.Errorf("claim a member number: all %d of %s are in use", maxMembers, dir.Name())
}

// claim claims l.number. The error is EWOULDBLOCK if another process has the number.
func (l *member) claim() (err error) {
	if l.lock, err = l.dir.LockFile(lockName(l.number)); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.dir.UnlockFile(lockName(l.number), l.lock))
		}
	}()
	name := sockName(l.number)
	if alive(l.dir, l.number) {
		return unix.EWOULDBLOCK // a cleaner of old files removed the lock file of a living member
	}
	if err := l.dir.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) { // a killed process leaves its socket file
		return err
	}
	if l.forwardSocket, err = l.dir.ListenUnixgram(name); err != nil {
		return err
	}
	if err := l.setState(starting); err != nil {
		return errors.Join(err, l.dir.Remove(name), l.forwardSocket.Close())
	}
	return nil
}

func lockName(n byte) string { return fmt.Sprintf("lane-%d.lock", n) }
func sockName(n byte) string { return fmt.Sprintf("lane-%d.sock", n) }

// setState writes the member's state into its lock file. The length never changes, so a
// reader sees either the old or the new state.
func (l *member) setState(state string) error {
	if _, err := l.lock.WriteAt(fmt.Appendf(nil, "%10d %-8s %5d\n", os.Getpid(), state, l.port), 0); err != nil {
		return fmt.Errorf("write the state of member %d: %w", l.number, err)
	}
	return nil
}

// state reads the state and the UDP port of member n of dir. The file of a dead member
// may still name a state.
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

// others yields the other members of the directory that have a socket file.
func (l *member) others() iter.Seq[byte] {
	return func(yield func(byte) bool) {
		names, _ := l.dir.Names("lane-", ".sock") // on an error: treated as no members
		for _, name := range names {
			n, err := strconv.ParseUint(name[len("lane-"):len(name)-len(".sock")], 10, 8)
			if err == nil && byte(n) != l.number && !yield(byte(n)) {
				return
			}
		}
	}
}

// sharesPort reports whether another living member has the port open.
func (l *member) sharesPort(port int) bool {
	for n := range l.others() {
		if _, its := state(l.dir, n); its == port && alive(l.dir, n) {
			return true
		}
	}
	return false
}

// alive reports whether a process has the socket of member n of dir open.
func alive(dir *privatedir.Dir, n byte) bool {
	c, err := dir.Dial(context.Background(), "unixgram", sockName(n))
	if err != nil {
		return false
	}
	c.Close()
	return true
}

// close frees the member number. It removes the socket file while the lock is held, so
// that it cannot remove the next owner's file.
func (l *member) close() error {
	err := l.dir.Remove(sockName(l.number))
	return errors.Join(err, l.forwardSocket.Close(), l.dir.UnlockFile(lockName(l.number), l.lock))
}

// secretFile holds the shared secret of secretLen bytes.
const (
	secretFile = "quic.key"
	secretLen  = 32
)

// loadSecret reads the shared secret, and creates it if the file is missing. If two
// processes create it at once, one succeeds and both read that secret.
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
		return nil, fmt.Errorf("load the shared QUIC key: %w", err)
	}
	if len(secret) != secretLen {
		return nil, fmt.Errorf("load the shared QUIC key: %s has %d bytes, not %d", dir.Path(secretFile), len(secret), secretLen)
	}
	return secret, nil
}

// key derives one key from the shared secret.
func (l *member) key(purpose string) (k [32]byte, err error) {
	b, err := hkdf.Key(sha256.New, l.secret, nil, "pdproxy quic "+purpose, len(k))
	copy(k[:], b)
	return k, err
}

// GenerateConnectionID implements quic.ConnectionIDGenerator.
func (l *member) GenerateConnectionID() (quic.ConnectionID, error) {
	var id [idLen]byte
	_, _ = rand.Read(id[1:]) // never fails
	id[0] = l.number
	return quic.ConnectionIDFromBytes(id[:]), nil
}

// ConnectionIDLen implements quic.ConnectionIDGenerator.
func (l *member) ConnectionIDLen() int { return idLen }
