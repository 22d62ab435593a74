package moriio

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine/registrations"
	"github.com/pdproxy/pdproxy/proxy/engine/zmtp"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
	"github.com/pdproxy/pdproxy/proxy/takeover"
)

// start runs a registrar. The channel receives each list that the registrar
// reports.
func start(t *testing.T, o Options) (*Registrar, <-chan []config.Engine) {
	t.Helper()
	o.Endpoint = "tcp://127.0.0.1:0"
	if o.Registrations == nil {
		o.Registrations = registrations.New(privatedirtest.Open(t), "zmq", slog.New(slog.DiscardHandler))
	}
	r, err := Listen(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	lists, done := make(chan []config.Engine, 16), make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx, func(list []config.Engine) { lists <- list })
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		if c, err := net.Dial("tcp", r.Addr().String()); err == nil {
			c.Close()
			t.Error("the socket is still open")
		}
	})
	return r, lists
}

// dealer connects to the registrar with a DEALER socket, as an engine does.
func dealer(t *testing.T, r *Registrar) *zmtp.Conn {
	t.Helper()
	c, err := zmtp.Dial(t.Context(), "tcp://"+r.Addr().String(),
		zmtp.Options{Socket: zmtp.Dealer, MaxMessage: 1 << 10, MaxFrames: 1, ReadBuffer: 1 << 10})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// greeting returns the greeting of ZMTP 3.0 with a security mechanism.
func greeting(mechanism string) []byte {
	b := make([]byte, 64)
	b[0], b[9], b[10] = 0xff, 0x7f, 3
	copy(b[12:], mechanism)
	return b
}

const ready = "\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"

// plain connects with a name and a password and sends a registration. It reports
// whether the registrar accepted the password.
func plain(t *testing.T, r *Registrar, name, password string) bool {
	t.Helper()
	tcp, err := net.Dial("tcp", r.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tcp.Close() })
	hello := "\x05HELLO" + string(rune(len(name))) + name + string(rune(len(password))) + password
	tcp.Write(append(greeting("PLAIN"), "\x04"+string(rune(len(hello)))+hello...))
	answer := make([]byte, 64+10)
	if _, err := io.ReadFull(tcp, answer); err != nil || string(answer[64:]) != "\x04\x08\x07WELCOME" {
		return false
	}
	text := bytesOf(t, newP)
	io.WriteString(tcp, "\x04\x1f\x08INITIATE\x0bSocket-Type\x00\x00\x00\x06DEALER\x00"+string([]byte{byte(len(text))})+string(text))
	return true
}

// copyOf returns another listener of a registrar's socket.
func copyOf(t *testing.T, r *Registrar) net.Listener {
	t.Helper()
	s, err := takeover.FromListener("x", r.Listener())
	if err != nil {
		t.Fatal(err)
	}
	defer s.File.Close()
	l, err := s.Listener()
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func next(t *testing.T, lists <-chan []config.Engine) []config.Engine {
	t.Helper()
	select {
	case list := <-lists:
		return list
	case <-time.After(10 * time.Second):
		t.Fatal("no list arrived")
		return nil
	}
}

func TestRegistration(t *testing.T) {
	r, lists := start(t, Options{})
	p, d := dealer(t, r), dealer(t, r)
	for range 2 {
		if err := p.Send(bytesOf(t, newP)); err != nil {
			t.Fatal(err)
		}
	}
	if list := next(t, lists); len(list) != 1 || list[0].Role != config.RolePrefill {
		t.Fatalf("next(lists) = %+v", list)
	}
	if err := d.Send(nil, bytesOf(t, oldD)); err != nil { // a REQ socket sends an empty frame first
		t.Fatal(err)
	}
	if list := next(t, lists); len(list) != 2 {
		t.Fatalf("next(lists) = %+v", list)
	}
}

// With a password only a peer that presents it can register.
func TestPassword(t *testing.T) {
	r, lists := start(t, Options{Password: "hunter2"})
	for _, who := range [][2]string{{"vllm", "hunter3"}, {"vllm", ""}, {"", "hunter22"}} {
		for range 2 {
			if plain(t, r, who[0], who[1]) {
				t.Errorf("%q is let in", who)
			}
		}
	}
	if !plain(t, r, "vllm", "hunter2") {
		t.Fatal("the password is refused")
	}
	if list := next(t, lists); len(list) != 1 {
		t.Errorf("next(lists) = %+v", list)
	}
}

// A peer that sends bytes other than ZMTP, or a message longer than an engine's,
// loses its connection. Nothing else changes.
func TestForeignBytes(t *testing.T) {
	r, lists := start(t, Options{})
	for name, sent := range map[string][]byte{
		"HTTP":                  []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n" + string(make([]byte, 64))),
		"another security":      greeting("CURVE"),
		"no READY":              append(greeting("NULL"), 0, 1, 'x'),
		"a frame too long":      append(append(greeting("NULL"), ready...), 2, 0xff, 0, 0, 0, 0, 0, 0, 0),
		"frames without an end": append(append(greeting("NULL"), ready...), 1, 0, 1, 0, 1, 0, 1, 0, 1, 0),
	} {
		c, err := net.Dial("tcp", r.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		c.Write(sent)
		c.SetReadDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.Copy(io.Discard, c); err != nil && err.(net.Error).Timeout() {
			t.Errorf("%s: the connection stays open", name)
		}
		c.Close()
	}
	if err := dealer(t, r).Send(bytesOf(t, newP)); err != nil {
		t.Fatal(err)
	}
	if list := next(t, lists); len(list) != 1 {
		t.Errorf("next(lists) = %+v", list)
	}
}

// A successor has the list of engines while its predecessor accepts registrations. When the
// predecessor leaves, the successor takes registrations on the same socket.
func TestSuccessor(t *testing.T) {
	dir, log := privatedirtest.Open(t), slog.New(slog.DiscardHandler)
	first, seenByFirst := start(t, Options{Registrations: registrations.New(dir, "zmq", log)})
	p := dealer(t, first)
	if err := p.Send(bytesOf(t, newP)); err != nil {
		t.Fatal(err)
	}
	next(t, seenByFirst)
	second, seen := start(t, Options{Registrations: registrations.New(dir, "zmq", log), Listener: copyOf(t, first)})
	if list := next(t, seen); len(list) != 1 || list[0].Role != config.RolePrefill {
		t.Fatalf("next(seen) = %+v", list)
	}
	// While both have the socket, the first accepts all connections.
	for range 20 {
		if err := dealer(t, first).Send(bytesOf(t, oldD)); err != nil {
			t.Fatal(err)
		}
	}
	if list := next(t, seenByFirst); len(list) != 2 {
		t.Fatalf("next(seenByFirst) = %+v", list)
	}
	first.Release()
	if _, err := p.Receive(0); err == nil {
		t.Error("the predecessor keeps its connections open")
	}
	if list := next(t, seen); len(list) != 2 {
		t.Fatalf("next(seen) = %+v", list)
	}
	moved := bytes.Replace(bytesOf(t, oldD), []byte("\xcd\x18\x9d"), []byte("\xcd\x18\x9e"), 1) // its handshake port
	if err := dealer(t, second).Send(moved); err != nil {
		t.Fatal(err)
	}
	for _, lists := range []<-chan []config.Engine{seen, seenByFirst} { // the process that has left also reports the engines of the other process
		if list := next(t, lists); len(list) != 2 || list[0].KVAddress != "host:10.0.1.7,handshake:6302,notify:61005" {
			t.Errorf("next(lists) = %+v", list)
		}
	}
}

// A successor that stops before its turn leaves the registrations with the first
// process.
func TestSuccessorGoes(t *testing.T) {
	dir, log := privatedirtest.Open(t), slog.New(slog.DiscardHandler)
	first, seen := start(t, Options{Registrations: registrations.New(dir, "zmq", log)})
	if err := dealer(t, first).Send(bytesOf(t, newP)); err != nil {
		t.Fatal(err)
	}
	next(t, seen)
	for _, leave := range []bool{false, true} {
		second, err := Listen(Options{Endpoint: "tcp://127.0.0.1:0", Registrations: registrations.New(dir, "zmq", log), Listener: copyOf(t, first)})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		lists, done := make(chan []config.Engine, 16), make(chan struct{})
		go func() {
			defer close(done)
			second.Run(ctx, func(list []config.Engine) { lists <- list })
		}()
		next(t, lists)
		if leave {
			second.Release()
		}
		cancel()
		<-done
	}
	if err := dealer(t, first).Send(bytesOf(t, oldD)); err != nil {
		t.Fatal(err)
	}
	if list := next(t, seen); len(list) != 2 {
		t.Errorf("next(seen) = %+v", list)
	}
}

func TestListen(t *testing.T) {
	for _, endpoint := range []string{"", "127.0.0.1:1", "ipc:///tmp/x", "tcp://127.0.0.1:x"} {
		if r, err := Listen(Options{Endpoint: endpoint}); err == nil {
			r.Close()
			t.Errorf("%q can be listened on", endpoint)
		}
	}
	r, err := Listen(Options{Endpoint: "tcp://*:0"})
	if err != nil {
		t.Fatal(err)
	}
	if r.Name() != "zmq" || r.Close() != nil {
		t.Error("the socket cannot be closed")
	}
}
