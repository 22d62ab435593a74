package security

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/quic-go/qpack"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/quicvarint"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// attacker is a client that does not keep to the protocol. It connects from a
// loopback address other than that of the honest clients.
type attacker struct {
	from string // IP address
	to   string // host:port of the proxy
	tls  bool
}

// hostile is the address of attackers; honest clients have 127.0.0.1.
const hostile = "127.0.0.66"

func (p *proxyProcess) attacker() attacker { return attacker{hostile, p.addr, p.secure} }

// dial opens a connection over TCP, with TLS if the proxy uses it. proto is the
// application protocol of TLS.
func (a attacker) dial(proto string) (net.Conn, error) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(a.from)}, Timeout: 10 * time.Second}
	c, err := d.Dial("tcp", a.to)
	if err != nil || !a.tls {
		return c, err
	}
	return tls.Client(c, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{proto}}), nil
}

// exchange sends bytes over HTTP/1. It returns the received bytes when the proxy has
// closed the connection, or has sent nothing for the time quiet. ended reports that the
// proxy closed the connection.
func (a attacker) exchange(sent string, quiet time.Duration, closeWrite bool) (answer string, ended bool, err error) {
	c, err := a.dial("http/1.1")
	if err != nil {
		return "", false, err
	}
	defer c.Close()
	written := make(chan struct{})
	go func() { // the proxy may answer before it has read everything
		defer close(written)
		io.WriteString(c, sent)
		if tcp, ok := c.(*net.TCPConn); ok && closeWrite {
			tcp.CloseWrite()
		}
	}()
	defer func() { c.Close(); <-written }()
	var out bytes.Buffer
	piece := make([]byte, 1<<16)
	for {
		c.SetReadDeadline(time.Now().Add(quiet))
		n, err := c.Read(piece)
		out.Write(piece[:n])
		if err != nil {
			return out.String(), !errors.Is(err, os.ErrDeadlineExceeded), nil
		}
	}
}

// rawHTTP2 is a connection on which an attacker writes frames. Writes of several
// goroutines need mu.
type rawHTTP2 struct {
	net.Conn
	mu      sync.Mutex
	framer  *http2.Framer
	block   bytes.Buffer
	encoder *hpack.Encoder
	next    uint32 // stream id
}

// http2 opens a connection and sends the preface and the settings.
func (a attacker) http2(settings ...http2.Setting) (*rawHTTP2, error) {
	c, err := a.dial("h2")
	if err != nil {
		return nil, err
	}
	h := &rawHTTP2{Conn: c, framer: http2.NewFramer(c, c), next: 1}
	h.encoder = hpack.NewEncoder(&h.block)
	if _, err = io.WriteString(c, http2.ClientPreface); err == nil {
		err = h.framer.WriteSettings(settings...)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return h, nil
}

// fields is a block of header fields, pairs of name and value, unchecked.
func (h *rawHTTP2) fields(pairs ...string) []byte {
	h.block.Reset()
	for n := 0; n+1 < len(pairs); n += 2 {
		h.encoder.WriteField(hpack.HeaderField{Name: pairs[n], Value: pairs[n+1]})
	}
	return bytes.Clone(h.block.Bytes())
}

// open sends the head of a request on a new stream.
func (h *rawHTTP2) open(end bool, pairs ...string) (uint32, error) {
	id := h.next
	h.next += 2
	return id, h.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: h.fields(pairs...), EndHeaders: true, EndStream: end})
}

// drain reads and acknowledges until the connection ends, and returns how many
// frames came.
func (h *rawHTTP2) drain() (frames int) {
	for {
		f, err := h.framer.ReadFrame()
		if err != nil {
			return frames
		}
		frames++
		if s, ok := f.(*http2.SettingsFrame); ok && !s.IsAck() {
			h.mu.Lock()
			h.framer.WriteSettingsAck()
			h.mu.Unlock()
		}
	}
}

// post2 are the fields of a chat request over HTTP/2 or HTTP/3.
func post2(extra ...string) []string {
	return append([]string{":method", "POST", ":scheme", "http", ":path", chatPath, ":authority", "x", "content-type", "application/json"}, extra...)
}

// ask2 sends one request on a new connection and returns the result: the
// status, "reset" or "closed".
func (a attacker) ask2(body string, pairs ...string) (string, error) {
	h, err := a.http2()
	if err != nil {
		return "", err
	}
	defer h.Close()
	h.SetDeadline(time.Now().Add(10 * time.Second))
	id, err := h.open(false, pairs...)
	if err != nil {
		return "", err
	}
	if err := h.framer.WriteData(id, true, []byte(body)); err != nil {
		return "closed", nil
	}
	decoder := hpack.NewDecoder(4096, nil)
	for {
		f, err := h.framer.ReadFrame()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return "", errors.New("no answer within 10 s")
		}
		if err != nil {
			return "closed", nil
		}
		switch f := f.(type) {
		case *http2.HeadersFrame:
			fields, err := decoder.DecodeFull(f.HeaderBlockFragment())
			if err != nil || len(fields) == 0 {
				return "", fmt.Errorf("no status: %w", err)
			}
			if status := fields[0].Value; !strings.HasPrefix(status, "1") {
				return status, nil
			}
		case *http2.RSTStreamFrame:
			return "reset", nil
		case *http2.GoAwayFrame:
			return "closed", nil
		}
	}
}

// http3 opens a QUIC connection with a control stream and empty settings.
func (a attacker) http3() (*quic.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, err := dialQUIC(ctx, a.from, a.to, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h3"}},
		&quic.Config{KeepAlivePeriod: 5 * time.Second, MaxIdleTimeout: 5 * time.Minute})
	if err != nil {
		return nil, err
	}
	s, err := c.OpenUniStream()
	if err == nil {
		_, err = s.Write([]byte{0x00, 0x04, 0x00})
	}
	return c, err
}

// frame3 is one HTTP/3 frame.
func frame3(kind uint64, payload []byte) []byte {
	b := quicvarint.Append(nil, kind)
	return append(quicvarint.Append(b, uint64(len(payload))), payload...)
}

const (
	dataFrame    = 0x0
	headersFrame = 0x1
)

// head3 is a HEADERS frame of pairs of name and value, unchecked.
func head3(pairs ...string) []byte {
	var b bytes.Buffer
	e := qpack.NewEncoder(&b)
	for n := 0; n+1 < len(pairs); n += 2 {
		e.WriteField(qpack.HeaderField{Name: pairs[n], Value: pairs[n+1]})
	}
	return frame3(headersFrame, b.Bytes())
}

// stream3 opens a stream; the proxy may not allow another one for some time.
func stream3(c *quic.Conn, wait time.Duration) (*quic.Stream, error) {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	return c.OpenStreamSync(ctx)
}

// ask3 sends one request on a new connection and returns the result: the
// status, "reset" or "closed".
func (a attacker) ask3(body string, pairs ...string) (string, error) {
	c, err := a.http3()
	if err != nil {
		return "", err
	}
	defer c.CloseWithError(0, "")
	s, err := stream3(c, 10*time.Second)
	if err != nil {
		return "", err
	}
	s.Write(append(head3(pairs...), frame3(dataFrame, []byte(body))...)) // an error shows when reading
	s.Close()
	s.SetReadDeadline(time.Now().Add(10 * time.Second))
	in := quicvarint.NewReader(s)
	for {
		status, err := status3(in)
		var reset *quic.StreamError
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return "", errors.New("no answer within 10 s")
		case errors.As(err, &reset):
			return "reset", nil
		case err != nil:
			return "closed", nil
		case !strings.HasPrefix(status, "1"):
			return status, nil
		}
	}
}

// status3 reads the next HEADERS frame.
func status3(in quicvarint.Reader) (string, error) {
	kind, err := quicvarint.Read(in)
	if err != nil {
		return "", err
	}
	size, err := quicvarint.Read(in)
	if err != nil {
		return "", err
	}
	if kind != headersFrame || size > 1<<16 {
		return "", fmt.Errorf("frame %d of %d bytes", kind, size)
	}
	block := make([]byte, size)
	if _, err := io.ReadFull(in, block); err != nil {
		return "", err
	}
	field, err := qpack.NewDecoder().Decode(block)()
	return field.Value, err
}
