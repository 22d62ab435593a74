package selectapi

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"time"
)

const (
	// firstByteTimeout is how long a new connection may say nothing.
	firstByteTimeout = 5 * time.Second
	// maxSilent bounds the connections that have said nothing yet.
	maxSilent = 1024
)

// Splitter gives the connections of one listener to two: HTTP to one, the link of
// our own workers to the other. They are told apart by their first byte, which is
// left in the connection: a request of HTTP begins with a letter, perhaps after
// line ends, the link with a byte that is no ASCII text.
type Splitter struct {
	listener   net.Listener
	link, http *branch
	silent     chan struct{} // a place for each connection that has said nothing yet
}

// NewSplitter returns a splitter of l; it starts nothing.
func NewSplitter(l net.Listener) *Splitter {
	return &Splitter{
		listener: l, link: newBranch(l.Addr()), http: newBranch(l.Addr()), silent: make(chan struct{}, maxSilent),
	}
}

// Link is the listener of the connections that are not HTTP.
func (s *Splitter) Link() net.Listener { return s.link }

// HTTP is the listener of those that are.
func (s *Splitter) HTTP() net.Listener { return s.http }

// Run accepts connections until ctx ends or the listener fails; then it closes
// the listener and both of its own.
func (s *Splitter) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer s.link.Close()
	defer s.http.Close()
	stop := context.AfterFunc(ctx, func() { _ = s.listener.Close() }) // what it closes is of no use any more
	defer stop()
	for wait := time.Duration(0); ; {
		c, err := s.listener.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = c.Close() // nobody serves it
			}
			return nil
		case err != nil && errors.Is(err, net.ErrClosed):
			return err
		case err != nil: // out of descriptors, or the peer has gone
			wait = min(max(2*wait, 5*time.Millisecond), time.Second)
			if !sleep(ctx, wait) {
				return nil
			}
			continue
		}
		wait = 0
		select {
		case s.silent <- struct{}{}:
		default:
			_ = c.Close() // too many others say nothing
			continue
		}
		wg.Go(func() {
			first, err := s.listen(ctx, c)
			<-s.silent
			s.deliver(ctx, c, first, err)
		})
	}
}

// listen waits for the first byte of a connection and leaves it there.
func (s *Splitter) listen(ctx context.Context, c net.Conn) (byte, error) {
	if err := c.SetReadDeadline(time.Now().Add(firstByteTimeout)); err != nil {
		return 0, err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) }) // an error: it is closed
	defer stop()
	return firstByte(c)
}

// deliver gives a connection to whom its first byte is for.
func (s *Splitter) deliver(ctx context.Context, c net.Conn, first byte, err error) {
	to := s.link
	if first == '\r' || first == '\n' || first >= ' ' && first <= '~' {
		to = s.http
	}
	if err == nil {
		err = c.SetReadDeadline(time.Time{})
	}
	if err == nil {
		select {
		case to.conns <- c:
			return
		case <-to.closed:
		case <-ctx.Done():
		}
	}
	_ = c.Close() // nobody serves it
}

// firstByte is the first byte of what is to be read, which stays to be read.
func firstByte(c net.Conn) (byte, error) {
	raw, ok := c.(syscall.Conn)
	if !ok {
		return 0, errors.ErrUnsupported
	}
	fd, err := raw.SyscallConn()
	if err != nil {
		return 0, err
	}
	var (
		b    [1]byte
		n    int
		fail error
	)
	err = fd.Read(func(fd uintptr) bool {
		for {
			n, _, fail = syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK)
			if fail != syscall.EINTR {
				return fail != syscall.EAGAIN
			}
		}
	})
	switch {
	case err != nil:
		return 0, err
	case fail != nil:
		return 0, fail
	case n == 0:
		return 0, io.EOF
	}
	return b[0], nil
}

// sleep waits; false: ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// branch is a listener of a splitter.
type branch struct {
	addr   net.Addr
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newBranch(addr net.Addr) *branch {
	return &branch{addr: addr, conns: make(chan net.Conn), closed: make(chan struct{})}
}

// Accept implements net.Listener.
func (b *branch) Accept() (net.Conn, error) {
	select {
	case c := <-b.conns:
		return c, nil
	case <-b.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener; the splitter goes on for the other branch.
func (b *branch) Close() error {
	b.once.Do(func() { close(b.closed) })
	return nil
}

// Addr implements net.Listener.
func (b *branch) Addr() net.Addr { return b.addr }
