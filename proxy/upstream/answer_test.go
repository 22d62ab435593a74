package upstream

import (
	"errors"
	"io"
	"strings"
	"testing"
)

// answers lists exact bytes of engines and the expected results.
var answers = []struct {
	name   string
	method string // POST when empty
	wire   string
	closes bool   // the engine closes the connection after wire
	extra  int    // bytes at the end of wire that belong to no answer
	status int    // 0: the call fails
	body   string // as read, also before a failure
	length int64  // Response.ContentLength
	header string // value of X-A
	op     string // Op of the error
	err    error  // cause of the failure, nil: any
	reused bool   // the next call uses the connection
}{
	{name: "length", wire: "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nx-a: b\r\n\r\nhello", status: 200, body: "hello", length: 5, header: "b", reused: true},
	{name: "length zero", wire: "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", status: 200, length: 0, reused: true},
	{name: "length twice the same", wire: "HTTP/1.1 200 OK\r\nContent-Length: 1\r\ncontent-length: 1\r\n\r\nx", status: 200, body: "x", length: 1, reused: true},
	{name: "no reason", wire: "HTTP/1.1 404 \r\nContent-Length: 1\r\n\r\nx", status: 404, body: "x", length: 1, reused: true},
	{name: "no reason, no space", wire: "HTTP/1.1 404\r\nContent-Length: 1\r\n\r\nx", status: 404, body: "x", length: 1, reused: true},
	{name: "lines end with LF", wire: "HTTP/1.1 200 OK\nContent-Length: 1\nX-A:  b \n\nx", status: 200, body: "x", length: 1, header: "b", reused: true},
	{name: "empty value", wire: "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nX-A:\r\n\r\nx", status: 200, body: "x", length: 1, reused: true},
	{name: "first of two", wire: "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nX-A: 1\r\nX-A: 2\r\n\r\nx", status: 200, body: "x", length: 1, header: "1", reused: true},

	{name: "chunked", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n", status: 200, body: "hello world", length: -1, reused: true},
	{name: "chunked in capitals", wire: "HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\nA\r\n0123456789\r\n00\r\n\r\n", status: 200, body: "0123456789", length: -1, reused: true},
	{name: "chunk extensions", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b;c=\"d\"\r\nhello\r\n0;last\r\n\r\n", status: 200, body: "hello", length: -1, reused: true},
	{name: "chunk size padded", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5  \r\nhello\r\n0\r\n\r\n", status: 200, body: "hello", length: -1, reused: true},
	{name: "trailers", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-A\r\n\r\n1\r\nx\r\n0\r\nX-A: b\r\nX-B: c\r\n\r\n", status: 200, body: "x", length: -1, reused: true},
	{name: "chunked empty", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", status: 200, length: -1, reused: true},

	{name: "until close", wire: "HTTP/1.1 200 OK\r\n\r\nhello", closes: true, status: 200, body: "hello", length: -1},
	{name: "until close, empty", wire: "HTTP/1.1 200 OK\r\n\r\n", closes: true, status: 200, length: -1},
	{name: "version 1.0", wire: "HTTP/1.0 200 OK\r\n\r\nhello", closes: true, status: 200, body: "hello", length: -1},
	{name: "version 1.0 with length", wire: "HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", status: 200, body: "hello", length: 5},
	{name: "version 1.0 keep-alive", wire: "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\nhello", status: 200, body: "hello", length: 5, reused: true},
	{name: "connection close", wire: "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", status: 200, body: "hello", length: 5},
	{name: "connection close in a list", wire: "HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 5\r\n\r\nhello", status: 200, body: "hello", length: 5},
	{name: "engine closes unannounced", wire: "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", closes: true, status: 200, body: "hello", length: 5},

	{name: "100 first", wire: "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", status: 200, body: "x", length: 1, reused: true},
	{name: "103 and 102 first", wire: "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 102 P\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", status: 200, body: "x", length: 1, reused: true},
	{name: "101", wire: "HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n", op: OpHead, err: errSwitched},
	{name: "204", wire: "HTTP/1.1 204 No Content\r\n\r\n", status: 204, length: 0, reused: true},
	{name: "304 with the length of another", wire: "HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n", status: 304, length: 0, reused: true},
	{name: "HEAD", method: "HEAD", wire: "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", status: 200, length: 99, reused: true},
	{name: "HEAD chunked", method: "HEAD", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", status: 200, length: -1, reused: true},

	{name: "bytes behind the length", wire: "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhelloHTTP/1.1 200 OK\r\n", extra: 17, status: 200, body: "hello", length: 5},
	{name: "bytes behind the last chunk", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n", extra: 17, status: 200, body: "x", length: -1},
	{name: "bytes behind 204", wire: "HTTP/1.1 204 No Content\r\n\r\nx", extra: 1, status: 204, length: 0},

	{name: "lost in the length", wire: "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", closes: true, status: 200, body: "hel", length: 5, op: OpBody, err: io.ErrUnexpectedEOF},
	{name: "lost in a chunk", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", closes: true, status: 200, body: "hel", length: -1, op: OpBody, err: io.ErrUnexpectedEOF},
	{name: "lost behind a chunk", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", closes: true, status: 200, body: "hello", length: -1, op: OpBody, err: io.ErrUnexpectedEOF},
	{name: "lost before the last line", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", closes: true, status: 200, body: "x", length: -1, op: OpBody, err: io.ErrUnexpectedEOF},
	{name: "lost in the head", wire: "HTTP/1.1 200 OK\r\nContent-Le", closes: true, op: OpHead},
	{name: "lost behind 100", wire: "HTTP/1.1 100 Continue\r\n\r\n", closes: true, op: OpHead},
	{name: "no answer", wire: "", closes: true, op: OpHead, err: io.EOF},

	{name: "length and chunked", wire: "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", op: OpHead, err: errTwoFramings},
	{name: "chunked and length", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", op: OpHead, err: errTwoFramings},
	{name: "lengths differ", wire: "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", op: OpHead},
	{name: "length list", wire: "HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello", op: OpHead},
	{name: "length negative", wire: "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", op: OpHead},
	{name: "length signed", wire: "HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\nx", op: OpHead},
	{name: "length empty", wire: "HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n", op: OpHead, err: errLength},
	{name: "length overflows", wire: "HTTP/1.1 200 OK\r\nContent-Length: 9223372036854775808\r\n\r\n", op: OpHead},
	{name: "length overflows far", wire: "HTTP/1.1 200 OK\r\nContent-Length: 100000000000000000000000005\r\n\r\nhello", op: OpHead},
	{name: "coding unknown", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", op: OpHead},
	{name: "coding twice", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", op: OpHead},
	{name: "coding list", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", op: OpHead},
	{name: "chunked in 1.0", wire: "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", op: OpHead},
	{name: "folded line", wire: "HTTP/1.1 200 OK\r\nX-A: b\r\n c\r\nContent-Length: 1\r\n\r\nx", op: OpHead, err: errFolded},
	{name: "no colon", wire: "HTTP/1.1 200 OK\r\nX-A\r\nContent-Length: 1\r\n\r\nx", op: OpHead},
	{name: "no name", wire: "HTTP/1.1 200 OK\r\n: b\r\nContent-Length: 1\r\n\r\nx", op: OpHead},
	{name: "space before colon", wire: "HTTP/1.1 200 OK\r\nContent-Length : 1\r\n\r\nx", op: OpHead, err: errFieldLine},
	{name: "NUL in a value", wire: "HTTP/1.1 200 OK\r\nX-A: b\x00c\r\nContent-Length: 1\r\n\r\nx", op: OpHead, err: errFieldLine},
	{name: "CR in a value", wire: "HTTP/1.1 200 OK\r\nX-A: b\rc\r\nContent-Length: 1\r\n\r\nx", op: OpHead, err: errFieldLine},
	{name: "not HTTP", wire: "SSH-2.0-OpenSSH_9.2\r\n\r\n", op: OpHead},
	{name: "version 2", wire: "HTTP/2.0 200 OK\r\nContent-Length: 1\r\n\r\nx", op: OpHead, err: errStatusLine},
	{name: "status not a number", wire: "HTTP/1.1 2O0 OK\r\nContent-Length: 1\r\n\r\nx", op: OpHead},
	{name: "status of two digits", wire: "HTTP/1.1 20 OK\r\nContent-Length: 1\r\n\r\nx", op: OpHead},
	{name: "status of four digits", wire: "HTTP/1.1 2000 OK\r\nContent-Length: 1\r\n\r\nx", op: OpHead},
	{name: "status below 100", wire: "HTTP/1.1 099 OK\r\nContent-Length: 1\r\n\r\nx", op: OpHead, err: errStatusLine},
	{name: "empty line first", wire: "\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", op: OpHead},

	{name: "chunk size empty", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\nhello\r\n0\r\n\r\n", status: 200, length: -1, op: OpBody},
	{name: "chunk size no hex", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nxyz\r\n\r\n", status: 200, body: "hello", length: -1, op: OpBody},
	{name: "chunk size negative", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\nhello\r\n0\r\n\r\n", status: 200, length: -1, op: OpBody},
	{name: "chunk size 0x", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n", status: 200, length: -1, op: OpBody},
	{name: "chunk size overflows", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8000000000000000\r\nhello\r\n0\r\n\r\n", status: 200, length: -1, op: OpBody, err: errChunkSize},
	{name: "chunk size of 17 digits", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n00000000000000005\r\nhello\r\n0\r\n\r\n", status: 200, length: -1, op: OpBody},
	{name: "chunk line ends with LF", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n", status: 200, length: -1, op: OpBody},
	{name: "LF in an extension", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a\nhello\r\n0\r\n\r\n", status: 200, length: -1, op: OpBody},
	{name: "chunk longer than said", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello world\r\n0\r\n\r\n", status: 200, body: "hello", length: -1, op: OpBody},
	{name: "chunk line ends with CR", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\rhello\r\n0\r\n\r\n", status: 200, length: -1, op: OpBody},
	{name: "chunk size of two words", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5 5\r\nhello\r\n0\r\n\r\n", status: 200, length: -1, op: OpBody},
	{name: "chunk ends with CR", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r0\r\n\r\n", status: 200, body: "hello", length: -1, op: OpBody, err: errChunkEnd},
	{name: "trailer line ends with LF", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A: b\n\r\n", status: 200, length: -1, op: OpBody, err: errTrailer},
	{name: "trailer too large", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A: " + strings.Repeat("x", maxTrailer) + "\r\n\r\n", status: 200, length: -1, op: OpBody, err: errTrailerBytes},
	{name: "extension too long", wire: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;" + strings.Repeat("x", maxChunkLine) + "\r\nhello\r\n0\r\n\r\n", status: 200, length: -1, op: OpBody, err: errChunkLine},
}

// TestAnswers sends every answer in two parts, cut at every position.
func TestAnswers(t *testing.T) {
	for i := range answers {
		tt := &answers[i]
		t.Run(tt.name, func(t *testing.T) {
			step := 1 + len(tt.wire)/256
			last := len(tt.wire)
			if tt.extra > 0 {
				last -= tt.extra + 1 // part of the extra bytes must come with the answer
			}
			for cut := 0; cut <= last; cut += step {
				testAnswer(t, i, cut)
			}
		})
	}
}

func testAnswer(t *testing.T, row, cut int) {
	tt := &answers[row]
	e := newEngine(t, func(c *duplex, nth int) {
		if c.next() == nil {
			return
		}
		if nth > 1 {
			c.say(okAnswer)
			answering(c, nth)
			return
		}
		c.say(tt.wire[:cut])
		c.say(tt.wire[cut:])
		if tt.closes {
			return
		}
		answering(c, nth)
	})
	cl := New(e.options())
	defer e.stop()
	defer cl.CloseIdle()
	req := post("{}")
	if tt.method != "" {
		req = &Request{Method: tt.method, Path: "/"}
	}
	resp, err := cl.Do(t.Context(), req)
	if tt.status == 0 {
		if err == nil {
			resp.Close()
			t.Fatalf("cut %d: status %d, want a failure", cut, resp.Status)
		}
		checkFault(t, tt.op, tt.err, err)
	} else {
		if err != nil {
			t.Fatalf("cut %d: Do: %v", cut, err)
		}
		defer resp.Close()
		if resp.Status != tt.status || resp.ContentLength != tt.length || resp.Get("X-A") != tt.header {
			t.Fatalf("cut %d: status %d length %d X-A %q, want %d %d %q", cut, resp.Status, resp.ContentLength, resp.Get("X-A"), tt.status, tt.length, tt.header)
		}
		body, err := io.ReadAll(resp)
		if string(body) != tt.body {
			t.Fatalf("cut %d: body %q, want %q", cut, body, tt.body)
		}
		if tt.op == "" && err != nil {
			t.Fatalf("cut %d: read: %v", cut, err)
		}
		if tt.op != "" {
			checkFault(t, tt.op, tt.err, err)
		}
		if _, again := resp.Read(make([]byte, 1)); tt.op == "" && again != io.EOF || tt.op != "" && again != err {
			t.Fatalf("cut %d: second error %v after %v", cut, again, err)
		}
		resp.Close()
	}
	if !tt.closes && cl.Stats().Open != cl.Stats().Idle {
		t.Fatalf("cut %d: %+v: connection neither closed nor idle", cut, cl.Stats())
	}
	if _, body := ask(t, cl, post("again")); body != "ok" {
		t.Fatalf("cut %d: next answer %q", cut, body)
	}
	want := 2
	if tt.reused {
		want = 1
	}
	if got := e.dials(); got != want {
		t.Fatalf("cut %d: %d connections, want %d", cut, got, want)
	}
}

func checkFault(t *testing.T, op string, cause, err error) {
	t.Helper()
	e := fault(t, err, op)
	if !e.Sent || e.Timeout {
		t.Errorf("Sent %v Timeout %v, want true false", e.Sent, e.Timeout)
	}
	if cause != nil && !errors.Is(err, cause) {
		t.Fatalf("got error %v, want %v", err, cause)
	}
}

func TestHeadTooLarge(t *testing.T) {
	for _, size := range []int{100, 5000, 20000} {
		e := newEngine(t, func(c *duplex, _ int) {
			for c.next() != nil {
				c.say("HTTP/1.1 200 OK\r\nX-A: " + strings.Repeat("x", size) + "\r\nContent-Length: 0\r\n\r\n")
			}
		})
		o := e.options()
		o.MaxHeadBytes = 10000
		cl := New(o)
		defer cl.CloseIdle()
		resp, err := cl.Do(t.Context(), get())
		if size > o.MaxHeadBytes {
			fault(t, err, OpHead)
			continue
		}
		if err != nil {
			t.Fatalf("head of %d: %v", size, err)
		}
		if got := len(resp.Get("x-a")); got != size {
			t.Errorf("value of %d bytes, want %d", got, size)
		}
		resp.Close()
	}
}

func TestEndlessHeads(t *testing.T) {
	e := newEngine(t, func(c *duplex, _ int) {
		for c.next(); ; {
			if _, err := io.WriteString(c, "HTTP/1.1 103 Early Hints\r\n\r\n"); err != nil {
				return
			}
		}
	})
	_, err := New(e.options()).Do(t.Context(), get())
	fault(t, err, OpHead)
}

// A Read must return all events that have arrived, in however many chunks.
func TestReadTakesAllThatArrived(t *testing.T) {
	e := newEngine(t, func(c *duplex, _ int) {
		c.next()
		c.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n2\r\ncd\r\n")
		c.say("2\r\nef\r\n3\r\nghi\r\n2\r\njk\r\n")
		c.say("0\r\n\r\n")
		c.next()
	})
	cl := New(e.options())
	defer cl.CloseIdle()
	resp, err := cl.Do(t.Context(), get())
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Close()
	p := make([]byte, 100)
	for _, want := range []string{"abcd", "efghijk"} {
		n, err := resp.Read(p)
		if string(p[:n]) != want || err != nil {
			t.Errorf("Read = %q, %v, want %q", p[:n], err, want)
		}
	}
	if n, err := resp.Read(p); n != 0 || err != io.EOF {
		t.Errorf("Read = %d, %v, want EOF", n, err)
	}
}
