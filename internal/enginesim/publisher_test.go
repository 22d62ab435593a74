package enginesim

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/proxy/engine/zmtp"
)

// published is one message of a publisher, its batch decoded.
type published struct {
	topic string
	seq   uint64
	raw   []byte
	ts    float64
	rank  any
	// events are maps, or arrays with the tag first.
	events []any
}

func readPublished(t *testing.T, topic, seq, raw []byte) published {
	t.Helper()
	p := published{topic: string(topic), seq: binary.BigEndian.Uint64(seq), raw: raw}
	v, rest, err := msgp.ReadIntfBytes(raw)
	if err != nil || len(rest) > 0 {
		return p // events remains nil
	}
	batch := v.([]any)
	if len(batch) != 3 {
		t.Fatalf("batch %v", batch)
	}
	p.ts, p.events, p.rank = batch[0].(float64), batch[1].([]any), batch[2]
	return p
}

// dial connects with an independent implementation of ZMTP.
func dial(t *testing.T, endpoint string, kind zmtp.Socket) *zmtp.Conn {
	t.Helper()
	c, err := zmtp.Dial(t.Context(), endpoint, zmtp.Options{Socket: kind, MaxMessage: 1 << 20, MaxFrames: 4, ReadBuffer: 4 << 10})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// subscriber is a SUB socket whose messages are read in the background.
func subscriber(t *testing.T, e *Engine, endpoint, topic string) <-chan published {
	t.Helper()
	before := e.State().KVSubscribers
	sub := dial(t, endpoint, zmtp.Sub)
	if err := sub.Subscribe(topic); err != nil {
		t.Fatal(err)
	}
	messages := make(chan published, 1000)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer close(messages)
		for {
			frames, err := sub.Receive(0)
			if err != nil {
				return
			}
			if len(frames) != 3 {
				t.Errorf("message of %d frames", len(frames))
				continue
			}
			messages <- readPublished(t, frames[0], frames[1], slices.Clone(frames[2]))
		}
	}()
	t.Cleanup(func() { sub.Close(); <-done })
	eventually(t, "the subscription", func() bool { return e.State().KVSubscribers > before })
	return messages
}

// next returns the next message.
func next(t *testing.T, messages <-chan published) published {
	t.Helper()
	select {
	case p := <-messages:
		return p
	case <-time.After(20 * time.Second):
		t.Fatal("no message")
		return published{}
	}
}

// ids converts the token ids of an event, or of an answer, to tokens.
func ids(t *testing.T, list any) []core.Token {
	t.Helper()
	var tokens []core.Token
	for _, v := range list.([]any) {
		n, err := strconv.Atoi(fmt.Sprint(v))
		if err != nil {
			t.Fatal(err)
		}
		tokens = append(tokens, core.Token(n))
	}
	return tokens
}

// replays requests the batches from a number on, as a DEALER socket does.
func replays(t *testing.T, endpoint string, from uint64) [][][]byte {
	t.Helper()
	dealer := dial(t, endpoint, zmtp.Dealer)
	defer dealer.Close()
	for _, malformed := range [][][]byte{{[]byte("x")}, {nil, nil, []byte("y")}} {
		if err := dealer.Send(malformed...); err != nil { // dropped
			t.Fatal(err)
		}
	}
	if err := dealer.Send(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		t.Fatal(err)
	}
	var list [][][]byte
	for {
		frames, err := dealer.Receive(time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if seq := frames[len(frames)-2]; string(seq) == "\xff\xff\xff\xff\xff\xff\xff\xff" {
			if last := frames[len(frames)-1]; len(last) != 0 || len(frames) == 4 && len(frames[1]) != 0 {
				t.Errorf("end %q", frames)
			}
			return list
		}
		var kept [][]byte // frames are valid until the next message
		for _, frame := range frames {
			kept = append(kept, slices.Clone(frame))
		}
		list = append(list, kept)
	}
}

// TestSubscriptions: the connections of invalid peers are closed, and all connections when
// the engine dies. A topic is wanted as long as it has subscriptions.
func TestSubscriptions(t *testing.T) {
	e := startEngine(t, Config{KVEvents: KVEventsConfig{Endpoint: "tcp://127.0.0.1:0", Replay: "tcp://127.0.0.1:0"}})
	connect := func(endpoint string) *net.TCPConn {
		conn, err := net.Dial("tcp", strings.TrimPrefix(endpoint, "tcp://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn.(*net.TCPConn)
	}
	for _, junk := range []string{"GET / HTTP/1.1\r\n\r\n" + strings.Repeat("x", 64), strings.Repeat("\x00", 64), ""} {
		conn := connect(e.KVEventsEndpoint())
		io.WriteString(conn, junk)
		conn.CloseWrite()
		io.Copy(io.Discard, conn)
	}
	conn := connect(e.KVEventsReplay())
	e.Kill()
	io.Copy(io.Discard, conn) // until the connection ends
	topics := &core.TopicSet{}
	for _, m := range []string{"\x01a", "\x01a", "\x00a"} {
		if !topics.Message([]byte(m)) {
			t.Errorf("%q is no subscription", m)
		}
	}
	if !topics.Want([]byte("ab")) || topics.Message([]byte("x")) || topics.Message(nil) {
		t.Error("two subscriptions and one end leave none, or junk is one")
	}
	topics.Message([]byte("\x00a"))
	if topics.Want([]byte("ab")) {
		t.Error("an ended subscription still selects messages")
	}
}

// TestSlowSubscriber: a subscriber that is more than the buffer behind misses
// the oldest batches.
func TestSlowSubscriber(t *testing.T) {
	e := startEngine(t, Config{KVEvents: KVEventsConfig{Endpoint: "tcp://127.0.0.1:0"}})
	p := e.Publishers.List[0]
	at := p.Subscribe()
	for range core.EventBuffer + 5 {
		p.Publish([]core.KVEvent{{Kind: core.KVCleared}})
	}
	list, _ := p.After(t.Context(), at)
	if len(list) != core.EventBuffer || list[0].Seq != 5 || len(p.Kept) != core.EventBuffer {
		t.Errorf("%d messages from number %d, %d kept", len(list), list[0].Seq, len(p.Kept))
	}
	p.Unsubscribe()
}

// TestPing: a peer's heartbeat gets an answer with its context.
func TestPing(t *testing.T) {
	ours, theirs := net.Pipe()
	defer ours.Close()
	defer theirs.Close()
	go func() {
		io.WriteString(theirs, "\x04\x09\x04PING\x00\x0aab\x00\x01z")
	}()
	got := make([]byte, 9)
	read := make(chan error, 1)
	go func() {
		_, err := io.ReadFull(theirs, got)
		read <- err
	}()
	c := core.NewZMTPConn(ours)
	frames, err := c.Receive()
	if err != nil || len(frames) != 1 || string(frames[0]) != "z" {
		t.Fatalf("message %q, %v", frames, err)
	}
	if err := <-read; err != nil || string(got) != "\x04\x07\x04PONGab" {
		t.Errorf("answer %q, %v", got, err)
	}
}

// scriptedConn is a connection whose peer sends fixed bytes.
type scriptedConn struct {
	net.Conn
	in io.Reader
}

func (c *scriptedConn) Read(p []byte) (int, error)  { return c.in.Read(p) }
func (c *scriptedConn) Write(p []byte) (int, error) { return len(p), nil }
func (c *scriptedConn) SetDeadline(time.Time) error { return nil }

// FuzzPeer: for any bytes of a peer, messages are complete and bounded, and
// reading ends with the connection.
func FuzzPeer(f *testing.F) {
	hello := "\xff" + strings.Repeat("\x00", 8) + "\x7f\x03\x00NULL" + strings.Repeat("\x00", 48) + "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
	f.Add([]byte(hello + "\x00\x01\x01"))
	f.Add([]byte(hello + "\x01\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00\x07"))
	f.Add([]byte(hello + "\x04\x09\x04PING\x00\x0aab\x02\xff\xff\xff\xff\xff\xff\xff\xff"))
	f.Add([]byte(hello[:70]))
	f.Fuzz(func(t *testing.T, sent []byte) {
		c, err := core.GreetPeer(&scriptedConn{in: strings.NewReader(string(sent))}, "PUB")
		if err != nil {
			return
		}
		topics := &core.TopicSet{}
		for total := 0; ; {
			frames, err := c.Receive()
			if err != nil {
				return
			}
			if len(frames) == 0 || len(frames) > core.MaxPeerFrames {
				t.Fatalf("got %d frames", len(frames))
			}
			for _, frame := range frames {
				total += len(frame)
				topics.Message(frame)
			}
			if total > len(sent) {
				t.Fatalf("%d bytes of %d", total, len(sent))
			}
		}
	})
}
