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

// open opens the UDP address, which other lanes of the directory may have open,
// and nobody else: the kernel would share it with any process of the user, which
// knows nothing of lanes.
func (l *lane) open(addr string) (*net.UDPConn, error) {
	at, err := net.ResolveUDPAddr("udp", addr)
	if err != nil {
		return nil, err
	}
	lock, err := l.lockPort()
	if err != nil {
		return nil, fmt.Errorf("lock the port: %w", err)
	}
	defer lock.Close()
	if !l.shares(at.Port) {
		alone, err := net.ListenUDP("udp", at)
		if err != nil {
			return nil, err
		}
		alone.Close()
	}
	c, err := takeover.Shared().ListenPacket(context.Background(), "udp", at.String())
	if err != nil {
		return nil, err
	}
	udp := c.(*net.UDPConn)
	l.port = udp.LocalAddr().(*net.UDPAddr).Port
	if err := l.say(starting); err != nil {
		udp.Close()
		return nil, err
	}
	return udp, nil
}

// lockPort waits until no other lane is opening its port: that takes microseconds,
// unless a process was stopped in the middle.
func (l *lane) lockPort() (*os.File, error) {
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		f, err := lockFile(l.dir, "lanes.lock")
		if err == nil || !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline) {
			return f, err
		}
	}
}
