package coordinator

import (
	"io"
	"net"
	"testing"
	"testing/synctest"
)

// A stranger whom nobody serves is not kept.
func TestStrangerIsNotKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewServer(ServerOptions{})
		near, far := net.Pipe()
		defer far.Close()
		go s.pass(t.Context(), near)
		if _, err := far.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("got %v, want the end of the connection", err)
		}
	})
}
