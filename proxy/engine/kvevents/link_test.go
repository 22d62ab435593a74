package kvevents

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
)

// The wire of ZMTP 3.0 as its specification has it: a publisher greets, says
// that it is ready, and sends.
var zmtpGreeting = `ff 0000000000000000 7f 03 00 "NULL" ` + strings.Repeat("00 ", 16+1+31)

const (
	zmtpReady   = `04 19 05 "READY" 0b "Socket-Type" 00 00 00 03 "PUB"`
	zmtpMessage = `01 00 01 08 00 00 00 00 00 00 00 07 00 02 "xy"`
	zmtpPing    = `04 07 04 "PING" 00 00`
)

// peer listens, and sends the bytes to whoever connects, and nothing after them
// if end. It returns its endpoint; in gives nil when all is sent, and then what came in until the other
// side closed.
func peer(t *testing.T, out []byte, end bool) (endpoint string, in <-chan []byte) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan []byte, 2)
	go func() {
		defer close(got)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		if _, err := c.Write(out); err != nil {
			t.Log(err) // it hung up before all was sent, as it may
		}
		if end {
			if err := c.(*net.TCPConn).CloseWrite(); err != nil {
				t.Log(err)
			}
		}
		got <- nil
		b, err := io.ReadAll(c)
		if err != nil {
			t.Log(err)
		}
		got <- b
	}()
	t.Cleanup(func() {
		l.Close()
		for range got {
		}
	})
	return "tcp://" + l.Addr().String(), got
}

func TestLink(t *testing.T) {
	endpoint, in := peer(t, unhex(t, zmtpGreeting+zmtpReady+zmtpMessage+zmtpPing+zmtpMessage), true)
	l, err := dial(t.Context(), endpoint, zmq4.Sub)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.send([]byte{1}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		frames, err := l.recv(0)
		if err != nil || len(frames) != 3 || string(frames[2]) != "xy" {
			t.Fatalf("%q, %v", frames, err)
		}
	}
	l.close()
	<-in
	sent := string(<-in)
	for _, want := range []string{"ff 0000000000000000 7f 03 00", `05 "READY"`, `0b "Socket-Type" 00 00 00 03 "SUB"`, `00 01 01`, `04 05 04 "PONG"`} {
		if !strings.Contains(sent, string(unhex(t, want))) {
			t.Errorf("%q was not sent, but %q", want, sent)
		}
	}
}

// TestLinkForeignPeers: whatever is at the other end, dial and recv end with an
// error.
func TestLinkForeignPeers(t *testing.T) {
	up := zmtpGreeting + zmtpReady
	for _, tt := range []struct{ name, sends string }{
		{"nothing", ``},
		{"HTTP", `"HTTP/1.1 400 Bad Request" 0d0a "Connection: close and that is all there is to say" 0d0a0d0a`},
		{"ZMTP 2", strings.Replace(zmtpGreeting, "03 00", "01 00", 1)},
		{"another mechanism", strings.Replace(zmtpGreeting, `"NULL"`, `"CURV"`, 1)},
		{"another socket", zmtpGreeting + strings.Replace(zmtpReady, `"PUB"`, `"REP"`, 1)},
		{"an error", zmtpGreeting + `04 0a 05 "ERROR" 03 "bad"`},
		{"metadata that is cut", zmtpGreeting + `04 0c 05 "READY" 0b "Socke"`},
		{"metadata without an end", zmtpGreeting + `04 09 05 "READY" 01 "a" 00`},
		{"a long greeting frame", zmtpGreeting + `06 7fffffffffffffff`},
		{"a frame without an end", up + `02 00000000f0000000`},
		{"a message without an end", up + strings.Repeat(`01 00 `, 40)},
		{"frames that are too long together", up + `03 0000000002000000` + strings.Repeat("00", 100)},
		{"an empty command", up + `04 00`},
		{"a command that is cut", up + `04 02 09 "P"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			endpoint, _ := peer(t, unhex(t, tt.sends), true)
			ctx, cancel := context.WithCancel(t.Context())
			l, err := dial(ctx, endpoint, zmq4.Sub)
			if err == nil {
				if tt.name == "nothing" {
					t.Error("nobody greeted")
				}
				_, err = l.recv(0)
				l.close()
			}
			if err == nil {
				t.Error("no error")
			}
			cancel()
		})
	}
}

// TestLinkEnds: a dial and a recv end with their context.
func TestLinkEnds(t *testing.T) {
	for _, sends := range []string{"", zmtpGreeting, zmtpGreeting + zmtpReady} {
		endpoint, in := peer(t, unhex(t, sends), false)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			l, err := dial(ctx, endpoint, zmq4.Sub)
			if err == nil {
				_, err = l.recv(0)
				l.close()
			}
			done <- err
		}()
		<-in // connected
		cancel()
		if err := <-done; err == nil {
			t.Error("no error")
		}
		<-in // closed
	}
}

func TestDialErrors(t *testing.T) {
	for _, endpoint := range []string{"", "ipc:///tmp/x", "tcp://127.0.0.1", "tcp://127.0.0.1:1"} {
		if _, err := dial(t.Context(), endpoint, zmq4.Sub); err == nil {
			t.Errorf("dial %q: no error", endpoint)
		}
	}
	if _, err := dial(t.Context(), "tcp://[::1", zmq4.Sub); err == nil {
		t.Error("no error")
	}
}

// scripted is a connection whose other end says what the fuzzer wants.
type scripted struct {
	net.Conn
	in io.Reader
}

func (s scripted) Read(p []byte) (int, error)       { return s.in.Read(p) }
func (s scripted) Write(p []byte) (int, error)      { return len(p), nil }
func (s scripted) SetDeadline(time.Time) error      { return nil }
func (s scripted) SetReadDeadline(time.Time) error  { return nil }
func (s scripted) SetWriteDeadline(time.Time) error { return nil }

func FuzzLink(f *testing.F) {
	for _, s := range []string{
		zmtpGreeting + zmtpReady + zmtpMessage + zmtpPing + zmtpMessage,
		zmtpGreeting + `04 09 05 "READY" 01 "a" 00`,
		zmtpGreeting + zmtpReady + `06 7fffffffffffffff`,
		zmtpGreeting + zmtpReady + `02 0000000000000003 "abc" 04 00`,
	} {
		f.Add(unhex(f, s))
	}
	f.Fuzz(func(t *testing.T, sends []byte) {
		l := &link{tcp: scripted{in: strings.NewReader(string(sends))}}
		if l.greet(zmq4.Sub) != nil {
			return
		}
		for {
			frames, err := l.recv(0)
			if err != nil {
				return
			}
			n := 0
			for _, frame := range frames {
				n += len(frame)
			}
			if len(frames) > maxFrames || n > len(sends) {
				t.Fatalf("%d frames of %d bytes out of %d", len(frames), n, len(sends))
			}
		}
	})
}

func TestEndpoint(t *testing.T) {
	for _, tt := range []struct {
		base string
		rank int
		want string
	}{
		{"tcp://10.0.0.1:5557", 0, "tcp://10.0.0.1:5557"},
		{"tcp://engine-a:5557", 7, "tcp://engine-a:5564"},
		{"tcp://[fd00::1]:5557", 1, "tcp://[fd00::1]:5558"},
		{"tcp://a:65535", 0, "tcp://a:65535"},
		{"tcp://a:65535", 1, ""},
		{"tcp://a:0", 0, ""},
		{"tcp://a", 0, ""},
		{"tcp://:5557", 0, ""},
		{"ipc:///run/kv", 0, ""},
		{"a:5557", 0, ""},
		{"", 0, ""},
	} {
		got, err := Endpoint(tt.base, tt.rank)
		if got != tt.want || (err != nil) != (tt.want == "") {
			t.Errorf("Endpoint(%q, %d) = %q, %v", tt.base, tt.rank, got, err)
		}
	}
}

func TestAnnounced(t *testing.T) {
	for _, tt := range []struct {
		host   string
		port   int
		engine string
		want   string
	}{
		{"*", 5557, "10.0.0.1", "tcp://10.0.0.1:5557"},
		{"0.0.0.0", 5557, "engine-a", "tcp://engine-a:5557"},
		{"::", 5557, "fd00::1", "tcp://[fd00::1]:5557"},
		{"[::]", 5557, "[fd00::1]", "tcp://[fd00::1]:5557"},
		{"10.0.0.9", 5557, "10.0.0.1", "tcp://10.0.0.9:5557"},
		{"", 5557, "10.0.0.1", "tcp://10.0.0.1:5557"},
		{"*", 0, "10.0.0.1", ""},
		{"*", 70000, "10.0.0.1", ""},
		{"*", 5557, "", ""},
	} {
		if got := Announced(tt.host, tt.port, tt.engine); got != tt.want {
			t.Errorf("Announced(%q, %d, %q) = %q, want %q", tt.host, tt.port, tt.engine, got, tt.want)
		}
	}
}

func TestOversizeIsNamed(t *testing.T) {
	l := &link{tcp: scripted{in: strings.NewReader(string(unhex(t, zmtpGreeting+zmtpReady+`02 00000000f0000000`)))}}
	if err := l.greet(zmq4.Sub); err != nil {
		t.Fatal(err)
	}
	if _, err := l.recv(0); !errors.Is(err, errOversize) {
		t.Errorf("error %v", err)
	}
}
