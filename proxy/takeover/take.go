package takeover

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// Taken is an offer that a successor has received, until Ready or Close.
type Taken struct {
	Offer
	Predecessor int // its process id; 0 if the system does not report it
	conn        *net.UnixConn
}

// Take gets the sockets from the process that serves the control socket. The caller
// closes them. The predecessor continues to serve until Ready.
func Take(ctx context.Context, dir *privatedir.Dir) (*Taken, error) {
	dialling, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	conn, err := dir.Dial(dialling, "unix", Control)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil, ErrNoPredecessor
	}
	if err != nil {
		return nil, err
	}
	t := &Taken{conn: conn.(*net.UnixConn)}
	if err := t.take(); err != nil {
		t.conn.Close()
		return nil, err
	}
	return t, nil
}

func (t *Taken) take() (err error) {
	if t.Predecessor, err = peer(t.conn); err != nil {
		return err
	}
	t.conn.SetDeadline(time.Now().Add(patience))
	if err := send(t.conn, message{Say: sayHello}, nil); err != nil {
		return err
	}
	m, sockets, err := receive(t.conn)
	if err != nil {
		return err
	}
	switch m.Say {
	case sayOffer:
		t.Offer = Offer{Sockets: sockets, Ready: m.Ready}
		return nil
	case sayBusy:
		err = ErrBusy
	case sayRefused:
		err = fmt.Errorf("the predecessor refuses: %.500q", m.Reason)
	default:
		err = fmt.Errorf("the predecessor sent %.20q, not %s", m.Say, sayOffer)
	}
	CloseAll(sockets)
	return err
}

// Ready informs the predecessor that this process can serve requests, and returns when
// the predecessor has stopped accepting. Call it once, after this process has begun to
// accept on the sockets. After ErrWithdrawn the caller must end. After nil the caller
// continues; nil also means that the predecessor has died. After any other error the
// predecessor is unresponsive, and the caller continues too.
func (t *Taken) Ready() error {
	defer t.conn.Close()
	t.conn.SetDeadline(time.Now().Add(2 * patience))
	if err := send(t.conn, message{Say: sayReady}, nil); err != nil {
		if m, _, rerr := receive(t.conn); rerr == nil && m.Say == sayWithdrawn {
			return ErrWithdrawn
		}
		return nil
	}
	m, sockets, err := receive(t.conn)
	CloseAll(sockets)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errors.New("the predecessor does not answer")
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		return nil
	case err != nil:
		return err
	case m.Say == sayWithdrawn:
		return ErrWithdrawn
	case m.Say != sayReleased:
		return fmt.Errorf("the predecessor sent %.20q, not %s", m.Say, sayReleased)
	}
	return nil
}

// Close cancels the takeover: the predecessor continues to serve. The sockets stay open.
func (t *Taken) Close() error { return t.conn.Close() }
