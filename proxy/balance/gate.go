package balance

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// headStart is the time for which a worker leaves a connection to the other workers.
	headStart = time.Millisecond
	// maxMissed is the number of consecutive unused head starts of a worker after which
	// the other workers no longer wait for it. On a busy machine a healthy worker may get
	// no processor time for a while.
	maxMissed = 250
	// farAhead is the number of head starts that a worker with far more than its share
	// waits.
	farAhead = 8
)

// gate is a listener that leaves connections to workers that have fewer.
type gate struct {
	net.Listener
	worker *Worker
	inode  uint64
	// ready is another descriptor of the socket, to wait for a connection without
	// accepting it.
	ready *os.File
	raw   syscall.RawConn // of ready
	close sync.Once
}

func newGate(l net.Listener, ready *os.File) (*gate, error) {
	g := &gate{Listener: l, ready: ready}
	var err error
	if g.raw, err = ready.SyscallConn(); err != nil {
		return nil, err
	}
	var failed error
	err = g.raw.Control(func(fd uintptr) {
		var st unix.Stat_t
		failed = unix.Fstat(int(fd), &st)
		g.inode = st.Ino
	})
	if err = errors.Join(err, failed); err != nil {
		return nil, fmt.Errorf("find the inode of a socket: %w", err)
	}
	return g, nil
}

// Accept implements net.Listener.
func (g *gate) Accept() (net.Conn, error) {
	g.yield()
	return g.Listener.Accept()
}

// yield returns when this worker should accept.
func (g *gate) yield() {
	for {
		g.worker.own.looks.Add(1)
		if _, ahead := g.worker.ahead(g.waiting()); !ahead || !g.await() {
			return
		}
		p, ahead := g.worker.ahead(g.waiting())
		if !ahead {
			return
		}
		g.worker.begin()
		time.Sleep(headStart)
		if g.waiting() > 0 {
			g.worker.end(p)
			if g.worker.turn(p) {
				return
			}
		}
	}
}

// await returns when a connection is waiting. It returns false if the listener is
// closed.
func (g *gate) await() bool {
	return g.raw.Read(func(fd uintptr) bool { return queued(fd) > 0 }) == nil
}

// waiting returns the number of connections that wait for Accept.
func (g *gate) waiting() (n int) {
	_ = g.raw.Control(func(fd uintptr) { n = queued(fd) }) // 0 for a closed listener
	return n
}

// Close implements net.Listener.
func (g *gate) Close() error {
	g.close.Do(func() {
		g.worker.leave()
		g.ready.Close()
	})
	return g.Listener.Close()
}
