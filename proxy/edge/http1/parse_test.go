package http1

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

const (
	get      = "GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
	post     = "POST /y?q=1 HTTP/1.1\r\nHost: b:1\r\nContent-Length: 5\r\n\r\nhello"
	postHead = "POST / HTTP/1.1\r\nHost: a\r\n"
	coded    = postHead + "Transfer-Encoding: chunked\r\n\r\n"
)

// good are connections whose requests net/http accepts too.
var good = []string{
	get, post, get + post + get, post + "\r\n" + get, post + "\r\n\r\n" + post,
	"GET / HTTP/1.0\r\n\r\n",
	"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + get,
	"GET / HTTP/1.1\r\nHost: a\r\nConnection: x, Close\r\n\r\n" + get,
	"GET http://h:2/p?q HTTP/1.1\r\nHost: a\r\n\r\n",
	"GET http://h?q HTTP/1.1\r\nHost:\r\n\r\n",
	"GET /a%20b;c=%2f?x=%41&y HTTP/1.1\r\nHost: [::1]:8\r\n\r\n",
	"GET //two/../x HTTP/1.1\r\nHost: a\r\n\r\n",
	"GET /[]\"<>\\^`{|} HTTP/1.1\r\nHost: a\r\n\r\n",
	"GET /? HTTP/1.1\r\nHost: a\r\n\r\n",
	"GET /%C3%A4?\"[] HTTP/1.1\r\nHost: a\r\n\r\n",
	"GET / HTTP/1.1\r\nhOST: a\r\nx-low: \t v  w\t \r\nX-Low: 2\r\nEmpty:\r\nX-High: \xff\x80\r\n\r\n",
	"CONNECT h:443 HTTP/1.1\r\nHost: h:443\r\n\r\n" + get, "CONNECT /x HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n" + get,
	post + "\n" + get, post + "\r\r\n\n" + get,
	"GET /x#a HTTP/1.1\r\nHost: a\r\n\r\n", "GET http:///p HTTP/1.1\r\nHost: a\r\n\r\n", "GET http://u:p@h/ HTTP/1.1\r\nHost: a\r\n\r\n",
	"DELETE / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n" + get,
	"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n" + get,
	"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n" + get,
	"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc" + get,
	"POST / HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc",
	postHead + "Content-Length:  0005 \r\n\r\nhello" + get,
	postHead + "Expect: 100-continue\r\nContent-Length: 5\r\n\r\nhello" + get,
	postHead + "Expect: 100-Continue\r\n\r\n" + get, postHead + "Expect:\r\n\r\n" + get,
	postHead + "Expect: 100-continue, x\r\nContent-Length: 5\r\n\r\nhello" + get,
	postHead + "Trailer: X-A\r\nContent-Length: 1\r\n\r\nx" + get,
	coded + "5\r\nhello\r\n0\r\n\r\n" + get,
	coded + "0\r\n\r\n" + get, coded + "5;;a\r\nhello\r\n0;=b\r\nHost: b\r\n\r\n" + get,
	coded + "5;a=b;c=\"d \\\" e\";f\r\nhello\r\n00A;g\r\n0123456789\r\n0;h=\r\n\r\n" + get,
	coded + "5;" + strings.Repeat("x", 300) + "\r\nhello\r\n0\r\n\r\n" + get,
	coded + "1\r\na\r\n1\r\nb\r\n0\r\nX-A: 1\r\nx-b: \t2 \r\nX-A: 3\r\n\r\n" + get,
	postHead + "Trailer: x-a, X-B\r\nTransfer-Encoding:  Chunked \r\n\r\n1\r\nx\r\n0\r\nX-A: 1\r\n\r\n" + get,
	postHead + "Content-Length: 6000\r\n\r\n" + strings.Repeat("x", 6000) + get,
	coded + "1770\r\n" + strings.Repeat("x", 6000) + "\r\n0\r\n\r\n" + get,
	"GET / HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("y", 9000) + "\r\n\r\n" + get,
	"GET / HTTP/1.1\r\nHost: a\r\n" + strings.Repeat("X: y\r\n", 1000) + "\r\n" + get,
	// the connection ends
	postHead + "Content-Length: 5\r\n\r\nhel",
	coded + "5\r\nhel", coded + "5\r\nhello\r\n0\r\n", coded + "5", coded + "5\r\nhello\r\n0\r\nX: y\r\n",
}

// bad are connections with a refused head. The mark "!" is in front of it. net/http accepts some
// of them.
var bad = []struct {
	why   Refusal
	bytes []string
}{
	{Malformed, []string{
		"\r\n" + get, get + "!\r\n" + get, post + "\r\n\r\n!\r\n" + get,
		"hello\r\n\r\n", "GET /\r\n\r\n", "GET / HTTP/1.1 \r\nHost: a\r\n\r\n", "GET  / HTTP/1.1\r\nHost: a\r\n\r\n", " GET / HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET / HTTP/1.1\rHost: a\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\rX: y\r\n\r\n", "GET / HTTP/1.1\r\r\nHost: a\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: a\r\n: z\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nXyz\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: a\r\nX\x00: z\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nX: \x7f\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nX: a\x0bb\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nX\x80: b\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", "G(T / HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET /\x80 HTTP/1.1\r\nHost: a\r\n\r\n", "GET /\x00 HTTP/1.1\r\nHost: a\r\n\r\n", "GET /%zz HTTP/1.1\r\nHost: a\r\n\r\n", "GET a HTTP/1.1\r\nHost: a\r\n\r\n", "GET *a HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET http://u@v@h/ HTTP/1.1\r\nHost: a\r\n\r\n", "GET ht+tp://h/ HTTP/1.1\r\nHost: a\r\n\r\n", "CONNECT a/b HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET / http/1.1\r\nHost: a\r\n\r\n", "GET / HTTP/11\r\nHost: a\r\n\r\n", "GET / HTTP/1.\r\nHost: a\r\n\r\n", "GET / HTTP/01.1\r\nHost: a\r\n\r\n",
		get + "!GET / HTTP/1.1\r\nHo", "G", postHead + "Trailer: Content-Length\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	}},
	{BadLine, []string{
		"\n" + get, get + "!\n" + get, post + "\n\n\n\n!\n" + get,
		"GET / HTTP/1.1\nHost: a\n\n", "GET / HTTP/1.1\r\nHost: a\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\n\n", "GET / HTTP/1.1\nHost: a\r\n\r\n",
		"GET / HTTP/1.1\r\n Host: a\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n z\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\n\tX: y\r\n\r\n",
		postHead + "Content-Length: 1\r\n 0\r\n\r\nhello", postHead + "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
	}},
	{BadName, []string{"GET / HTTP/1.1\r\nHost : a\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nX y: z\r\n\r\n"}},
	{NoHost, []string{"GET / HTTP/1.1\r\n\r\n", "GET http://a/ HTTP/1.1\r\n\r\n", get + "!GET / HTTP/1.1\r\nX: y\r\n\r\n"}},
	{BadHost, []string{"GET / HTTP/1.1\r\nHost: a\"b\r\n\r\n", "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", "GET / HTTP/1.0\r\nHost: a b\r\n\r\n"}},
	{UnclearLength, []string{
		postHead + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", postHead + "Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n",
		postHead + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", postHead + "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
		postHead + "Content-Length: 5, 5\r\n\r\nhello", postHead + "Content-Length: +5\r\n\r\nhello", postHead + "Content-Length: -5\r\n\r\nhello", postHead + "Content-Length: 0x5\r\n\r\nhello", postHead + "Content-Length:\r\n\r\nhello",
		postHead + "Content-Length: 5 5\r\n\r\nhello", postHead + "Content-Length: 99999999999999999999\r\n\r\n", postHead + "Content-Length: 9223372036854775808\r\n\r\n", postHead + "Content-Length:" + strings.Repeat(" ", 60) + "5\r\n\r\nhello",
		postHead + "Content-Length: 5\t\r\n\r\nhello", postHead + "Content-Length:\t5\r\n\r\nhello", postHead + "Transfer-Encoding: chunked\t\r\n\r\n0\r\n\r\n", postHead + "Transfer-Encoding:\tchunked\r\n\r\n0\r\n\r\n",
		"CONNECT a:80 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello", "CONNECT a:80 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", post + "!" + postHead + "Content-Length: 5\r\nTransfer-Encoding: x\r\n\r\n",
	}},
	{HeadTooLarge, []string{
		"GET / HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("y", 70<<10) + "\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("y", 70<<10),
		"GET /" + strings.Repeat("y", 70<<10) + " HTTP/1.1\r\nHost: a\r\n\r\n", get + "!GET / HTTP/1.1\r\nHost: a\r\n" + strings.Repeat("X: y\r\n", 20<<10) + "\r\n",
		"GET / HTTP/1.1\r\nHost: a\r\n" + strings.Repeat("X: y\r\n", 2000) + "\r\n", // 12 KB, which the header takes several times
	}},
	{BadExpectation, []string{postHead + "Expect: 200-ok\r\n\r\n", "GET / HTTP/1.0\r\nExpect: x\r\n\r\n"}},
	{UnknownCoding, []string{
		postHead + "Transfer-Encoding: gzip\r\n\r\n", postHead + "Transfer-Encoding: gzip, chunked\r\n\r\n", postHead + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		postHead + "Transfer-Encoding: identity\r\n\r\n", postHead + "Transfer-Encoding:\r\n\r\n", postHead + "Transfer-Encoding: \"chunked\"\r\n\r\n", postHead + "Transfer-Encoding: chunked;a\r\n\r\n",
	}},
	{UnknownMethod, []string{"FOO / HTTP/1.1\r\nHost: a\r\n\r\n", "get / HTTP/1.1\r\nHost: a\r\n\r\n"}},
	{UnknownVersion, []string{"GET / HTTP/1.2\r\nHost: a\r\n\r\n", "GET / HTTP/2.0\r\nHost: a\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "GET / HTTP/0.9\r\nHost: a\r\n\r\n"}},
}

// badBodies are chunked bodies that break the connection: no byte behind them is another request.
var badBodies = []string{
	"x\r\n", "\r\n", " 5\r\nhello\r\n0\r\n\r\n", "5 \r\nhello\r\n0\r\n\r\n", "+5\r\nhello\r\n0\r\n\r\n", "-1\r\n", "0x5\r\nhello\r\n0\r\n\r\n", "5\nhello\r\n0\r\n\r\n", "5\r\nhello\n0\r\n\r\n", "5\r\nhelloXX0\r\n\r\n", "5\r\nhello0\r\n\r\n",
	"5;\r\nhello\r\n0\r\n\r\n", "5; a\r\nhello\r\n0\r\n\r\n", "5;a\nhello\r\n0\r\n\r\n", "5;a\rb\r\nhello\r\n0\r\n\r\n", "5;a=\"\n\"\r\nhello\r\n0\r\n\r\n", "5;a=\"b\"c\r\nhello\r\n0\r\n\r\n",
	"ffffffffffffffff\r\n", "0000000000000005\r\nhello\r\n0\r\n\r\n", "5;" + strings.Repeat("a", 5000) + "\r\nhello\r\n0\r\n\r\n", strings.Repeat("1;"+strings.Repeat("a", 300)+"\r\nx\r\n", 100) + "0\r\n\r\n",
	"0\n\n", "0\r\n\n", "0\r\n\r", "0\r\nX: y\n\r\n", "0\r\nX: y\r\n\n", "0\r\nX\r\n\r\n", "0\r\nX : y\r\n\r\n", "0\r\n X: y\r\n\r\n", "0\r\nX: y\r\n z\r\n\r\n", "0\r\nX: \x00\r\n\r\n",
	"0\r\nContent-Length: 5\r\n\r\n", "0\r\nTransfer-Encoding: chunked\r\n\r\n", "0\r\nTrailer: x\r\n\r\n", "0\r\nX: " + strings.Repeat("y", 5000) + "\r\n\r\n",
}

// cutsOf returns where to split the reads of a connection: everywhere in short ones.
func cutsOf(s string) [][]int {
	list := [][]int{nil}
	step := max(1, len(s)/400)
	for i := 1; i < len(s); i += step {
		list = append(list, []int{i}, []int{i, i + 1}, []int{i, i + 3})
	}
	bytes := make([]int, len(s))
	for i := range bytes {
		bytes[i] = i
	}
	return append(list, bytes)
}

// The handler gets the same requests as from net/http, for every split of the reads.
func TestGood(t *testing.T) {
	for _, all := range good {
		_, want, _ := both(all)
		for i := range want {
			if want[i].trailer == "map[]" {
				want[i].trailer = fmt.Sprint(map[string][]string(nil))
			}
		}
		for _, cuts := range cutsOf(all) {
			var got record
			sent := serveScript(newServer(&got), all, cuts...)
			if !slices.Equal(got.list, want) {
				t.Fatalf("%q cut at %v:\ngot  %+v\nwant %+v", all, cuts, got.list, want)
			}
			if strings.Contains(sent, "refused") {
				t.Fatalf("%q cut at %v: %q", all, cuts, sent)
			}
		}
	}
}

// A bad head is refused behind the answers of the requests before, and its handler is not called.
func TestBad(t *testing.T) {
	for _, tt := range bad {
		for _, marked := range tt.bytes {
			before, rest, found := strings.Cut(marked, "!")
			if !found {
				before, rest = "", marked
			}
			var want record
			serveScript(newServer(&want), before)
			for _, cuts := range cutsOf(before + rest) {
				var got record
				sent := serveScript(newServer(&got), before+rest, cuts...)
				_, refused := answers(t, sent)
				if !slices.Equal(got.list, want.list) || refused != refusal(tt.why) {
					t.Fatalf("%.200q cut at %v: the handler got %+v, the client %q, want %s", marked, cuts, got.list, sent, tt.why)
				}
				if len(cuts) > 0 && len(rest) > 10<<10 {
					break
				}
			}
		}
	}
}

// No request follows a malformed body.
func TestBadBodies(t *testing.T) {
	for _, body := range badBodies {
		all := coded + body + get
		for _, cuts := range cutsOf(all) {
			var got record
			sent := serveScript(newServer(&got), all, cuts...)
			if len(got.list) != 1 || !got.list[0].failed || strings.Count(sent, "served") != 1 {
				t.Fatalf("%.200q cut at %v: the handler got %+v, the client %q", body, cuts, got.list, sent)
			}
		}
	}
}

// FuzzParse compares with net/http: this server accepts no request that net/http refuses, and both
// see the same requests.
func FuzzParse(f *testing.F) {
	for _, s := range good {
		f.Add([]byte(s), uint16(len(s)/2))
	}
	for _, tt := range bad {
		for _, s := range tt.bytes {
			f.Add([]byte(strings.Replace(s, "!", "", 1)), uint16(len(s)/2))
		}
	}
	for _, s := range badBodies {
		f.Add([]byte(coded+s+get), uint16(len(coded)+len(s)/2))
	}
	f.Fuzz(func(t *testing.T, in []byte, cut uint16) {
		if len(in) > 16<<10 {
			return
		}
		own, ref, sent := both(string(in), int(cut))
		if len(own) > len(ref) {
			t.Fatalf("%q: got %+v, net/http %+v", in, own, ref)
		}
		for i := range own {
			a, b := own[i], ref[i]
			if a.failed { // the rest of the body is not used; net/http may read it as another body
				a.body, b.body, a.trailer, b.trailer, b.failed = "", "", "", "", true
			}
			if strings.Contains(strings.ToLower(a.header), "proxy-connection") {
				a.close = b.close
			}
			if b.trailer == "map[]" {
				b.trailer = a.trailer
			}
			if strings.Contains(b.header, "Cache-Control:[no-cache]") { // net/http adds it for Pragma
				b.header = a.header
			}
			if a != b {
				t.Fatalf("%q: request %d:\ngot      %+v\nnet/http %+v", in, i, a, b)
			}
		}
		if n := strings.Count(sent, "served"); n > len(own) {
			t.Fatalf("%q: %d requests, but %q", in, len(own), sent)
		}
	})
}
