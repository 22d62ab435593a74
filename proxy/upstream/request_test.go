package upstream

import (
	"bytes"
	"crypto/rand"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
)

// The bytes that the own client sends are fixed: order, case, one Content-Length.
func TestWireBytes(t *testing.T) {
	tests := []struct {
		name string
		req  Request
		want string
	}{
		{
			name: "post",
			req: Request{
				Method: "POST", Path: "/v1/completions?a=b%20c",
				Header: []Field{{"content-type", "application/json"}, {"Host", "evil"}, {"X-Request-Id", "7"}, {"content-length", "99"}, {"x-empty", ""}},
				Body:   [][]byte{[]byte(`{"a":`), nil, []byte(`1}`)},
			},
			want: "POST /v1/completions?a=b%20c HTTP/1.1\r\nHost: engine:8000\r\ncontent-type: application/json\r\nX-Request-Id: 7\r\nx-empty: \r\nContent-Length: 7\r\n\r\n{\"a\":1}",
		},
		{name: "get", req: Request{Path: "/health"}, want: "GET /health HTTP/1.1\r\nHost: engine:8000\r\n\r\n"},
		{name: "double slash", req: Request{Path: "//health"}, want: "GET //health HTTP/1.1\r\nHost: engine:8000\r\n\r\n"},
		{name: "post nothing", req: Request{Method: "POST", Path: "/flush"}, want: "POST /flush HTTP/1.1\r\nHost: engine:8000\r\nContent-Length: 0\r\n\r\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := make([]byte, len(tt.want))
			e := newEngine(t, func(c *duplex, _ int) {
				io.ReadFull(c, got)
				c.say(okAnswer)
				c.next()
			})
			ask(t, e.client(t, nil), &tt.req)
			if string(got) != tt.want {
				t.Errorf("got  %q\nwant %q", got, tt.want)
			}
		})
	}
}

// Engines read the same request from both clients.
func TestRequestArrives(t *testing.T) {
	big := make([]byte, 300<<10)
	rand.Read(big)
	bodies := [][][]byte{nil, {[]byte("{}")}, {nil, []byte("a"), {}, []byte("b")}, {big}, {[]byte("x"), big[:9000], big[9000:]}}
	for _, method := range []string{"GET", "POST", "DELETE"} {
		for _, body := range bodies {
			var got *http.Request
			e := newEngine(t, func(c *duplex, _ int) {
				for {
					r := c.next()
					if r == nil {
						return
					}
					got = r
					c.say(okAnswer)
				}
			})
			cl := e.client(t, nil)
			ask(t, cl, &Request{
				Method: method, Path: "//a/%2F/b?q=%41&r", Body: body,
				Header: []Field{{"x-two", "1"}, {"X-Two", "2"}, {"accept", "*/*"}, {"TRANSFER-NOT", "x"}},
			})
			cl.CloseIdle()
			e.stop()
			if got.Method != method || got.Host != "engine:8000" || got.RequestURI != "//a/%2F/b?q=%41&r" {
				t.Errorf("got %s %s %s", got.Method, got.Host, got.RequestURI)
			}
			want := http.Header{"X-Two": {"1", "2"}, "Accept": {"*/*"}, "Transfer-Not": {"x"}}
			got.Header.Del("Content-Length")
			if len(got.Header) != len(want) || !slices.Equal(got.Header["X-Two"], want["X-Two"]) || got.Header.Get("Transfer-Not") != "x" {
				t.Errorf("header %v, want %v", got.Header, want)
			}
			read, _ := io.ReadAll(got.Body)
			if !bytes.Equal(read, bytes.Join(body, nil)) {
				t.Errorf("%s: body of %d bytes differs", method, len(read))
			}
		}
	}
}

func TestRequestRefused(t *testing.T) {
	field := func(name, value string) Request {
		return Request{Path: "/", Header: []Field{{"X-Fine", "1"}, {name, value}}}
	}
	tests := []struct {
		name string
		req  Request
	}{
		{"CR in value", field("X-A", "b\rc")},
		{"LF in value", field("X-A", "b\nc")},
		{"CRLF and a line in value", field("X-A", "b\r\nX-C: d")},
		{"NUL in value", field("X-A", "b\x00")},
		{"DEL in value", field("X-A", "\x7f")},
		{"name with colon", field("X-A:", "b")},
		{"name with space", field("X A", "b")},
		{"name with LF", field("X-A\n", "b")},
		{"name empty", field("", "b")},
		{"name not ASCII", field("X-Ä", "b")},
		{"value of Host", field("Host", "a\r\nX: y")},
		{"transfer coding", field("transfer-encoding", "chunked")},
		{"path with LF", Request{Path: "/a\nb"}},
		{"path with space", Request{Path: "/a HTTP/1.1\r\nX: y"}},
		{"path with NUL", Request{Path: "/\x00"}},
		{"path empty", Request{}},
		{"path absolute", Request{Path: "http://evil/"}},
		{"method with space", Request{Method: "GET /", Path: "/"}},
		{"method with LF", Request{Method: "GET\n", Path: "/"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := newEngine(t, answering)
			_, err := e.client(t, nil).Do(t.Context(), &tt.req)
			if f := fault(t, err, OpWrite); f.Sent {
				t.Error("Sent")
			}
			if e.dials() != 0 {
				t.Error("a connection was opened")
			}
			if strings.Contains(err.Error(), "evil") {
				t.Errorf("error quotes the request: %v", err)
			}
		})
	}
}

func TestBadURL(t *testing.T) {
	for _, o := range []Options{{}, {URL: mustURL("ftp://engine")}, {URL: mustURL("http://")}, {URL: mustURL("engine:8000")}} {
		_, err := New(o).Do(t.Context(), get())
		if f := fault(t, err, OpDial); f.Sent {
			t.Error("Sent")
		}
	}
}

func TestAddress(t *testing.T) {
	for in, want := range map[string]string{
		"http://a": "a:80", "https://a": "a:443", "http://a:1": "a:1", "https://[::1]": "[::1]:443", "http://[fe80::1]:8000/v1": "[fe80::1]:8000",
	} {
		if got := (Options{URL: mustURL(in)}).address(); got != want {
			t.Errorf("%s: address = %s, want %s", in, got, want)
		}
	}
}

// An engine that rejects a body before it has read all of it closes the connection
// while the request is being sent. Its answer counts, not the failed write.
func TestEarlyAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(c *duplex, _ int) {
			io.ReadFull(c, make([]byte, 10))
			c.CloseRead() // the client's write fails
			c.say("HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
		})
		cl := e.client(t, nil)
		resp, body := ask(t, cl, post(strings.Repeat("x", 1<<20)))
		if resp.Status != 413 || body != "big" {
			t.Errorf("answer %d %q", resp.Status, body)
		}
		if s := cl.Stats(); s.Open != 0 {
			t.Errorf("%+v: the connection stays open", s)
		}
	})
}

// Body memory belongs to the caller again once Do has returned, even if the transport
// is still sending: the engine must receive the whole request or an incomplete one,
// never changed bytes.
func TestBodyReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got bytes.Buffer
		e := newEngine(t, func(c *duplex, _ int) {
			io.CopyN(&got, c, 100)
			c.say(okAnswer)
			io.Copy(&got, c)
		})
		cl := e.client(t, nil)
		body := bytes.Repeat([]byte("a"), 200<<10)
		resp, err := cl.Do(t.Context(), &Request{Method: "POST", Path: "/", Body: [][]byte{body}})
		for i := range body {
			body[i] = 'b'
		}
		if err == nil {
			io.Copy(io.Discard, resp)
			resp.Close()
		}
		cl.CloseIdle()
		e.stop()
		if i := bytes.IndexByte(got.Bytes(), 'b'); i >= 0 {
			t.Errorf("byte %d of %d is of the memory's next use", i, got.Len())
		}
	})
}
