package takeover

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// office is a process from which a successor can take over.
type office struct {
	t        *testing.T
	dir      *privatedir.Dir
	listener net.Listener
	released chan int
	served   chan error
	log      *bytes.Buffer
	cancel   context.CancelCauseFunc
}

func startOffice(t *testing.T, d *privatedir.Dir) *office {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o := &office{t: t, dir: d, listener: l, released: make(chan int, 10), served: make(chan error, 1), log: new(bytes.Buffer)}
	s, err := Listen(d, slog.New(slog.NewTextHandler(o.log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	release := func(pid int) { o.listener.Close(); o.released <- pid }
	ctx, cancel := context.WithCancelCause(t.Context())
	o.cancel = cancel
	go func() {
		_, err := s.Serve(ctx, o.offer, release)
		o.served <- err
	}()
	t.Cleanup(func() {
		cancel(nil)
		if o.served != nil {
			<-o.served
		}
		l.Close()
	})
	return o
}

func (o *office) offer() (Offer, error) {
	s, err := FromListener("public", o.listener)
	return Offer{Sockets: []Socket{s}, Ready: true}, err
}

// ended waits for the end of Serve.
func (o *office) ended() error {
	err := <-o.served
	o.served = nil
	return err
}

// answersOn asserts that l accepts the connections to addr.
func answersOn(t *testing.T, l net.Listener, addr string) {
	t.Helper()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		c, err := l.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		io.WriteString(c, "here")
		c.Close()
	})
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if b, err := io.ReadAll(c); string(b) != "here" {
		t.Errorf("io.ReadAll(c) = %q, %v", b, err)
	}
}

func TestTakeOver(t *testing.T) {
	o := startOffice(t, privatedirtest.Open(t))
	addr := o.listener.Addr().String()
	taken, err := Take(t.Context(), o.dir)
	if err != nil {
		t.Fatal(err)
	}
	if !taken.Offer.Ready || len(taken.Sockets) != 1 || taken.Sockets[0].Name != "public" {
		t.Fatalf("%+v", taken.Offer)
	}
	l, err := taken.Sockets[0].Listener()
	CloseAll(taken.Sockets)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	// No process has accepted this connection when the predecessor closes its socket.
	early, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer early.Close()
	select {
	case <-o.released:
		t.Fatal("released before the successor was ready")
	default:
	}
	if err := taken.Ready(); err != nil {
		t.Fatal(err)
	}
	if pid := <-o.released; pid != 0 && pid != os.Getpid() {
		t.Errorf("the successor is %d", pid)
	}
	if err := o.ended(); err != nil {
		t.Error(err)
	}
	c, err := l.Accept()
	if err != nil || c.RemoteAddr().String() != early.LocalAddr().String() {
		t.Fatalf("l.Accept() = %v, %v", c, err)
	}
	c.Close()
	answersOn(t, l, addr)
	if _, err := Take(t.Context(), o.dir); !errors.Is(err, ErrNoPredecessor) {
		t.Errorf("a second successor: %v", err)
	}
}

// A second successor is refused while the first one starts. If the first one gives up,
// the next one may take over.
func TestOneAtATime(t *testing.T) {
	o := startOffice(t, privatedirtest.Open(t))
	first, err := Take(t.Context(), o.dir)
	if err != nil {
		t.Fatal(err)
	}
	CloseAll(first.Sockets)
	if _, err := Take(t.Context(), o.dir); !errors.Is(err, ErrBusy) {
		t.Errorf("the second: %v", err)
	}
	first.Close()
	for {
		third, err := Take(t.Context(), o.dir)
		if errors.Is(err, ErrBusy) { // it is not yet known that the first successor has ended
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		CloseAll(third.Sockets)
		third.Close()
		break
	}
	answersOn(t, o.listener, o.listener.Addr().String())
}

func TestWithdrawn(t *testing.T) {
	o := startOffice(t, privatedirtest.Open(t))
	taken, err := Take(t.Context(), o.dir)
	if err != nil {
		t.Fatal(err)
	}
	CloseAll(taken.Sockets)
	o.cancel(errors.New("a signal"))
	if err := o.ended(); err == nil || err.Error() != "a signal" {
		t.Error(err)
	}
	if err := taken.Ready(); !errors.Is(err, ErrWithdrawn) {
		t.Errorf("ready: %v", err)
	}
}

// Malformed messages of a peer are refused.
func TestGarbage(t *testing.T) {
	frame := func(body string) string {
		return string(binary.BigEndian.AppendUint32(nil, uint32(len(body)))) + body
	}
	o := startOffice(t, privatedirtest.Open(t))
	for name, said := range map[string]string{
		"nothing":          "",
		"half a length":    "\x00\x00",
		"half a message":   "\x00\x00\x00\x09{\"say\"",
		"a long message":   "\xff\xff\xff\xff",
		"no JSON":          frame("hello"),
		"another version":  frame(`{"say":"hello","version":99}`),
		"not hello":        frame(`{"say":"ready","version":1}`),
		"sockets promised": frame(`{"say":"hello","version":1,"sockets":["a"]}`),
		"many names":       frame(`{"say":"hello","version":1,"sockets":[` + strings.Repeat(`"a",`, 20) + `"a"]}`),
		"HTTP":             "GET / HTTP/1.1\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			c, err := o.dir.Dial(t.Context(), "unix", Control)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			io.WriteString(c, said)
			c.(*net.UnixConn).CloseWrite()
			if b, err := io.ReadAll(c); len(b) > 0 {
				t.Errorf("answered %q, %v", b, err)
			}
		})
	}
	answersOn(t, o.listener, o.listener.Addr().String())
	taken, err := Take(t.Context(), o.dir)
	if err != nil {
		t.Fatalf("a later process cannot take over: %v", err)
	}
	CloseAll(taken.Sockets)
	taken.Close()
}

// Unexpected descriptors are closed.
func TestUnwantedDescriptors(t *testing.T) {
	a, b := connected(t)
	before := openFiles(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var many []Socket
	for range maxSockets + 4 {
		s, err := FromListener("x", l)
		if err != nil {
			t.Fatal(err)
		}
		many = append(many, s)
	}
	if err := send(a, message{Say: sayHello}, many); err != nil {
		t.Fatal(err)
	}
	if _, _, err := receive(b); err == nil {
		t.Error("unexpected descriptors were accepted")
	}
	CloseAll(many)
	l.Close()
	if now := openFiles(t); now != before {
		t.Errorf("%d descriptors are open, before %d", now, before)
	}
}

// A ready successor continues if the predecessor answers nothing, or garbage, because
// the successor has the sockets.
func TestReadyAnswers(t *testing.T) {
	tests := []struct {
		name   string
		answer func(*net.UnixConn)
		want   string // "" for none
	}{
		{"released", func(c *net.UnixConn) { send(c, message{Say: sayReleased}, nil) }, ""},
		{"dead", func(*net.UnixConn) {}, ""},
		{"withdrawn", func(c *net.UnixConn) { send(c, message{Say: sayWithdrawn}, nil) }, ErrWithdrawn.Error()},
		{"nonsense", func(c *net.UnixConn) { send(c, message{Say: "what"}, nil) }, `sent "what"`},
		{"garbage", func(c *net.UnixConn) { c.Write([]byte("\x00\x00\x00\x02xx")) }, "not a message"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, b := connected(t)
			go func() {
				receive(b)
				tt.answer(b)
				b.Close()
			}()
			err := (&Taken{conn: a}).Ready()
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("(&Taken{conn: a}).Ready = %v, want %q", err, tt.want)
			}
		})
	}
}

// connected returns both ends of a connection.
func connected(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err = net.DialUnix("unix", nil, l.Addr().(*net.UnixAddr)); err != nil {
		t.Fatal(err)
	}
	if b, err = l.AcceptUnix(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	for _, c := range []*net.UnixConn{a, b} {
		c.SetDeadline(time.Now().Add(20 * time.Second))
	}
	return a, b
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func FuzzDecode(f *testing.F) {
	for _, body := range []string{`{"say":"hello","version":1}`, `{"say":"offer","version":1,"sockets":["a","b"],"ready":true}`, `{}`, `[]`, ``, `{"version":1,"sockets":["",""]}`} {
		f.Add(append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...))
	}
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		m, err := decode(r)
		if err != nil {
			return
		}
		if m.Version != version || len(m.Sockets) > maxSockets || slices.Contains(m.Sockets, "") {
			t.Errorf("%+v", m)
		}
		if used := len(b) - r.Len(); used != 4+int(binary.BigEndian.Uint32(b)) {
			t.Errorf("%d bytes are read", used)
		}
	})
}
