package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
)

const (
	requestPath = "/v1/completions"
	periodField = "bench_period_us" // read by the backend; every proxy passes it on
	dialTimeout = 10 * time.Second
)

// A client repeats one request on its own connection (HTTP/1.1) or on a shared connection
// (HTTP/3). Only one goroutine uses it.
type client interface {
	// call sends the request and returns the answer's body. The caller must
	// read it to its end before the next call. An answer other than 200 is an
	// error.
	call() (io.Reader, error)
	close()
}

// requestBody returns a completion request of size bytes. The backend reads events and
// period. With 0 events the answer is unary.
func requestBody(size, events int, period time.Duration) []byte {
	limit := events
	if events == 0 {
		limit = 16
	}
	pause := "" // a field that no engine knows, so only where it is needed
	if period > 0 {
		pause = fmt.Sprintf(`"%s":%d,`, periodField, period.Microseconds())
	}
	head := fmt.Sprintf(`{"model":"%s","stream":%t,"max_tokens":%d,"temperature":0.7,%s"prompt":"`, benchModel, events > 0, limit, pause)
	const words, tail = "the quick brown fox jumps over it ", `"}`
	room := max(0, size-len(head)-len(tail))
	prompt := strings.Repeat(words, room/len(words)+1)[:room]
	return []byte(head + prompt + tail)
}

// rawClient uses plain HTTP/1.1 and needs little CPU time.
type rawClient struct {
	conn    net.Conn
	br      *bufio.Reader
	request []byte // head and body, written at once
	answer  message
}

// dialRaw connects. header is a line that every request gets; "": none.
func dialRaw(addr, header string, body []byte, buffer int) (*rawClient, error) {
	conn, err := net.DialTimeout("tcp", addr, dialTimeout)
	if err != nil {
		return nil, err
	}
	request := rawRequest(addr, header, body)
	return &rawClient{conn: conn, br: bufio.NewReaderSize(conn, buffer), request: request}, nil
}

func rawRequest(addr, header string, body []byte) []byte {
	if header != "" {
		header += "\r\n"
	}
	return fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: bench\r\nAccept: */*\r\n"+
		"Authorization: Bearer sk-0123456789\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s",
		requestPath, addr, header, len(body), body)
}

func (c *rawClient) call() (io.Reader, error) {
	if _, err := c.conn.Write(c.request); err != nil {
		return nil, err
	}
	if err := readMessage(c.br, &c.answer); err != nil {
		return nil, err
	}
	code, err := c.answer.status()
	if err != nil {
		return nil, err
	}
	body, err := c.answer.body(c.br)
	if err != nil {
		return nil, err
	}
	if code != http.StatusOK {
		return nil, statusError(code, body)
	}
	return body, nil
}

func (c *rawClient) close() { c.conn.Close() }

// statusError quotes the start of the answer, which is the proxy's own message:
// the backend sends no errors.
func statusError(code int, body io.Reader) error {
	text, _ := io.ReadAll(io.LimitReader(body, 300))
	return fmt.Errorf("answer %d: %s", code, bytes.TrimSpace(text))
}

// stdClient uses a RoundTripper for TLS and HTTP/3.
type stdClient struct {
	transport http.RoundTripper
	base      string // scheme and address
	body      []byte
	last      io.Closer
}

func (c *stdClient) call() (io.Reader, error) {
	r, err := http.NewRequestWithContext(context.Background(), http.MethodPost, c.base+requestPath, bytes.NewReader(c.body))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer sk-0123456789")
	return c.roundTrip(r)
}

// connect does the handshake, so that no measured call includes it.
func (c *stdClient) connect() error {
	r, err := http.NewRequestWithContext(context.Background(), http.MethodGet, c.base+"/health", nil)
	if err != nil {
		return err
	}
	body, err := c.roundTrip(r)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, body)
	return err
}

func (c *stdClient) roundTrip(r *http.Request) (io.Reader, error) {
	if c.last != nil {
		c.last.Close()
	}
	answer, err := c.transport.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	c.last = answer.Body
	if answer.StatusCode != http.StatusOK {
		return nil, statusError(answer.StatusCode, answer.Body)
	}
	return answer.Body, nil
}

func (c *stdClient) close() {
	if c.last != nil {
		c.last.Close()
	}
}

// newTransports returns the connections of the stdClients: one for each with
// HTTP/1.1, a few shared ones with HTTP/3.
func newTransports(proto string, conns, quicConns int) []http.RoundTripper {
	// The proxy under test makes its certificate at start.
	config := &tls.Config{InsecureSkipVerify: true}
	if proto == protoH3 {
		all := make([]http.RoundTripper, quicConns)
		for i := range all {
			all[i] = &http3.Transport{TLSClientConfig: config, DisableCompression: true, QUICConfig: &quic.Config{}}
		}
		return all
	}
	all := make([]http.RoundTripper, conns)
	for i := range all {
		all[i] = &http.Transport{TLSClientConfig: config, DisableCompression: true, MaxConnsPerHost: 1}
	}
	return all
}
