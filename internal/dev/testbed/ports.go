package testbed

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync/atomic"
	"testing"
)

// Servers of tests listen on these ports where they need a port that they can close and
// open again. The system gives higher ports to outgoing connections.
const firstPort, ports = 12000, 20000

// reservations is how many reservations of ports this process holds.
var reservations atomic.Int64

// Reservations returns how many file descriptors hold reserved ports of this process. A
// test that compares descriptors with an earlier number leaves them out.
func Reservations() int { return int(reservations.Load()) }

// FreeAddr returns a loopback address with a port of Ports.
func FreeAddr(t testing.TB) string {
	t.Helper()
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(Ports(t, 1)))
}

// Ports returns the first of n successive TCP ports that no process listens on, at any of
// the hosts (default 127.0.0.1). The ports are reserved until the test ends: no other test
// of this machine gets them from Ports, also while no server listens on them.
func Ports(t testing.TB, n int, hosts ...string) int {
	t.Helper()
	if len(hosts) == 0 {
		hosts = []string{"127.0.0.1"}
	}
	for range 1000 {
		first := firstPort + rand.IntN(ports-n)
		var held []net.Listener
		for len(held) < n {
			l := reserve(first+len(held), hosts)
			if l == nil {
				break
			}
			held = append(held, l)
		}
		release := func() {
			for _, l := range held {
				l.Close()
				reservations.Add(-1)
			}
		}
		if len(held) == n {
			t.Cleanup(release)
			return first
		}
		release()
	}
	t.Fatal("no free ports")
	return 0
}

// reserve returns the listener that reserves a port, or nil if another test has reserved
// the port or a server listens on it. Listeners of UNIX sockets exclude each other between
// processes, and do not disturb servers that listen on the port.
func reserve(port int, hosts []string) net.Listener {
	name := fmt.Sprintf("@pdproxy-test-port-%d", port) // Linux: no file
	if runtime.GOOS != "linux" {
		name = filepath.Join(os.TempDir(), name[1:])
	}
	l, err := net.Listen("unix", name)
	if err != nil {
		return nil
	}
	for _, host := range hosts {
		server, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err != nil {
			l.Close()
			return nil
		}
		server.Close()
	}
	reservations.Add(1)
	return l
}
