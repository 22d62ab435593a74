package standby

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

// Listener is a listener whose Accept a deadline interrupts: TCP or a Unix socket.
type Listener interface {
	net.Listener
	SetDeadline(time.Time) error
}

// gatedListener is a listener that accepts only while it is open. While it is shut,
// connections wait until it opens, or go to another process with the same socket.
type gatedListener struct {
	Listener

	mu     sync.Mutex
	opened chan struct{} // closed while it is open; guarded by mu
	isOpen bool          // guarded by mu
	closed chan struct{}
	once   sync.Once
}

// newGatedListener returns a listener that is shut.
func newGatedListener(l Listener) *gatedListener {
	return &gatedListener{Listener: l, opened: make(chan struct{}), closed: make(chan struct{})}
}

func (l *gatedListener) open() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.isOpen {
		l.isOpen = true
		_ = l.SetDeadline(time.Time{}) // fails only on a closed listener
		close(l.opened)
	}
}

// shut makes Accept wait, including a call of Accept that is in progress.
func (l *gatedListener) shut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isOpen {
		l.isOpen, l.opened = false, make(chan struct{})
		_ = l.SetDeadline(time.Unix(1, 0)) // fails only on a closed listener
	}
}

// Accept implements net.Listener.
func (l *gatedListener) Accept() (net.Conn, error) {
	for {
		l.mu.Lock()
		opened := l.opened
		l.mu.Unlock()
		select {
		case <-opened:
		case <-l.closed:
			return nil, net.ErrClosed
		}
		c, err := l.Listener.Accept()
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return c, err
		}
	}
}

// Close implements net.Listener.
func (l *gatedListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}
