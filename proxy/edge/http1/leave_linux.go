package http1

import (
	"os"
	"sync"
	"syscall"
)

// watcher waits until clients close their side of a connection: one epoll for all connections, in
// which each is registered once. The zero value is ready.
type watcher struct {
	mu    sync.Mutex
	epoll *os.File         // nil: not open; guarded by mu
	fd    int              // of epoll; guarded by mu
	conns map[uint64]*conn // guarded by mu
	last  uint64           // id; guarded by mu
	over  bool             // guarded by mu
}

// edgeTriggered is EPOLLET, which package syscall has as a negative number.
const edgeTriggered = 1 << 31

// add registers a connection, and sets its socket unless the kernel cannot watch it.
func (w *watcher) add(c *conn, socket syscall.RawConn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.epoll == nil && !w.open() {
		return
	}
	w.last++
	event := syscall.EpollEvent{Events: syscall.EPOLLRDHUP | edgeTriggered, Fd: int32(w.last), Pad: int32(w.last >> 32)}
	var failed error
	err := socket.Control(func(fd uintptr) {
		failed = syscall.EpollCtl(w.fd, syscall.EPOLL_CTL_ADD, int(fd), &event)
	})
	if err != nil || failed != nil {
		return
	}
	// The number of a closed descriptor may be another connection's at once, so an id is the key.
	c.watched.id, c.watched.socket = w.last, socket
	w.conns[w.last] = c
}

// open makes the epoll. Go's own poller waits for it, so that it occupies no thread.
func (w *watcher) open() bool {
	if w.over {
		return false
	}
	fd, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil || syscall.SetNonblock(fd, true) != nil {
		return false
	}
	w.epoll, w.fd, w.conns = os.NewFile(uintptr(fd), "epoll"), fd, make(map[uint64]*conn)
	raw, err := w.epoll.SyscallConn()
	if err != nil {
		return false
	}
	go w.run(raw)
	return true
}

// run reports clients that leave, until close.
func (w *watcher) run(raw syscall.RawConn) {
	events := make([]syscall.EpollEvent, 64)
	for {
		n := 0
		err := raw.Read(func(fd uintptr) bool {
			n, _ = syscall.EpollWait(int(fd), events, 0) // does not block, so no signal interrupts it
			return n > 0
		})
		if err != nil {
			return
		}
		for _, e := range events[:n] {
			w.mu.Lock()
			c := w.conns[uint64(uint32(e.Fd))|uint64(uint32(e.Pad))<<32]
			w.mu.Unlock()
			if c != nil {
				c.hungUp()
			}
		}
	}
}

// remove ends the watching of a connection. The kernel forgets it when it is closed.
func (w *watcher) remove(c *conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.conns, c.watched.id)
}

func (w *watcher) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
	if w.epoll != nil {
		w.epoll.Close()
		w.epoll = nil
	}
}

// atEnd reports whether the client has closed its side and all bytes before have been read.
func atEnd(socket syscall.RawConn) (end bool) {
	_ = socket.Control(func(fd uintptr) { // a closed socket has another owner, who ends the request
		var b [1]byte
		n, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		end = n == 0 && err == nil || err != nil && err != syscall.EAGAIN && err != syscall.EINTR
	})
	return end
}
