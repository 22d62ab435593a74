package edge

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

// framingStreams has the bytes of one connection in each row. No byte after a mark may pass,
// and net/http gets a malformed line there. At the mark "!" the head is refused; at the mark "|" a
// body has no end.
var framingStreams = []struct{ name, bytes string }{
	{"length", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhelloGET / HTTP/1.1\r\nHost: a\r\n\r\n"},
	{"no body", "GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"},
	{"chunked", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"},
	{"chunk extensions", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b;c=\"d\"\r\nhello\r\n1\r\nx\r\n0;e\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"},
	{"long chunk extension", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;" + strings.Repeat("x", 300) + "\r\nhello\r\n0\r\n\r\n"},
	{"trailers", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A: 1\r\nX-B: 2\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"},
	{"body that looks like a head", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 57\r\n\r\nGET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: x\r\n\r\n\r\n"},
	{"line ends before a request", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"},
	{"huge header line", "GET / HTTP/1.1\r\nHost: a\r\nX-A: " + strings.Repeat("content-length:", 500) + "\r\n\r\n"},
	{"huge request line", "GET /" + strings.Repeat("transfer-encoding: chunked", 300) + " HTTP/1.1\r\nHost: a\r\n\r\n"},
	{"lookalikes", "GET / HTTP/1.1\r\nHost: a\r\nX-Content-Length: 5\r\nContent-Length-X: 5\r\nTransfer-Encodings: chunked\r\n\r\n"},
	{"HTTP/1.0 with a length", "POST / HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello"},
	{"CONNECT with a length of nothing", "CONNECT a:80 HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"},
	{"line ends without CR before a request", "\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"},
	{"HTTP/2", http2Preface + "\x00\x00\x00\x04\x00\x00\x00\x00\x00Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"},

	{"length then coding", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n!\r\n0\r\n\r\n"},
	{"coding then length", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nX-A: b\r\nContent-Length: 5\r\n!\r\n0\r\n\r\n"},
	{"other case", "POST / HTTP/1.1\r\nHost: a\r\ncONTENT-lENGTH:5\r\nTRANSFER-ENCODING:CHUNKED\r\n!\r\n0\r\n\r\n"},
	{"tabs around a length", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\t 5 \t\r\n!\r\nhello"},
	{"tabs around a coding", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \t chunked\t\r\n!\r\n0\r\n\r\n"},
	{"unknown coding", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: identity\r\n!\r\nhello"},
	{"length of nothing", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n!\r\n0\r\n\r\n"},
	{"request line without CR", "POST / HTTP/1.1\n!Host: a\r\nContent-Length: 5\r\n\r\nhello"},
	{"header line without CR", "POST / HTTP/1.1\r\nHost: a\n!Content-Length: 5\r\n\r\nhello"},
	{"end of the head without CR", "GET / HTTP/1.1\r\nHost: a\r\n\n!GET / HTTP/1.1\r\nHost: a\r\n\r\n"},
	{"the same length twice", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 5\r\n!\r\nhello"},
	{"folded line of another name", "GET / HTTP/1.1\r\nHost: a\r\nX-A: b\r\n content-length: 5\r\n!\r\n"},
	{"CONNECT with a length", "CONNECT a:80 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n!\r\nhello"},
	{"CONNECT behind a bare CR", "GET / HTTP/1.1\r\nHost: a\r\n\r\n\rCONNECT a:80 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n!\r\nhello"},
	{"CONNECT without a target", "CONNECT  HTTP/1.1\r\n!Host: a\r\n\r\n"},
	{"CONNECT with a coding", "CONNECT a:80 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n!\r\n0\r\n\r\n"},
	{"GET", "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n!\r\n0\r\n\r\n"},
	{"good then bad", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhelloPOST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n!\r\n0\r\n\r\n"},
	{"chunked then bad", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-B: c\r\n\r\nPOST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n!\r\n0\r\n\r\n"},
	{"differing lengths", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n!\r\nhello"},
	{"signed length", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n!\r\nhello"},
	{"list of lengths", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5, 5\r\n!\r\nhello"},
	{"empty length then coding", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n!Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
	{"folded length", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n 0\r\n!\r\nhello"},
	{"length in a folded line", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n! 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
	{"folded coding", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\r\n\tchunked\r\n!\r\n0\r\n\r\n"},
	{"length past the line buffer", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length:" + strings.Repeat(" ", 60) + "5\r\n!Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
	{"zeros past the line buffer", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: " + strings.Repeat("0", 60) + "5\r\n!\r\nhello"},
	{"coding in HTTP/1.0", "POST / HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n!\r\nA /;x HTTP/1.1\r\n\r\n"},
	{"coding in HTTP/1.0 behind a long target", "POST /" + strings.Repeat("HTTP/1.1", 20) + " HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n!\r\n0\r\n\r\n"},
	{"preface with a header line", "PRI * HTTP/2.0\r\nHost: a\r\n\r\nPOST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n!\r\n0\r\n\r\n"},
	{"preface as the second request", "GET / HTTP/1.1\r\nHost: a\r\n\r\n" + http2Preface + "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n!\r\n0\r\n\r\n"},
	{"carriage returns before a request", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx\r\r\nPOST / HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n!\r\n0\r\n\r\n"},

	{"chunk size of no digits", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n|hello"},
	{"signed chunk size", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n+5\r\n|hello"},
	{"empty chunk size", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n\r\n|hello"},
	{"chunk size past all numbers", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n|"},
	{"chunk size and spaces", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5 \t\r\n|hello\r\n0\r\n\r\n"},
	{"chunk size without CR", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\n|hello\r\n0\r\n\r\n"},
	{"length in a trailer", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A: 1\r\nContent-Length: 7\r\n|\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"},
	{"coding in a trailer", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nTransfer-encoding: chunked\r\n|\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"},
	{"space in a name of a trailer", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A : 1\r\n|\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"},
	{"folded trailer", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A: 1\r\n\tX-B: 2\r\n|\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"},
	{"chunk size past the line buffer", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + strings.Repeat("0", 65) + "5\r\n|hello"},
}

// parseFramingStream removes the mark of s, and returns it, 0 without one. pass is what net/http
// gets, all is the whole text.
func parseFramingStream(s string) (pass, all string, mark byte) {
	if i := strings.IndexAny(s, "!|"); i >= 0 {
		return strings.TrimSuffix(s[:i], "\n") + malformedLine, s[:i] + s[i+1:], s[i]
	}
	return s, s, 0
}

// readFramed reads a whole connection through the guard into a buffer of room bytes. Each
// read of the guard ends at the next cut.
func readFramed(t *testing.T, all string, room int, cuts ...int) string {
	t.Helper()
	c := &framingConn{Conn: proxytest.NewScript(all, cuts...), tcp: &tcpConn{connection: &connection{all: newConnections(nil)}}, conns: new(clientConns)}
	var got bytes.Buffer
	buf := make([]byte, room)
	for {
		n, err := c.Read(buf)
		got.Write(buf[:n])
		if err == io.EOF {
			return got.String()
		}
		if n == 0 && err == nil {
			t.Fatal("a Read returned no byte and no error")
		}
	}
}

// The same bytes pass for all sizes of reads.
func TestFramingAtEverySplit(t *testing.T) {
	for _, tt := range framingStreams {
		t.Run(tt.name, func(t *testing.T) {
			want, all, _ := parseFramingStream(tt.bytes)
			check := func(how, got string) {
				t.Helper()
				if got != want {
					t.Fatalf("%s: passed\n%q, want\n%q", how, got, want)
				}
			}
			check("whole", readFramed(t, all, 1<<16))
			check("byte by byte", readFramed(t, all, 1))
			for i := range all {
				check(fmt.Sprintf("cut at %d", i), readFramed(t, all, 1<<16, i))
				check(fmt.Sprintf("cut at %d and %d", i, i+2), readFramed(t, all, 1<<16, i, i+2))
			}
		})
	}
}

// handled is a request as a handler behind net/http gets it.
type handled struct {
	method, uri, proto, body string
	err                      string
}

// serveStream runs net/http's server on one connection whose reads return all of the
// pieces, with or without the guard. It returns the requests of the handler and the bytes
// for the client.
func serveStream(all string, guard bool, cuts ...int) (got []handled, sent string) {
	var mu sync.Mutex
	conn := proxytest.NewScript(all, cuts...)
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	closed := make(chan struct{})
	srv := &http.Server{
		Protocols: &protocols,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			h := handled{method: r.Method, uri: r.RequestURI, proto: r.Proto, body: string(body)}
			if err != nil {
				h.err = "broken"
			}
			mu.Lock()
			defer mu.Unlock()
			got = append(got, h)
			w.Header()["Date"] = nil
			w.Write([]byte("handled"))
		}),
		ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateClosed {
				close(closed)
			}
		},
	}
	var l net.Listener = proxytest.OneConn(conn)
	if guard {
		room := newConnections(func() (all, perAddress int) { return 1, 0 })
		l = framingListener{tcpListener{l, room, true}, new(clientConns), 64 << 10}
		h := srv.Handler
		srv.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { // as tcpHandler, but the end of the script breaks no request
			r.Context().Value(connKey{}).(*framingConn).handled.Store(r.ProtoMajor < 2)
			h.ServeHTTP(w, r)
		})
		srv.ConnContext = connContext
		srv.ConnState = func(c net.Conn, s http.ConnState) {
			connState(c, s)
			if s == http.StateClosed {
				close(closed)
			}
		}
	}
	served := make(chan struct{})
	go func() {
		srv.Serve(l)
		close(served)
	}()
	<-closed
	srv.Close()
	<-served
	return got, conn.Sent()
}

// No byte passes after a trailer line that ends in a bare LF. So the handler does not get
// the bytes behind it as another request.
func TestFramingTrailerWithoutCR(t *testing.T) {
	const head, next = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", "GET /next HTTP/1.1\r\nHost: a\r\n\r\n"
	for _, tt := range []struct{ pass, rest string }{
		{"0\r\n\n", next},
		{"0\r\nX: y\n", "\n" + next},
		{"0\r\nX: y\r\n\n", next},
		{"3\r\nabc\r\n0\r\nX: " + strings.Repeat("y", 100) + "\n", "\r\n" + next},
	} {
		for cut := range len(head + tt.pass) {
			if got := readFramed(t, head+tt.pass+tt.rest, 4096, cut); got != head+strings.TrimSuffix(tt.pass, "\n")+malformedLine {
				t.Fatalf("%q, split at %d: got %q", tt.pass+tt.rest, cut, got)
			}
		}
		synctest.Test(t, func(t *testing.T) {
			got, _ := serveStream(head+tt.pass+tt.rest, true)
			if len(got) > 1 || len(got) == 1 && got[0].method != "POST" {
				t.Errorf("%q: the handler got %+v", tt.pass+tt.rest, got)
			}
		})
	}
}

// With the guard net/http answers 400 where it would otherwise have accepted ambiguous
// framing, and the handler does not get the request. In all other cases the guard changes
// nothing.
func TestFramingBelowServer(t *testing.T) {
	for _, tt := range framingStreams {
		if tt.name == "HTTP/2" {
			continue // TestFrontProtocols has real frames
		}
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				pass, all, mark := parseFramingStream(tt.bytes)
				got, sent := serveStream(all, true)
				switch {
				case mark == '!':
					// net/http closes the connection after bytes that it does not
					// recognize as an HTTP/2 preface.
					preface := len(got) > 0 && got[len(got)-1].method == "PRI" && strings.HasSuffix(sent, "Connection: close\r\n\r\nhandled")
					if _, status := cutRefusal(t, sent); !preface && status != "400" {
						t.Errorf("the client received %q", sent)
					}
					before, _ := serveStream(pass, false)
					if fmt.Sprint(got) != fmt.Sprint(before) {
						t.Errorf("the handler got %+v, want %+v", got, before)
					}
				default:
					want, answers := serveStream(pass, false)
					sent, status := cutRefusal(t, sent)
					answers, wantStatus := cutPlainRefusal(answers)
					if fmt.Sprint(got) != fmt.Sprint(want) || sent != answers || status != wantStatus {
						t.Errorf("the handler got %+v, without the guard %+v;\nthe client %q, without %q", got, want, sent, answers)
					}
				}
			})
		})
	}
}

// cutPlainRefusal cuts the answer with which net/http refuses the last head by itself, and
// returns its status; "" without one.
func cutPlainRefusal(sent string) (before, status string) {
	const begin = "HTTP/1.1 "
	i := strings.LastIndex(sent, begin)
	if i < 0 || sent[i+len(begin)] < '4' {
		return sent, ""
	}
	return sent[:i], sent[i+len(begin):][:3]
}

// cutRefusal is cutPlainRefusal for the answer of the guard, which it checks.
func cutRefusal(t *testing.T, sent string) (before, status string) {
	t.Helper()
	before, status = cutPlainRefusal(sent)
	if status != "" {
		checkRefusal(t, sent[len(before):])
	}
	return before, status
}

// checkRefusal checks the form of a refusal over HTTP/1.1, and returns its status, code and
// message.
func checkRefusal(t *testing.T, answer string) (status int, code, message string) {
	t.Helper()
	resp, err := http.ReadResponse(bufio.NewReader(strings.NewReader(answer)), nil)
	if err != nil {
		t.Fatalf("%v: %q", err, answer)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Errorf("%v: %q", err, answer)
	}
	var e struct {
		Error struct {
			Message, Type string
			Code          *string
			Param         *string
		}
	}
	if err := json.Unmarshal(body, &e); err != nil || e.Error.Message == "" || e.Error.Type != "invalid_request_error" || e.Error.Code == nil {
		t.Errorf("%v: %q", err, answer)
		return resp.StatusCode, "", ""
	}
	_, text, _ := strings.Cut(answer, "\r\n\r\n")
	if !resp.Close || resp.Header.Get("Content-Type") != "application/json" || len(resp.Header.Get("X-Request-Id")) != 32 || resp.ContentLength != int64(len(text)) {
		t.Errorf("got %q", answer)
	}
	return resp.StatusCode, *e.Error.Code, e.Error.Message
}
