package testbed

import (
	"net"
	"strconv"
	"testing"
)

// Ports that a test has reserved are not given out again before the test ends, whether or
// not a server listens on them.
func TestPortsAreReserved(t *testing.T) {
	before := Reservations()
	t.Run("reserved", func(t *testing.T) {
		first := Ports(t, 3)
		for port := first; port < first+3; port++ {
			if l := reserve(port, nil); l != nil {
				l.Close()
				t.Errorf("port %d was reserved twice", port)
			}
			l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
			if err != nil {
				t.Fatal(err)
			}
			l.Close()
		}
		if got := Reservations() - before; got != 3 {
			t.Errorf("got %d descriptors for three ports", got)
		}
	})
	if got := Reservations(); got != before {
		t.Errorf("%d descriptors remain after the test, %d before", got, before)
	}
}

// A port that a server listens on is not given out.
func TestPortsInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if r := reserve(l.Addr().(*net.TCPAddr).Port, []string{"127.0.0.1"}); r != nil {
		r.Close()
		t.Error("a port in use was reserved")
	}
}
