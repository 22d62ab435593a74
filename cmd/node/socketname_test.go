package node

import (
	"context"
	"net"
	"os"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

func beside(t *testing.T, dir *privatedir.Dir) (*net.UnixListener, *socketName) {
	t.Helper()
	l, n, err := listenUnderOwnName(dir, "s")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, n
}

func claim(t *testing.T, n *socketName) {
	t.Helper()
	if err := n.claim(); err != nil {
		t.Fatal(err)
	}
}

func TestSocketName(t *testing.T) {
	dir := privatedirtest.Open(t)
	first, own := beside(t, dir)
	if !own.lost() {
		t.Error("lost = false for a name without a target")
	}
	claim(t, own)
	claim(t, own) // again, as after the name was lost
	second, other := beside(t, dir)
	claim(t, other)
	if own.lost() {
		t.Error("lost, though another serves there")
	}
	second.Close()
	if !own.lost() {
		t.Error("lost = false although the other coordinator has ended")
	}
	claim(t, own)
	if own.lost() {
		t.Error("lost = true after the name was claimed again")
	}
	c, err := dir.Dial(t.Context(), "unix", "s")
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if _, err := first.Accept(); err != nil {
		t.Error(err)
	}
}

// The next process removes the sockets of killed processes, and no other files.
func TestSocketsOfTheDead(t *testing.T) {
	dir := privatedirtest.Open(t)
	killed, left := beside(t, dir)
	killed.Close()
	_, alive := beside(t, dir)
	const foreign = "s.lock"
	if err := dir.WriteFile(foreign, nil); err != nil {
		t.Fatal(err)
	}
	beside(t, dir)
	for file, want := range map[string]bool{left.own: false, alive.own: true, foreign: true} {
		if _, err := os.Lstat(dir.Path(file)); (err == nil) != want {
			t.Errorf("%s: os.Lstat(dir.Path(file)) = %v", file, err)
		}
	}
}

func TestKeepSocketName(t *testing.T) {
	_, own := beside(t, privatedirtest.Open(t))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	leads := false
	// The name is lost from the start, but this coordinator does not lead at first.
	own.keep(ctx, func() bool { leads = !leads; return !leads }, func() {
		if leads {
			t.Error("claimed while another coordinator leads")
		}
		cancel()
	})
}
