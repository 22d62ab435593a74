package grpcserver

import (
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connlimit"
)

// TestGiveUp: the connection of a client fails if its host acknowledges nothing for pingTimeout.
func TestGiveUp(t *testing.T) {
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
	nc, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	newConn(New(Options{Memory: new(buffer.Budget)}), nc, connlimit.New().Enter(nc))
	raw, err := nc.(syscall.Conn).SyscallConn()
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
