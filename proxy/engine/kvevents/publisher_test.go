package kvevents

import (
	"encoding/binary"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// zmtpListener is the listening side of ZMTP 3.0. It follows the specification and
// shares no code with package zmtp, so that both cannot share a mistake.
type zmtpListener struct {
	net.Listener
	running sync.WaitGroup

	mu    sync.Mutex
	conns []net.Conn // guarded by mu
}

// listen accepts connections. For each connection listen does the handshake of a socket of
// this kind and then calls serve.
func listen(t *testing.T, kind string, serve func(net.Conn)) *zmtpListener {
	t.Helper()
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &zmtpListener{Listener: tcp}
	l.running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			l.mu.Lock()
			l.conns = append(l.conns, c)
			l.mu.Unlock()
			l.running.Go(func() {
				defer c.Close()
				if shakeHands(c, kind) == nil {
					serve(c)
				}
			})
		}
	})
	return l
}

// shakeHands sends a greeting and READY, and reads the peer's greeting and READY.
func shakeHands(c net.Conn, kind string) error {
	hello := "\xff" + strings.Repeat("\x00", 8) + "\x7f\x03\x00NULL" + strings.Repeat("\x00", 48)
	ready := "\x05READY\x0bSocket-Type\x00\x00\x00" + string(rune(len(kind))) + kind
	if _, err := io.WriteString(c, hello+"\x04"+string(rune(len(ready)))+ready); err != nil {
		return err
	}
	theirs := make([]byte, 64+2)
	if _, err := io.ReadFull(c, theirs); err != nil {
		return err
	}
	_, err := io.CopyN(io.Discard, c, int64(theirs[65]))
	return err
}

// close closes the listener and its connections. It may be called twice.
func (l *zmtpListener) close() {
	l.Close()
	l.disconnect()
	l.running.Wait()
}

// disconnect closes the connections that are open now.
func (l *zmtpListener) disconnect() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.conns {
		c.Close()
	}
	l.conns = nil
}

func (l *zmtpListener) endpoint() string { return "tcp://" + l.Addr().String() }

// frames returns the bytes of a message of short frames.
func frames(list ...[]byte) []byte {
	var b []byte
	for i, frame := range list {
		more := byte(1)
		if i == len(list)-1 {
			more = 0
		}
		b = append(append(b, more, byte(len(frame))), frame...)
	}
	return b
}

// publisher is the engine's side: a PUB socket and, with a replay endpoint, a ROUTER
// socket that answers from a buffer.
type publisher struct {
	pub, router *zmtpListener
	topics      bool // the replay names the topic too

	mu          sync.Mutex
	subscribers []net.Conn // guarded by mu
	batches     [][]byte   // by number; guarded by mu
	first       int        // number of the oldest batch in the buffer; guarded by mu
	next        [][]byte   // batches that no subscriber gets, published after the first replay; guarded by mu
}

// publish starts a publisher, with or without a replay endpoint. The batches in before count as
// already published.
func publish(t *testing.T, replay, topics bool, before ...[]byte) *publisher {
	t.Helper()
	p := &publisher{topics: topics, batches: before}
	if replay {
		p.router = listen(t, "ROUTER", p.serveReplay)
	}
	p.pub = listen(t, "PUB", p.serveSubscriber)
	t.Cleanup(p.close)
	return p
}

func (p *publisher) close() {
	p.pub.close()
	if p.router != nil {
		p.router.close()
	}
}

// restart gives the publisher other batches, which count as already published, and closes its
// connections. The ports stay open, so that no other process gets them.
func (p *publisher) restart(batches ...[]byte) {
	p.mu.Lock()
	p.batches, p.subscribers = batches, nil
	p.mu.Unlock()
	if p.router != nil {
		p.router.disconnect()
	}
	p.pub.disconnect() // last: then the subscriber asks for a replay again
}

func (p *publisher) events() string { return p.pub.endpoint() }

func (p *publisher) replay() string {
	if p.router == nil {
		return ""
	}
	return p.router.endpoint()
}

// serveSubscriber waits for a subscription to every topic.
func (p *publisher) serveSubscriber(c net.Conn) {
	subscription := make([]byte, 3)
	if _, err := io.ReadFull(c, subscription); err != nil || string(subscription) != "\x00\x01\x01" {
		return
	}
	p.mu.Lock()
	p.subscribers = append(p.subscribers, c)
	p.mu.Unlock()
	io.Copy(io.Discard, c)
}

// serveReplay answers replay requests. A request is an empty frame and a number.
func (p *publisher) serveReplay(c net.Conn) {
	for request := make([]byte, 12); ; {
		if _, err := io.ReadFull(c, request); err != nil || string(request[:4]) != "\x01\x00\x00\x08" {
			return
		}
		p.mu.Lock()
		batches, first := p.batches, p.first
		p.batches, p.next = append(batches[:len(batches):len(batches)], p.next...), nil
		p.mu.Unlock()
		head := [][]byte{{}}
		if p.topics {
			head = append(head, []byte("kv"))
		}
		head = head[:len(head):len(head)]
		var out []byte
		for i := max(first, int(binary.BigEndian.Uint64(request[4:]))); i < len(batches); i++ {
			out = append(out, frames(append(head, number(uint64(i)), batches[i])...)...)
		}
		out = append(out, frames(append(head, number(endOfReplay), nil)...)...)
		if _, err := c.Write(out); err != nil {
			return
		}
	}
}

// add appends a batch to the buffer and, if send is true, publishes the batch.
func (p *publisher) add(t *testing.T, batch []byte, send bool) {
	t.Helper()
	p.mu.Lock()
	seq := len(p.batches)
	p.batches = append(p.batches, batch)
	p.mu.Unlock()
	if send {
		p.send(uint64(seq), batch)
	}
}

// send publishes a batch. A subscriber that has left does not get it.
func (p *publisher) send(seq uint64, batch []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.subscribers {
		c.Write(frames([]byte("kv"), number(seq), batch))
	}
}

// subscribed waits until a subscriber has subscribed.
func (p *publisher) subscribed(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		p.mu.Lock()
		n := len(p.subscribers)
		p.mu.Unlock()
		if n > 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatal("no subscription arrived")
		}
	}
}
