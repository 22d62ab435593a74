package fleet

import (
	"bytes"
	"net"
	"testing"
	"time"
)

// said is a connection with fixed bytes from the peer.
type said struct {
	bytes.Reader
	sent bytes.Buffer
}

func (s *said) Write(p []byte) (int, error)      { return s.sent.Write(p) }
func (s *said) Close() error                     { return nil }
func (s *said) LocalAddr() net.Addr              { return &net.UnixAddr{} }
func (s *said) RemoteAddr() net.Addr             { return &net.UnixAddr{} }
func (s *said) SetDeadline(time.Time) error      { return nil }
func (s *said) SetReadDeadline(time.Time) error  { return nil }
func (s *said) SetWriteDeadline(time.Time) error { return nil }

func saying(b []byte) *said {
	s := &said{}
	s.Reset(b)
	return s
}

// FuzzGreeting: no bytes of an unknown peer authenticate the peer, on either side. The
// coordinator answers with its hello at most.
func FuzzGreeting(f *testing.F) {
	self := newPeer(3, "here")
	own := self.append(nil)
	whole := append(append(hello(), byte(len(own)), 0), own...)
	f.Add(append(whole, make([]byte, proofSize)...))
	f.Add(append(hello(), 0xff, 0xff))
	f.Add(append(hello(), make([]byte, saysSize+proofSize)...))
	f.Add([]byte(magic + "\x02and so on, for more than a nonce"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := saying(b)
		if _, err := greetWorker(s, nil, []byte(testToken), 7, 9); err == nil {
			t.Error("a stranger is a worker")
		}
		if n := s.sent.Len(); n != 0 && n != helloSize {
			t.Errorf("an unauthenticated peer received %d bytes", n)
		}
		if _, _, err := greetCoordinator(saying(b), []byte(testToken), &self); err == nil {
			t.Error("a stranger is a coordinator")
		}
		var p peer
		if p.read(b) == nil {
			var again peer
			if err := again.read(p.append(nil)); err != nil || again != p {
				t.Errorf("%+v is read as %+v, %v", p, again, err)
			}
		}
	})
}
