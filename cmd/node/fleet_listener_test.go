package node

import (
	"net"
	"path/filepath"
	"testing"
)

// TestListenAt: the socket of a dead process is replaced. A socket at which a process
// listens is not.
func TestListenAt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	left, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	left.(*net.UnixListener).SetUnlinkOnClose(false)
	left.Close()
	l, err := listenAt("unix:" + path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if second, err := listenAt("unix:" + path); err == nil {
		second.Close()
		t.Error("two listen at one path")
	}
	tcp, err := listenAt("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	tcp.Close()
}
