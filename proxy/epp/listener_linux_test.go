package epp

import (
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connlimit"
)

// TestListener: a connection of a gateway fails if its host acknowledges nothing for pingTimeout.
func TestListener(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	c, err := listener{l, connlimit.New(), &arrivals{memory: new(buffer.Budget)}}.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	raw, err := c.(*conn).Conn.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		ms, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
		if err != nil || int64(ms) != pingTimeout.Milliseconds() {
			t.Errorf("the limit is %d ms, %v", ms, err)
		}
	}); err != nil {
		t.Fatal(err)
	}
}
