// Package takeover passes the listening sockets of a running process to its successor.
//
// The predecessor serves the control socket. A successor connects, sends hello, and
// receives the sockets by SCM_RIGHTS, each with a name. The successor starts, and sends
// ready. After ready, the predecessor stops accepting and answers released. No connection
// is lost, because both processes hold the socket with its queue of connections. A
// successor that fails before that changes nothing. A predecessor that cancels the
// takeover sends withdrawn. If a predecessor dies, the successor keeps the sockets.
//
// A message is its length, 4 bytes in network order, and that many bytes of JSON.
// Descriptors come with the bytes of an offer. On Linux each process checks that the
// other belongs to the same user, or to root. Elsewhere only the directory's mode
// excludes other users.
//
// The decisions behind this package are in docs/design/edge.md.
package takeover

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"
)

// version is the version of the messages. A successor with another version cannot take
// over.
const version = 1

// Limits of a received message.
const (
	maxMessage = 256 << 10
	maxSockets = 16
	maxName    = 300 // with a host name
)

// patience bounds the wait for an answer that needs no work.
const patience = 5 * time.Second

// Socket is one open socket with its purpose as its name.
type Socket struct {
	Name string
	File *os.File
}

// Offer is a predecessor's offer: copies of its sockets.
type Offer struct {
	Sockets []Socket
	// Ready informs the successor that this process serves requests now: it must not be ready
	// before it can serve too.
	Ready bool
}

var (
	// ErrNoPredecessor is the error of Take if no process serves the control socket.
	ErrNoPredecessor = errors.New("no process to take over from")
	// ErrWithdrawn is the error of Ready if the predecessor continues to serve, or ends
	// together with its successor.
	ErrWithdrawn = errors.New("the predecessor has withdrawn its offer")
	// ErrBusy is the error of Take if another successor is starting.
	ErrBusy = errors.New("another takeover is under way")
)

// message is a message of either process. Say is its type.
type message struct {
	Say     string   `json:"say"`
	Version int      `json:"version"`
	Sockets []string `json:"sockets,omitempty"` // of an offer, in the order of the descriptors
	Ready   bool     `json:"ready,omitempty"`   // of an offer
	Reason  string   `json:"reason,omitempty"`
}

const (
	sayHello     = "hello"     // successor
	sayOffer     = "offer"     // predecessor, with the descriptors
	sayBusy      = "busy"      // from the predecessor, instead of an offer
	sayRefused   = "refused"   // from the predecessor, instead of an offer
	sayReady     = "ready"     // successor
	sayReleased  = "released"  // predecessor: it no longer accepts
	sayWithdrawn = "withdrawn" // predecessor, instead of released
)

// Listener returns a net.Listener for a socket. The caller still closes the socket.
func (s Socket) Listener() (net.Listener, error) {
	l, err := net.FileListener(s.File)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", s.Name, err)
	}
	if u, ok := l.(*net.UnixListener); ok {
		u.SetUnlinkOnClose(false) // the successor uses the path too
	}
	return l, nil
}

// Copy returns another descriptor of the same socket.
func (s Socket) Copy() (Socket, error) { return copyOf(s.Name, s.File) }

// FromListener returns a copy of a listener's socket for Offer or a child process. The
// caller closes it.
//
// It does not use the listener's File method, which makes the descriptor blocking, for
// all processes that have the socket, because they share one file description.
func FromListener(name string, l net.Listener) (Socket, error) {
	c, ok := l.(syscall.Conn)
	if !ok {
		return Socket{}, fmt.Errorf("socket %s: a %T has no descriptor", name, l)
	}
	return copyOf(name, c)
}

func copyOf(name string, c syscall.Conn) (Socket, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return Socket{}, fmt.Errorf("socket %s: %w", name, err)
	}
	var file *os.File
	var failed error
	err = raw.Control(func(fd uintptr) {
		syscall.ForkLock.RLock() // no child may be started between the two calls
		defer syscall.ForkLock.RUnlock()
		var copied int
		if copied, failed = syscall.Dup(int(fd)); failed == nil {
			syscall.CloseOnExec(copied)
			file = os.NewFile(uintptr(copied), name)
		}
	})
	if err = errors.Join(err, failed); err != nil {
		return Socket{}, fmt.Errorf("socket %s: %w", name, err)
	}
	return Socket{Name: name, File: file}, nil
}

// CloseAll closes the sockets.
func CloseAll(sockets []Socket) {
	for _, s := range sockets {
		s.File.Close()
	}
}
