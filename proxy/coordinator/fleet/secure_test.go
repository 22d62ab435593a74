package fleet

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/access"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
)

const (
	testToken = "the token of these tests"
	testKey   = "ENGINE-API-KEY-SECRET"
)

// lines is a log that tests may read while other goroutines write.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// count returns the number of lines that contain a text.
func (l *lines) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), text)
}

// host is a coordinator that workers reach over TCP. The members that it publishes
// contain an engine's key.
type host struct {
	*world
	address string
	log     *lines

	mu      sync.Mutex
	refused map[string]int // guarded by mu
}

func newHost(t *testing.T, token string) *host {
	t.Helper()
	r := &host{world: newWorld(t, "b both one"), log: &lines{}, refused: map[string]int{}}
	log := slog.New(slog.NewTextHandler(r.log, nil))
	certs, err := access.NewCredentials(access.Options{})
	if err != nil {
		t.Fatal(err)
	}
	r.server = NewServer(ServerOptions{Local: r.Local, Log: log, Epoch: 7, Token: []byte(token), Gate: access.NewGate(access.GateOptions{
		Credentials: certs, Log: log, OnRefused: func(reason string) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.refused[reason]++
		},
	})})
	r.server.Publish(TopicMembership, []byte(`{"APIKey":"`+testKey+`"}`))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.address = l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := r.server.Serve(ctx, l); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); serving.Wait() })
	return r
}

func (r *host) count(reason string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.refused[reason]
}

// apart is a worker of a remote coordinator, and the topics that it receives.
type apart struct {
	*Client
	log  *lines
	once sync.Once
	told chan struct{} // closed when the members have come
}

// worker starts a worker that dials an address.
func (r *host) worker(t *testing.T, address, token string) *apart {
	t.Helper()
	w := &apart{Client: r.newClient(t, "tcp", address), log: &lines{}, told: make(chan struct{})}
	w.o.Token, w.o.Log = []byte(token), slog.New(slog.NewTextHandler(w.log, nil))
	w.o.OnTopic = func(topic Topic, value []byte) error {
		if topic == TopicMembership {
			if !bytes.Contains(value, []byte(testKey)) {
				t.Errorf("value %q of TopicMembership lacks the test key", value)
			}
			w.once.Do(func() { close(w.told) })
		}
		return nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { w.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return w
}

// until waits for a condition. Its time limit is no claim about speed.
func until(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); placetest.Pause(t) {
		if time.Now().After(end) {
			t.Fatal("never")
		}
	}
}

// relay forwards the bytes of connections to its own address.
type relay struct {
	address string
	mu      sync.Mutex
	passed  bytes.Buffer // both ways; guarded by mu
}

// newRelay starts a relay. open may wrap the two connections before the relay copies
// between them.
func newRelay(t *testing.T, to string, open func(worker, coordinator net.Conn) (net.Conn, net.Conn, error)) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{address: l.Addr().String()}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := access.Accept(ctx, l, placetest.Quiet(), func(worker net.Conn) {
			defer worker.Close()
			coordinator, err := net.Dial("tcp", to)
			if err != nil {
				t.Error(err)
				return
			}
			defer coordinator.Close()
			stop := context.AfterFunc(ctx, func() { worker.Close(); coordinator.Close() })
			defer stop()
			a, b, err := open(worker, coordinator)
			if err != nil {
				return
			}
			var pumping sync.WaitGroup
			pumping.Go(func() { r.pump(a, b) })
			r.pump(b, a)
			pumping.Wait()
		}); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
	return r
}

func (r *relay) pump(from, to net.Conn) {
	defer to.Close()
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		r.mu.Lock()
		r.passed.Write(b[:n])
		r.mu.Unlock()
		if _, wrong := to.Write(b[:n]); err != nil || wrong != nil {
			return
		}
	}
}

// TestTokenOverTCP: a worker connects only if both sides have the same token. Otherwise
// each side logs the reason.
func TestTokenOverTCP(t *testing.T) {
	for _, tt := range []struct{ name, coordinator, worker string }{
		{"same", testToken, testToken}, {"none", "", ""},
		{"wrong", testToken, testToken + "."}, {"missing", testToken, ""}, {"not wanted", "", testToken},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newHost(t, tt.coordinator)
			w := r.worker(t, r.address, tt.worker)
			if tt.coordinator == tt.worker {
				<-w.told
				w.connected(t, r)
				return
			}
			until(t, func() bool {
				return r.count(access.ReasonToken) > 1 && w.log.count("ended the greeting: it has another token") == 1
			})
			if w.Connected() || len(r.server.Workers()) > 0 || r.log.count("a worker was refused") != 1 {
				t.Errorf("connected %v, %d workers, %d lines", w.Connected(), len(r.server.Workers()), r.log.count("a worker was refused"))
			}
		})
	}
}

// connected places a request through the coordinator.
func (w *apart) connected(t *testing.T, r *host) {
	t.Helper()
	until(t, w.Connected)
	p, err := w.Place(t.Context(), placetest.NewPlacementRequest())
	if err != nil || here(p) {
		t.Fatalf("w.Place(placetest.NewPlacementRequest()) = %v, %v", p, err)
	}
	p.Lease.Release()
	until(t, func() bool { return r.Open() == 0 })
}

// TestNothingIsReadOnTheWay: a host that forwards the bytes sees no token, key or frame.
func TestNothingIsReadOnTheWay(t *testing.T) {
	r := newHost(t, testToken)
	relay := newRelay(t, r.address, func(worker, coordinator net.Conn) (net.Conn, net.Conn, error) { return worker, coordinator, nil })
	w := r.worker(t, relay.address, testToken)
	<-w.told
	w.connected(t, r)
	relay.mu.Lock()
	defer relay.mu.Unlock()
	for _, secret := range []string{testKey, "APIKey", testToken, magic} {
		if bytes.Contains(relay.passed.Bytes(), []byte(secret)) {
			t.Errorf("%q is read on the way", secret)
		}
	}
	if relay.passed.Len() < 1000 {
		t.Errorf("%d bytes were passed on", relay.passed.Len())
	}
}

// TestRelayCannotPass: a relay that uses TLS with both sides and forwards their messages
// cannot connect a worker. The coordinator sends it only a nonce.
func TestRelayCannotPass(t *testing.T) {
	r := newHost(t, testToken)
	certs, err := access.NewCredentials(access.Options{})
	if err != nil {
		t.Fatal(err)
	}
	relay := newRelay(t, r.address, func(worker, coordinator net.Conn) (net.Conn, net.Conn, error) {
		a, b := tls.Server(worker, certs.Server()), tls.Client(coordinator, certs.Client("127.0.0.1"))
		return a, b, errors.Join(a.Handshake(), b.Handshake())
	})
	w := r.worker(t, relay.address, testToken)
	until(t, func() bool { return r.count(access.ReasonToken) > 1 })
	if w.Connected() || len(r.server.Workers()) > 0 {
		t.Error("a worker is connected through one in the middle")
	}
	relay.mu.Lock()
	defer relay.mu.Unlock()
	if n := bytes.Count(relay.passed.Bytes(), []byte(magic)); n == 0 || bytes.Contains(relay.passed.Bytes(), []byte(testKey)) {
		t.Errorf("%d greetings were passed on; %d bytes", n, relay.passed.Len())
	}
}

// TestStrangersGetNothingToGuessBy: to a peer that does not have the token the coordinator sends
// its nonce at most, so the peer cannot test guesses offline.
func TestStrangersGetNothingToGuessBy(t *testing.T) {
	r := newHost(t, testToken)
	own := newPeer(1, "stranger")
	says := own.append(nil)
	claim := append(append([]byte{byte(len(says)), 0}, says...), make([]byte, proofSize)...)
	for name, tt := range map[string]struct {
		said []byte
		want int // bytes
	}{
		"a wrong proof":      {append(hello(), claim...), helloSize},
		"another version":    {append(append([]byte(magic), version-1), make([]byte, nonceSize)...), helloSize},
		"a frame":            {append(hello(), bytes.Repeat([]byte{1}, 3000)...), helloSize},
		"not the magic":      {make([]byte, 100), 0},
		"half of the nonce":  {hello()[:helloSize-1], 0},
		"the longest length": {append(hello(), 0xff, 0xff), helloSize},
	} {
		t.Run(name, func(t *testing.T) {
			conf := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{access.Protocol}}
			nc, err := tls.Dial("tcp", r.address, conf)
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			nc.Write(tt.said)
			nc.CloseWrite()
			got, _ := io.ReadAll(nc)
			if len(got) != tt.want || tt.want > 0 && !bytes.Equal(got[:len(magic)+1], hello()[:len(magic)+1]) {
				t.Errorf("the coordinator sent %d bytes: %q", len(got), got)
			}
		})
	}
	until(t, func() bool { return r.count(access.ReasonToken) == 2 && r.count(access.ReasonVersion) == 1 })
}

// TestRefusalsAreOneLine: many refusals of one address write one log line. All of them
// are counted.
func TestRefusalsAreOneLine(t *testing.T) {
	r := newHost(t, testToken)
	for range 500 {
		nc, err := net.Dial("tcp", r.address)
		if err != nil {
			t.Fatal(err)
		}
		nc.Write(append(hello(), make([]byte, 2+proofSize)...))
		io.Copy(io.Discard, nc)
		nc.Close()
	}
	until(t, func() bool { return r.count(access.ReasonProtocol) == 500 })
	if n := r.log.count("a worker was refused"); n != 1 {
		t.Errorf("got %d lines", n)
	}
}

// TestEarlierProtocol: processes of this version and of the version without TLS refuse
// each other, and log the reason.
func TestEarlierProtocol(t *testing.T) {
	r := newHost(t, testToken)
	nc, err := net.Dial("tcp", r.address)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	nc.Write(append(append([]byte(magic), 2), make([]byte, nonceSize)...))
	got, _ := io.ReadAll(nc) // a worker of version 2 reads this much, and finds another version
	if len(got) != helloSize || string(got[:len(magic)]) != magic || got[len(magic)] != version {
		t.Errorf("the coordinator's answer to a worker of version 2 = %q", got)
	}
	until(t, func() bool { return r.count(access.ReasonVersion) == 1 })
	until(t, func() bool {
		return r.log.count(fmt.Sprintf("the major versions of the fleet's protocol differ: the peer has 2, this process has %d", version)) == 1
	})

	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	defer serving.Wait()
	defer l.Close()
	serving.Go(func() { // a coordinator of version 2 reads TLS as a malformed HTTP request
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			io.WriteString(nc, "HTTP/1.1 400 Bad Request\r\n\r\n")
			nc.Close()
		}
	})
	w := r.worker(t, l.Addr().String(), testToken)
	until(t, func() bool { return w.log.count("one of an earlier version of the fleet's protocol") == 1 })
}

// TestNoClearGreetings: over a network neither side accepts an unencrypted greeting.
func TestNoClearGreetings(t *testing.T) {
	r := newHost(t, "")
	w := r.newClient(t, "tcp", r.address)
	var d net.Dialer
	w.o.Dial = func(ctx context.Context) (net.Conn, error) { return d.DialContext(ctx, "tcp", r.address) }
	if err := w.connect(t.Context()); !errors.Is(err, errClear) {
		t.Errorf("error of the worker = %v, want errClear", err)
	}
	nc, err := net.Dial("tcp", r.address)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	nc.Write(append(hello(), make([]byte, 500)...))
	if got, _ := io.ReadAll(nc); len(got) > 0 {
		t.Errorf("the coordinator sent %q, want nothing", got)
	}
	until(t, func() bool { return r.count(access.ReasonProtocol) == 1 })
}

// TestProofsAreOfOneRoleAndChannel: a proof is valid for one role and one connection. A
// peer cannot send it back or use it on another connection.
func TestProofsAreOfOneRoleAndChannel(t *testing.T) {
	var all [][]byte
	for range 2 {
		x, y := net.Pipe()
		certs, err := access.NewCredentials(access.Options{})
		if err != nil {
			t.Fatal(err)
		}
		a, b := link.Client(x, certs.Client("h")), link.Server(y, nil, certs.Server())
		var shaking sync.WaitGroup
		shaking.Go(func() { a.Handshake() })
		if err := b.Handshake(); err != nil {
			t.Fatal(err)
		}
		shaking.Wait()
		mine, err := newProver(a, []byte(testToken))
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := newProver(b, []byte(testToken))
		if err != nil {
			t.Fatal(err)
		}
		for _, role := range []string{roleWorker, roleCoordinator} {
			proof, err := mine.proof(role)
			if err != nil {
				t.Fatal(err)
			}
			if err := theirs.check(role, proof); err != nil {
				t.Error(err)
			}
			all = append(all, proof)
		}
		x.Close()
		y.Close()
	}
	slices.SortFunc(all, bytes.Compare)
	if n := len(slices.CompactFunc(all, bytes.Equal)); n != 4 {
		t.Errorf("%d proofs of 4 differ", n)
	}
}
