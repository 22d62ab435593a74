package standby

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

// Listener is a listener whose Accept can be interrupted, as those of TCP and of
// Unix sockets can.
type Listener interface {
	net.Listener
	SetDeadline(time.Time) error
}

// door is a listener that does not accept while it is shut: connections wait for
// another process that has the same socket, or for it to open.
type door struct {
	Listener

	mu     sync.Mutex
	opened chan struct{} // closed while it is open; guarded by mu
	isOpen bool          // guarded by mu
	closed chan struct{}
	once   sync.Once
}

// newDoor returns a door that is shut.
func newDoor(l Listener) *door {
	return &door{Listener: l, opened: make(chan struct{}), closed: make(chan struct{})}
}

func (d *door) open() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.isOpen {
		d.isOpen = true
		_ = d.SetDeadline(time.Time{}) // fails on a closed one alone
		close(d.opened)
	}
}

// shut makes Accept wait, one that runs too.
func (d *door) shut() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.isOpen {
		d.isOpen, d.opened = false, make(chan struct{})
		_ = d.SetDeadline(time.Unix(1, 0)) // fails on a closed one alone
	}
}

// Accept implements net.Listener.
func (d *door) Accept() (net.Conn, error) {
	for {
		d.mu.Lock()
		opened := d.opened
		d.mu.Unlock()
		select {
		case <-opened:
		case <-d.closed:
			return nil, net.ErrClosed
		}
		c, err := d.Listener.Accept()
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return c, err
		}
	}
}

// Close implements net.Listener.
func (d *door) Close() error {
	d.once.Do(func() { close(d.closed) })
	return d.Listener.Close()
}
