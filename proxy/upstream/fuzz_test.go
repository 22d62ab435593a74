package upstream

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"testing"
	"time"
)

// FuzzAnswer uses arbitrary bytes as an engine's answer. If the client accepts an answer
// as complete, net/http must accept it too and read the same. Then no host between proxy
// and engine can have read a different frame.
func FuzzAnswer(f *testing.F) {
	for i := range answers {
		f.Add([]byte(answers[i].wire), byte(i), answers[i].method == "HEAD")
	}
	f.Fuzz(func(t *testing.T, wire []byte, cut byte, isHead bool) {
		if len(wire) > 8<<10 {
			return // beyond this net/http limits the share of chunk framing
		}
		method := "POST"
		if isHead {
			method = "HEAD"
		}
		cl := New(Options{URL: pipeURL, Dial: func(context.Context, string, string) (net.Conn, error) {
			return &tape{left: wire, step: 1 + int(cut)}, nil
		}})
		defer cl.CloseIdle()
		resp, err := cl.Do(context.Background(), &Request{Method: method, Path: "/"})
		if err != nil {
			return
		}
		defer resp.Close()
		body, err := io.ReadAll(resp)
		want, wantBody := reference(wire, method)
		if want == nil {
			t.Fatalf("net/http refuses the head of %q", wire)
		}
		if want.StatusCode != resp.Status {
			t.Errorf("got status %d, want %d as from net/http", resp.Status, want.StatusCode)
		}
		if method != "HEAD" && want.ContentLength != resp.ContentLength {
			t.Errorf("length %d, net/http %d", resp.ContentLength, want.ContentLength)
		}
		for _, f := range resp.Header {
			if !framingField[strings.ToLower(f.Name)] && !strings.EqualFold(f.Name, "Trailer") && want.Header.Get(f.Name) != resp.Get(f.Name) {
				t.Errorf("%s: %q, net/http %q", f.Name, resp.Get(f.Name), want.Header.Get(f.Name))
			}
		}
		if err == nil && !bytes.Equal(body, wantBody) {
			t.Errorf("got body %q, want %q as from net/http", body, wantBody)
		}
	})
}

var framingField = map[string]bool{"content-length": true, "transfer-encoding": true, "connection": true}

// reference returns net/http's reading: the first final answer, and the readable part
// of its body.
func reference(wire []byte, method string) (*http.Response, []byte) {
	br := bufio.NewReader(bytes.NewReader(wire))
	for {
		resp, err := http.ReadResponse(br, &http.Request{Method: method})
		if err != nil {
			return nil, nil
		}
		if resp.StatusCode >= 200 {
			body, _ := io.ReadAll(resp.Body)
			return resp, body
		}
	}
}

// tape is a connection that accepts any request and plays back an answer.
type tape struct {
	left []byte
	step int
}

func (c *tape) Read(p []byte) (int, error) {
	if len(c.left) == 0 {
		return 0, io.EOF
	}
	n := copy(p, c.left[:min(c.step, len(c.left))])
	c.left = c.left[n:]
	return n, nil
}

func (c *tape) Write(p []byte) (int, error)      { return len(p), nil }
func (c *tape) Close() error                     { return nil }
func (c *tape) LocalAddr() net.Addr              { return nil }
func (c *tape) RemoteAddr() net.Addr             { return nil }
func (c *tape) SetDeadline(time.Time) error      { return nil }
func (c *tape) SetReadDeadline(time.Time) error  { return nil }
func (c *tape) SetWriteDeadline(time.Time) error { return nil }

// FuzzChunks decodes a chunked body cut into equal pieces: the cuts must not matter,
// and a complete body must be the one that net/http reads.
func FuzzChunks(f *testing.F) {
	f.Add([]byte("5\r\nhello\r\n0\r\n\r\n"), byte(1))
	f.Add([]byte("5;a=b\r\nhello\r\nA \r\n0123456789\r\n0\r\nX-A: b\r\n\r\nrest"), byte(3))
	f.Add([]byte("FFFFFFFFFFFFFFFF\r\n"), byte(7))
	f.Add([]byte("0000000000000001\r\nx\r\n000\r\n\r\n"), byte(2))
	f.Add([]byte("1\nx\n0\n\n"), byte(255))
	f.Fuzz(func(t *testing.T, wire []byte, step byte) {
		if len(wire) > 8<<10 {
			return
		}
		whole, wholeUsed, wholeErr := decodeChunks(wire, len(wire)+1)
		cut, used, err := decodeChunks(wire, 1+int(step))
		if !bytes.Equal(whole, cut) || wholeUsed != used || wholeErr != err {
			t.Errorf("whole body: %q %d %v, in pieces: %q %d %v", whole, wholeUsed, wholeErr, cut, used, err)
		}
		want, wantErr := io.ReadAll(httputil.NewChunkedReader(bytes.NewReader(wire)))
		if err == io.EOF && (wantErr != nil || !bytes.Equal(want, whole)) {
			t.Errorf("%q, net/http %q %v", whole, want, wantErr)
		}
		if !bytes.HasPrefix(want, whole) && !bytes.HasPrefix(whole, want) {
			t.Errorf("%q, net/http %q", whole, want)
		}
	})
}

// decodeChunks returns io.EOF for a complete body and nil for an incomplete one.
func decodeChunks(wire []byte, step int) (data []byte, used int, err error) {
	d := framing{kind: byChunks, state: inSize}
	for len(wire) > used && err == nil && d.state != inEnd {
		piece := bytes.Clone(wire[used:min(used+step, len(wire))])
		var n, k int
		n, k, err = d.decode(piece)
		data = append(data, piece[:n]...)
		used += k
	}
	if d.state == inEnd {
		err = io.EOF
	}
	return data, used, err
}
