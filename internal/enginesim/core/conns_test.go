package core

import (
	"io"
	"net"
	"net/http"
	"testing"
)

// TestConnectionOfAnEndedProcess: a connection that a server accepts while its process ends gets no
// answer of that process.
func TestConnectionOfAnEndedProcess(t *testing.T) {
	c := newConnSet()
	c.Close(true)
	ours, theirs := net.Pipe()
	defer ours.Close()
	defer theirs.Close()
	c.State(ours, http.StateNew)
	if _, err := theirs.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the connection is open: %v", err)
	}
	if n := c.count(); n != 0 {
		t.Errorf("%d connections are open", n)
	}
}
