package zmtp

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// unhex decodes hexadecimal bytes. Spaces separate bytes, and "text" stands for its own
// bytes.
func unhex(t testing.TB, s string) []byte {
	t.Helper()
	var out []byte
	for i, part := range strings.Split(s, `"`) {
		if i%2 == 1 {
			out = append(out, part...)
			continue
		}
		b, err := hex.DecodeString(strings.Join(strings.Fields(part), ""))
		if err != nil {
			t.Fatalf(`%q: hex.DecodeString(strings.Join(strings.Fields(part), "")) = %v, want nil`, part, err)
		}
		out = append(out, b...)
	}
	return out
}

// Bytes on the wire according to the specifications.
var (
	greetingNull  = `ff 0000000000000000 7f 03 00 "NULL" ` + strings.Repeat("00 ", 16+1+31)
	greetingPlain = `ff 0000000000000000 7f 03 00 "PLAIN" ` + strings.Repeat("00 ", 15+1+31)
)

const (
	readyPub    = `04 19 05 "READY" 0b "Socket-Type" 00000003 "PUB"`
	readyDealer = `04 1c 05 "READY" 0b "Socket-Type" 00000006 "DEALER"`
	aMessage    = `01 00 01 08 0000000000000007 00 02 "xy"`
)

// scripted is a connection whose peer sends fixed bytes and then closes. It records the
// bytes that are sent to the peer.
type scripted struct {
	net.Conn
	in     io.Reader
	out    bytes.Buffer
	closed bool
}

func (s *scripted) Read(p []byte) (int, error)       { return s.in.Read(p) }
func (s *scripted) Write(p []byte) (int, error)      { return s.out.Write(p) }
func (s *scripted) Close() error                     { s.closed = true; return nil }
func (s *scripted) SetDeadline(time.Time) error      { return nil }
func (s *scripted) SetReadDeadline(time.Time) error  { return nil }
func (s *scripted) SetWriteDeadline(time.Time) error { return nil }

func options(s Socket) Options {
	return Options{Socket: s, MaxMessage: 1 << 20, MaxFrames: 4, ReadBuffer: 1 << 10}
}

// text returns frames as text. A long frame is shown by its length.
func text(frames [][]byte) string {
	var parts []string
	for _, f := range frames {
		if len(f) > 100 {
			parts = append(parts, fmt.Sprint(len(f)))
		} else {
			parts = append(parts, fmt.Sprintf("%q", f))
		}
	}
	return strings.Join(parts, " ")
}

// TestLibzmq reads recorded bytes of libzmq sockets, and checks the bytes of the answer.
func TestLibzmq(t *testing.T) {
	for _, tt := range []struct {
		file, password string
		socket         Socket
		want           []string
		sent           string // bytes sent after the greeting
	}{
		{"pub", "", Sub, []string{`"kv" "\x00\x00\x00\x00\x00\x00\x00\a" "xy"`, `"kv" "\x00\x00\x00\x00\x00\x00\x00\b" 300`},
			`04 19 05 "READY" 0b "Socket-Type" 00000003 "SUB"`},
		{"router", "", Dealer, []string{`"" "kv" "\x00\x00\x00\x00\x00\x00\x00\x00" "batch"`, `"" "" "\xff\xff\xff\xff\xff\xff\xff\xff" ""`},
			readyDealer + ` 04 05 04 "PONG" 04 05 04 "PONG"`},
		{"dealer", "", Router, []string{`"registration"`},
			`04 1c 05 "READY" 0b "Socket-Type" 00000006 "ROUTER" 04 05 04 "PONG"`},
		{"req", "", Router, []string{`"" "registration"`},
			`04 1c 05 "READY" 0b "Socket-Type" 00000006 "ROUTER" 04 05 04 "PONG"`},
		{"dealer-plain", "hunter2", Router, []string{`"registration"`},
			`04 08 07 "WELCOME" 04 1c 05 "READY" 0b "Socket-Type" 00000006 "ROUTER" 04 05 04 "PONG"`},
	} {
		t.Run(tt.file, func(t *testing.T) {
			recorded, err := os.ReadFile("testdata/libzmq/" + tt.file)
			if err != nil {
				t.Fatal(err)
			}
			peer := &scripted{in: bytes.NewReader(recorded)}
			c, err := open(t.Context(), peer, tt.password, options(tt.socket))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			var got []string
			for {
				frames, err := c.Receive(0)
				if err == io.EOF {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, text(frames))
			}
			if fmt.Sprint(got) != fmt.Sprint(tt.want) {
				t.Errorf("received %q, want %q", got, tt.want)
			}
			if sent := peer.out.Bytes()[greetingLen:]; !bytes.Equal(sent, unhex(t, tt.sent)) {
				t.Errorf("sent %q", sent)
			}
		})
	}
}

// TestSent: the sent bytes are those of the specifications.
func TestSent(t *testing.T) {
	peer := &scripted{in: bytes.NewReader(unhex(t, greetingNull+readyPub))}
	c, err := open(t.Context(), peer, "", options(Sub))
	if err != nil {
		t.Fatal(err)
	}
	if got := peer.out.Bytes()[:greetingLen]; !bytes.Equal(got, unhex(t, greetingNull)) {
		t.Errorf("greeting %q", got)
	}
	peer.out.Reset()
	if err := errors.Join(c.Subscribe("kv"), c.Send(nil, []byte("a")), c.Send(make([]byte, 256))); err != nil {
		t.Fatal(err)
	}
	if want := unhex(t, `00 03 01 "kv" 01 00 00 01 "a" 02 0000000000000100`+strings.Repeat("00", 256)); !bytes.Equal(peer.out.Bytes(), want) {
		t.Errorf("sent %q", peer.out.Bytes())
	}
	if err := c.Close(); err != nil || !peer.closed {
		t.Error("the connection is open", err)
	}
}

// TestLimits: the error names the exceeded limit, and the part above the limit is not
// read.
func TestLimits(t *testing.T) {
	for _, tt := range []struct{ name, sends string }{
		{"frame", `02 00000000f0000000`},
		{"frame of more than an int", `02 ffffffffffffffff`},
		{"message", `03 0000000000080000` + strings.Repeat("00", 0x80000) + `02 0000000000080001`},
		{"frames", strings.Repeat(`01 00 `, 5)},
		{"command", `06 0000000000001001`},
		{"command of more than an int", `06 ffffffffffffffff`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := open(t.Context(), &scripted{in: bytes.NewReader(unhex(t, greetingNull+readyDealer+tt.sends))}, "", options(Router))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.Receive(0); !errors.Is(err, ErrLimit) {
				t.Errorf("got error %v", err)
			}
		})
	}
}

// TestMemory: a frame uses memory only as its bytes arrive. The memory of a long message
// is freed.
func TestMemory(t *testing.T) {
	o := options(Sub)
	o.MaxMessage = 32 << 20
	sends := append(unhex(t, greetingNull+readyPub+`02 0000000000800000`), make([]byte, 8<<20)...)
	sends = append(sends, unhex(t, `00 01 "a" 02 0000000002000000 "begin"`)...)
	c, err := open(t.Context(), &scripted{in: bytes.NewReader(sends)}, "", o)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{8 << 20, 1} {
		if frames, err := c.Receive(0); err != nil || len(frames) != 1 || len(frames[0]) != want {
			t.Fatalf("%d frames, %v", len(frames), err)
		}
	}
	if n := cap(c.message.bytes); n > keptMemory {
		t.Errorf("%d bytes of memory are kept", n)
	}
	if _, err := c.Receive(0); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
	if n := cap(c.message.bytes); n > 2*firstStep {
		t.Errorf("%d bytes for 5 that arrived", n)
	}
}

// TestMessageTimeout: a peer may pause between messages, also after a PING that arrived
// in parts, but not within a message. With a limit the peer may not pause beyond the
// limit.
func TestMessageTimeout(t *testing.T) {
	for _, tt := range []struct {
		name  string
		limit time.Duration
		sends []string // texts that the peer sends one hour apart; "+" separates parts of one text
		want  string
	}{
		{"silent between messages", 0, []string{`00 01 "a"`, `00 01 "b"`}, "a b EOF"},
		{"silent within a PING", 0, []string{`04 07 04`, `"PING" 0000`}, "i/o timeout"},
		{"a PING in parts, then a message", 0, []string{`04 07 04 + "PING" 0000`, `00 01 "a"`}, "a EOF"},
		{"a PING, then a message", 0, []string{`04 07 04 "PING" 0000`, `00 01 "a"`}, "a EOF"},
		{"silent within a header", 0, []string{`00`, `01 "a"`}, "i/o timeout"},
		{"silent within a long header", 0, []string{`02 00000000`, `00000001 "a"`}, "i/o timeout"},
		{"silent within a frame", 0, []string{`00 02 "a"`, `"b"`}, "i/o timeout"},
		{"silent between frames", 0, []string{`01 01 "a"`, `00 01 "b"`}, "i/o timeout"},
		{"silent with a limit", time.Minute, []string{`00 01 "a"`, `00 01 "b"`}, "a i/o timeout"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ours, theirs := net.Pipe()
				go io.Copy(io.Discard, theirs)
				sent := make(chan struct{})
				go func() {
					defer close(sent)
					defer theirs.Close()
					theirs.Write(unhex(t, greetingNull+readyDealer))
					for i, s := range tt.sends {
						if i > 0 {
							time.Sleep(time.Hour)
						}
						for part := range strings.SplitSeq(s, "+") {
							if _, err := theirs.Write(unhex(t, part)); err != nil {
								return // the client closed the connection
							}
						}
					}
				}()
				c, err := Accept(t.Context(), ours, "", options(Router))
				if err != nil {
					t.Fatal(err)
				}
				var got []string
				for err == nil {
					var frames [][]byte
					if frames, err = c.Receive(tt.limit); err == nil {
						got = append(got, string(frames[0]))
					}
				}
				c.Close()
				<-sent
				if errors.Is(err, os.ErrDeadlineExceeded) {
					err = os.ErrDeadlineExceeded
				}
				if s := strings.Join(append(got, err.Error()), " "); s != tt.want {
					t.Errorf(`strings.Join(append(got, err.Error()), " ") = %s, want %s`, s, tt.want)
				}
			})
		})
	}
}

// TestContext: the end of the context ends a connection at every stage.
func TestContext(t *testing.T) {
	for _, sends := range []string{"", greetingNull, greetingNull + readyPub} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			c, err := Dial(ctx, "tcp://"+l.Addr().String(), options(Sub))
			if err == nil {
				_, err = c.Receive(0)
				c.Close()
			}
			done <- err
		}()
		peer, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := peer.Write(unhex(t, sends)); err != nil {
			t.Fatal(err)
		}
		cancel()
		if err := <-done; err == nil {
			t.Error("no error")
		}
		if _, err := io.Copy(io.Discard, peer); err != nil {
			t.Log(err) // a reset, because the peer has not read all bytes
		}
		peer.Close()
		l.Close()
	}
}

func TestDialErrors(t *testing.T) {
	for _, endpoint := range []string{"", "ipc:///tmp/x", "tcp://127.0.0.1", "tcp://127.0.0.1:1", "tcp://[::1"} {
		if _, err := Dial(t.Context(), endpoint, options(Sub)); err == nil {
			t.Errorf("dial %q: no error", endpoint)
		}
	}
}

// BenchmarkReceive receives batches as vLLM publishes them: topic, number, and
// 5 KB of events.
func BenchmarkReceive(b *testing.B) {
	batch := appendFrame(unhex(b, `01 00 01 08 0000000000000007`), 0, make([]byte, 5<<10))
	peer := &scripted{in: bytes.NewReader(unhex(b, greetingNull+readyPub))}
	o := options(Sub)
	o.ReadBuffer = 64 << 10
	c, err := open(b.Context(), peer, "", o)
	if err != nil {
		b.Fatal(err)
	}
	stream := bytes.Repeat(batch, 1000)
	b.SetBytes(int64(len(batch)))
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if i%1000 == 0 {
			peer.in = bytes.NewReader(stream)
		}
		if _, err := c.Receive(0); err != nil {
			b.Fatal(err)
		}
	}
}
