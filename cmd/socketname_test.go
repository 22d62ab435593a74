package cmd

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
)

func beside(t *testing.T, path string) (*net.UnixListener, *socketName) {
	t.Helper()
	l, n, err := listenBeside(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, n
}

func take(t *testing.T, n *socketName) {
	t.Helper()
	if err := n.take(); err != nil {
		t.Fatal(err)
	}
}

func TestSocketName(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	first, own := beside(t, path)
	if !own.lost() {
		t.Error("a name that nobody has is not lost")
	}
	take(t, own)
	take(t, own) // again, as after a while without it
	second, other := beside(t, path)
	take(t, other)
	if own.lost() {
		t.Error("lost, though another serves there")
	}
	second.Close()
	if !own.lost() {
		t.Error("not lost, though the other is gone")
	}
	take(t, own)
	if own.lost() {
		t.Error("lost after it was taken back")
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if _, err := first.Accept(); err != nil {
		t.Error(err)
	}
}

// What a killed process has left goes when the next one comes, what is another's
// stays.
func TestSocketsOfTheDead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	killed, left := beside(t, path)
	killed.SetUnlinkOnClose(false)
	killed.Close()
	_, alive := beside(t, path)
	foreign := path + ".lock"
	if err := os.WriteFile(foreign, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	beside(t, path)
	for file, want := range map[string]bool{left.own: false, alive.own: true, foreign: true} {
		if _, err := os.Lstat(file); (err == nil) != want {
			t.Errorf("%s: %v", file, err)
		}
	}
}

func TestKeepSocketName(t *testing.T) {
	_, own := beside(t, filepath.Join(t.TempDir(), "s"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	leads := false
	// It is lost from the start, but this one does not lead at first.
	own.keep(ctx, func() bool { leads = !leads; return !leads }, func() {
		if leads {
			t.Error("asked for while another leads")
		}
		cancel()
	})
}
