package quicshare

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pdproxy/pdproxy/proxy/takeover"
)

// openPort opens the UDP address. Other members of the directory may have it open; any
// other socket makes openPort fail. Without that check the kernel would share the port
// with any process of the same user, also with one that does not forward packets.
func (l *member) openPort(addr string) (*net.UDPConn, error) {
	at, err := net.ResolveUDPAddr("udp", addr)
	if err != nil {
		return nil, err
	}
	lock, err := l.lockPort()
	if err != nil {
		return nil, fmt.Errorf("lock the port: %w", err)
	}
	defer l.dir.UnlockFile(portLock, lock) //nolint:errcheck // the lock ends with the file
	if !l.sharesPort(at.Port) {
		exclusive, err := net.ListenUDP("udp", at)
		if err != nil {
			return nil, err
		}
		exclusive.Close()
	}
	c, err := takeover.Shared().ListenPacket(context.Background(), "udp", at.String())
	if err != nil {
		return nil, err
	}
	udp := c.(*net.UDPConn)
	l.port = udp.LocalAddr().(*net.UDPAddr).Port
	if err := l.setState(starting); err != nil {
		udp.Close()
		return nil, err
	}
	return udp, nil
}

// portLock is the name of the file that a member locks while it opens its port.
const portLock = "lanes.lock"

// lockPort waits until no other member is opening its port. That takes microseconds,
// unless a process was stopped while it held the lock.
func (l *member) lockPort() (*os.File, error) {
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		f, err := l.dir.LockFile(portLock)
		if err == nil || !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline) {
			return f, err
		}
	}
}
