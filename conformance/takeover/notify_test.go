package takeover

import (
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// The proxy notifies the service manager when it serves, and names the process to watch.
func TestServiceManagerIsTold(t *testing.T) {
	for _, workers := range []int{0, 1} {
		t.Run(fmt.Sprintf("workers %d", workers), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "notify")
			manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
			if err != nil {
				t.Fatal(err)
			}
			defer manager.Close()
			t.Setenv("NOTIFY_SOCKET", path)
			next := func() string {
				t.Helper()
				b := make([]byte, 1000)
				manager.SetReadDeadline(time.Now().Add(patience))
				n, err := manager.Read(b)
				if err != nil {
					t.Fatal(err)
				}
				return string(b[:n])
			}
			w := newWorld(t, false, workers)
			w.run()
			if s := next(); s != "READY=1" {
				t.Errorf("at its start: %q", s)
			}
			first := w.successor(0, func() {})
			w.awaitReady()
			if err := syscall.Kill(first, syscall.SIGUSR2); err != nil {
				t.Fatal(err)
			}
			second := w.successor(first, func() {})
			// The successor's own message arrives before or after it.
			if a, b := next(), next(); a == b || a != "READY=1" && a != "MAINPID="+strconv.Itoa(second) || b != "READY=1" && b != "MAINPID="+strconv.Itoa(second) {
				t.Errorf("at the takeover: %q, %q; the successor is %d", a, b, second)
			}
			syscall.Kill(second, syscall.SIGTERM)
			if s := next(); s != "STOPPING=1" {
				t.Errorf("at its end: %q", s)
			}
		})
	}
}
