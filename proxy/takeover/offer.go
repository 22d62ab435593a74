package takeover

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// startLimit bounds the time from an offer until the successor is ready.
const startLimit = 2 * time.Minute

// Server serves the control socket of a process that can be taken over from.
type Server struct {
	dir      *privatedir.Dir
	listener *net.UnixListener
	log      *slog.Logger
	starting chan struct{} // contains a token while no successor is starting
}

// Control is the name of the socket of the process from which a successor can take
// over.
const Control = "control.sock"

// Listen opens the control socket. It replaces the socket of a process that has ended or
// was taken over. The caller must hold a lock that proves this. Listen starts nothing.
func Listen(dir *privatedir.Dir, log *slog.Logger) (*Server, error) {
	// The socket is first created under another name and then renamed. So a process that
	// dials never finds a socket without a server.
	aside := fmt.Sprintf("%s.%d", Control, os.Getpid())
	if err := dir.Remove(aside); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := dir.ListenUnix(aside)
	if err != nil {
		return nil, err
	}
	if err := dir.Rename(aside, Control); err != nil {
		return nil, errors.Join(err, l.Close(), dir.Remove(aside))
	}
	s := &Server{dir: dir, listener: l, log: log, starting: make(chan struct{}, 1)}
	s.starting <- struct{}{}
	return s, nil
}

// Serve sends the result of offer to each successor that requests it, one at a time, and
// closes the offer, until a successor is ready. Then Serve calls release, in which the
// caller stops accepting on the sockets and releases the resources that only one process
// may have. Then Serve confirms this to the successor and returns the successor's process
// id. Serve returns an error when ctx ends. A successor that is starting at that time
// gets the message that the offer is withdrawn. Serve then removes the socket, for which the caller
// must still hold the lock.
func (s *Server) Serve(ctx context.Context, offer func() (Offer, error), release func(successor int)) (successor int, err error) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	defer s.listener.Close()
	context.AfterFunc(ctx, func() { s.listener.Close() })
	taken := make(chan int, 1)
	wg.Go(func() {
		for {
			c, err := s.listener.AcceptUnix()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				s.log.Warn("the control socket failed", "error", err)
				select {
				case <-time.After(100 * time.Millisecond): // probably out of descriptors
				case <-ctx.Done():
				}
				continue
			}
			wg.Go(func() {
				defer c.Close()
				pid, over, err := s.give(ctx, c, offer, release)
				switch {
				case err != nil:
					s.log.Warn("no takeover", "successor", pid, "error", err)
				case over:
					taken <- pid
				}
			})
		}
	})
	select {
	case pid := <-taken:
		return pid, nil
	case <-ctx.Done():
	}
	s.listener.Close()
	wg.Wait()
	select {
	case pid := <-taken: // the name is the successor's
		return pid, nil
	default:
		_ = s.dir.Remove(Control) // if this fails, the next process replaces it
		return 0, context.Cause(ctx)
	}
}

// give serves one process; over means that the process has taken over.
func (s *Server) give(ctx context.Context, c *net.UnixConn, offer func() (Offer, error), release func(int)) (pid int, over bool, err error) {
	if pid, err = peer(c); err != nil {
		return pid, false, err
	}
	c.SetDeadline(time.Now().Add(patience))
	m, sockets, err := receive(c)
	CloseAll(sockets)
	switch {
	case err != nil:
		return pid, false, err
	case m.Say != sayHello:
		return pid, false, fmt.Errorf("it said %.20q, not %s", m.Say, sayHello)
	}
	select {
	case <-s.starting:
		defer func() { s.starting <- struct{}{} }()
	default:
		return pid, false, errors.Join(ErrBusy, send(c, message{Say: sayBusy}, nil))
	}
	if ctx.Err() != nil { // another successor has just taken over
		return pid, false, errors.Join(ErrBusy, send(c, message{Say: sayBusy}, nil))
	}
	if err := s.send(c, offer); err != nil {
		return pid, false, err
	}
	s.log.Info("a successor is starting", "successor", pid)
	err = s.await(ctx, c, func() { release(pid) })
	return pid, err == nil, err
}

// send sends the offer.
func (s *Server) send(c *net.UnixConn, offer func() (Offer, error)) error {
	o, err := offer()
	if err != nil {
		return errors.Join(err, send(c, message{Say: sayRefused, Reason: err.Error()}, nil))
	}
	defer CloseAll(o.Sockets)
	return send(c, message{Say: sayOffer, Ready: o.Ready}, o.Sockets)
}

// await waits until the successor is ready, then calls release.
func (s *Server) await(ctx context.Context, c *net.UnixConn, release func()) error {
	c.SetDeadline(time.Now().Add(startLimit))
	stop := context.AfterFunc(ctx, func() { c.SetReadDeadline(time.Now()) })
	defer stop()
	m, sockets, err := receive(c)
	CloseAll(sockets)
	c.SetWriteDeadline(time.Now().Add(patience))
	switch {
	case ctx.Err() != nil:
		return errors.Join(context.Cause(ctx), send(c, message{Say: sayWithdrawn}, nil))
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errors.Join(fmt.Errorf("it is not ready after %s", startLimit), send(c, message{Say: sayWithdrawn}, nil))
	case errors.Is(err, io.EOF):
		return errors.New("it has ended before it was ready")
	case err != nil:
		return err
	case m.Say != sayReady:
		return fmt.Errorf("it said %.20q, not %s", m.Say, sayReady)
	}
	release()
	if err := send(c, message{Say: sayReleased}, nil); err != nil {
		s.log.Warn("cannot tell the successor that it owns the sockets", "error", err)
	}
	return nil
}
