package epp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"net"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/credentials"
)

const (
	frameHeader = 9 // bytes; RFC 9113, section 4.1
	// noStream is the id of a stream that cannot exist: clients open streams with odd ids.
	noStream = 2
)

// transport makes each connection a wire, after the handshake of TLS.
type transport struct {
	credentials.TransportCredentials
}

// ServerHandshake implements credentials.TransportCredentials.
func (t transport) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, info, err := t.TransportCredentials.ServerHandshake(raw)
	gateway, ok := raw.(*conn)
	if err != nil || !ok {
		return c, info, err
	}
	return &wire{Conn: c, gateway: gateway, in: bufio.NewReaderSize(c, connBuffer), left: len(http2.ClientPreface)}, info, nil
}

// wire is the HTTP/2 bytes of a gateway's connection. It looks at the heads of frames, so that the
// connection knows the memory of each stream. Read and Write are safe for one goroutine each.
type wire struct {
	net.Conn
	gateway *conn
	in      *bufio.Reader

	head    [frameHeader]byte // of the last frame that was read
	pending []byte            // bytes of head that Read must return
	left    int               // bytes of the preface or of the frame after pending

	sent     [frameHeader]byte // of the frame that is written
	sentHead int               // bytes of sent that are known
	sentLeft int               // bytes of the frame that are not yet written, after its head
}

// Read implements net.Conn. It returns no bytes beyond the end of a frame, so that grpc-go has
// handled the head of a stream before Read sees the next frame.
func (w *wire) Read(p []byte) (int, error) {
	if len(w.pending) == 0 && w.left == 0 {
		if _, err := io.ReadFull(w.in, w.head[:]); err != nil {
			return 0, err
		}
		w.arrive()
	}
	if len(w.pending) > 0 {
		n := copy(p, w.pending)
		w.pending = w.pending[n:]
		return n, nil
	}
	n, err := w.in.Read(p[:min(len(p), w.left)])
	w.left -= n
	return n, err
}

// arrive looks at the head of the next frame. grpc-go would hold data of a stream whose handler has
// returned, while the gateway does not read the end. Data that nobody needs gets the id of no
// stream: grpc-go discards it.
func (w *wire) arrive() {
	id := binary.BigEndian.Uint32(w.head[5:]) &^ (1 << 31)
	w.pending, w.left = w.head[:], frameLength(&w.head)
	w.gateway.last = id
	switch http2.FrameType(w.head[3]) {
	case http2.FrameData:
		if id != 0 && !w.gateway.arrive(id, w.left) {
			binary.BigEndian.PutUint32(w.head[5:], noStream)
		}
	case http2.FrameRSTStream:
		w.gateway.leave(id)
	}
}

// Write implements net.Conn.
func (w *wire) Write(p []byte) (int, error) {
	n, err := w.Conn.Write(p)
	w.written(p[:n])
	return n, err
}

// written looks for the ends of streams in bytes that were written. grpc-go frees the memory of a
// stream before it writes the end.
func (w *wire) written(p []byte) {
	for len(p) > 0 {
		if w.sentLeft > 0 {
			n := min(len(p), w.sentLeft)
			p = p[n:]
			w.sentLeft -= n
			continue
		}
		n := copy(w.sent[w.sentHead:], p)
		p = p[n:]
		if w.sentHead += n; w.sentHead < frameHeader {
			return
		}
		w.sentHead, w.sentLeft = 0, frameLength(&w.sent)
		kind, flags := http2.FrameType(w.sent[3]), http2.Flags(w.sent[4])
		if kind == http2.FrameRSTStream || kind == http2.FrameHeaders && flags.Has(http2.FlagHeadersEndStream) {
			w.gateway.leave(binary.BigEndian.Uint32(w.sent[5:]) &^ (1 << 31))
		}
	}
}

// frameLength returns the length of a frame after its head, in bytes.
func frameLength(head *[frameHeader]byte) int {
	return int(head[0])<<16 | int(head[1])<<8 | int(head[2])
}

// uncompressed refuses compressed messages: a short message could become MaxBody bytes. Gateways
// compress none. Another package has registered gzip for the whole process.
type uncompressed struct{}

// Type implements grpc.Decompressor.
func (uncompressed) Type() string { return "gzip" }

// Do implements grpc.Decompressor.
func (uncompressed) Do(io.Reader) ([]byte, error) { return nil, errCompressed }

var errCompressed = errors.New("compressed messages are not supported")
