// Package takeover passes the listening sockets of a running process to its
// successor, and keeps the directory in which the processes of one configuration
// find each other: the control socket, and a lock for each.
//
// The predecessor serves the control socket. A successor connects, says hello,
// and is sent the sockets by SCM_RIGHTS, with a name for each; it starts, and
// says that it is ready. Only then the predecessor stops accepting, and answers
// that it has: nothing is lost, for the queue of connections belongs to the
// socket that both hold. A successor that fails before that is gone as if it had
// never come. A predecessor that changes its mind says so instead; one that dies
// leaves the sockets to the successor.
//
// A message is its length, 4 bytes in network order, and that many bytes of
// JSON. Descriptors come with the bytes of an offer. On Linux each side checks
// that the other is of its own user, or root; elsewhere the directory's mode is
// all that keeps others out.
package takeover

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"
)

// version is that of the messages: a successor of another cannot take over.
const version = 1

// Limits of a message of the other side.
const (
	maxMessage = 256 << 10
	maxSockets = 16
	maxName    = 300 // with a host name
)

// Patience with the other side, where it has nothing to do but answer.
const patience = 5 * time.Second

// Socket is one open socket and what it is for.
type Socket struct {
	Name string
	File *os.File
}

// Offer is what a predecessor gives: copies of its sockets.
type Offer struct {
	Sockets []Socket
	// Ready tells the successor that requests are served now: it must not do
	// worse.
	Ready bool
}

var (
	// ErrNoPredecessor is the error of Take when no process serves the control socket.
	ErrNoPredecessor = errors.New("no process to take over from")
	// ErrWithdrawn is the error of Ready when the predecessor goes on, or ends
	// together with its successor.
	ErrWithdrawn = errors.New("the predecessor has withdrawn its offer")
	// ErrBusy is the error of Take when another successor is just starting.
	ErrBusy = errors.New("another takeover is under way")
)

// message is everything that either side says; Say is what it means.
type message struct {
	Say     string   `json:"say"`
	Version int      `json:"version"`
	Sockets []string `json:"sockets,omitempty"` // of an offer, in the order of the descriptors
	Ready   bool     `json:"ready,omitempty"`   // of an offer
	Reason  string   `json:"reason,omitempty"`
}

const (
	sayHello     = "hello"     // successor
	sayCopy      = "copy"      // who only wants what is offered
	sayOffer     = "offer"     // predecessor, with the descriptors
	sayBusy      = "busy"      // predecessor, instead of an offer
	sayRefused   = "refused"   // predecessor, instead of an offer
	sayReady     = "ready"     // successor
	sayReleased  = "released"  // predecessor: it accepts nothing any more
	sayWithdrawn = "withdrawn" // predecessor, instead of released
)

// Listener makes a net.Listener of a socket, which stays the caller's to close.
func (s Socket) Listener() (net.Listener, error) {
	l, err := net.FileListener(s.File)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", s.Name, err)
	}
	if u, ok := l.(*net.UnixListener); ok {
		u.SetUnlinkOnClose(false) // the path is the successor's too
	}
	return l, nil
}

// Copy returns another descriptor of the same socket.
func (s Socket) Copy() (Socket, error) { return copyOf(s.Name, s.File) }

// FromListener returns a copy of a listener's socket for Offer or a child. The
// caller closes it.
//
// The File method of a listener will not do: the descriptor that it makes becomes
// blocking when it is asked for, and with it that of every process that has the
// socket, since they share one file description.
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
		syscall.ForkLock.RLock() // so that no child is started between the two
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
