package security

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// framingCase is one stream of bytes over HTTP/1. In it BODY stands for a chat
// request's body, LEN for its length in bytes, CHUNKS for the same body in one
// chunk without the last one, and INNER for a whole second request.
type framingCase struct {
	name string
	sent string
	// served is the number of requests that must get the status 200 and reach
	// the engine. -1 means none or one: both are right.
	served int
	half   bool // the client closes its side after the bytes
}

const (
	postLine = "POST " + chatPath + " HTTP/1.1\r\nHost: x\r\n"
	lenLine  = "Content-Length: LEN\r\n"
	endBody  = "\r\nBODY"
	chunked  = "Transfer-Encoding: chunked\r\n"
	plain    = postLine + lenLine + endBody
)

// framingCases are streams for which two HTTP implementations may disagree
// about the end of a request.
func framingCases() []framingCase {
	h := func(name, lines string, served int) framingCase {
		return framingCase{name: name, sent: postLine + lines, served: served}
	}
	raw := func(name, sent string, served int) framingCase {
		return framingCase{name: name, sent: sent, served: served}
	}
	lead := func(name, line string, served int) framingCase { return h(name, line+lenLine+endBody, served) }
	return []framingCase{
		raw("plain", plain, 1),
		h("CL and TE", lenLine+chunked+"\r\n0\r\n\r\nINNER", 0),
		h("TE and CL", chunked+"Content-Length: 4\r\n\r\nCHUNKS0\r\n\r\n", 0),
		h("two CL that differ", "Content-Length: 5\r\n"+lenLine+endBody, 0),
		h("two CL that are equal", lenLine+lenLine+endBody, -1),
		h("CL list", "Content-Length: LEN, LEN\r\n\r\nBODY", 0),
		h("CL with plus", "Content-Length: +LEN\r\n\r\nBODY", 0),
		h("CL in hex", "Content-Length: 0x10\r\n\r\nBODY", 0),
		h("CL negative", "Content-Length: -1\r\n\r\nBODY", 0),
		h("CL with space before the colon", "Content-Length : LEN\r\n\r\nBODY", 0),
		h("CL folded", "Content-Length:\r\n LEN\r\n\r\nBODY", -1),
		h("CL after 80 spaces", "Content-Length:"+strings.Repeat(" ", 80)+"LEN\r\n\r\nBODY", -1),
		h("CL too large for 64 bits", "Content-Length: 99999999999999999999\r\n\r\nBODY", 0),
		lead("TE with space before the colon", "Transfer-Encoding : chunked\r\n", 0),
		h("TE xchunked", "Transfer-Encoding: xchunked\r\n\r\nCHUNKS0\r\n\r\n", 0),
		h("TE chunked, identity", "Transfer-Encoding: chunked, identity\r\n\r\nCHUNKS0\r\n\r\n", 0),
		h("TE twice", chunked+"Transfer-Encoding: identity\r\n\r\nCHUNKS0\r\n\r\n", 0),
		lead("TE with a vertical tab", "Transfer-Encoding:\x0bchunked\r\n", 0),
		lead("TE folded", "Transfer-Encoding:\r\n chunked\r\n", 0),
		lead("TE in a folded line of another", "X: a\r\n Transfer-Encoding: chunked\r\n", -1),
		raw("TE in HTTP/1.0", strings.Replace(postLine, "1.1", "1.0", 1)+chunked+"\r\nCHUNKS0\r\n\r\n", -1),
		h("chunks", chunked+"\r\nCHUNKS0\r\n\r\n", 1),
		h("chunk extension", chunked+"\r\nHEX;a=b;c=\"d\"\r\nBODY\r\n0;x\r\n\r\n", 1),
		h("chunk extension with a bare LF", chunked+"\r\nHEX;a\nBODY\r\n0\r\n\r\n", 0),
		h("chunk sizes end with a bare LF", chunked+"\r\nHEX\nBODY\n0\n\n", 0),
		h("chunk size with 0x", chunked+"\r\n0xHEX\r\nBODY\r\n0\r\n\r\n", 0),
		h("chunk size too large for 64 bits", chunked+"\r\n100000000000000HEX\r\nBODY\r\n0\r\n\r\n", 0),
		h("chunk size negative", chunked+"\r\n-1\r\nBODY\r\n0\r\n\r\n", 0),
		h("chunk data without CRLF", chunked+"\r\nHEX\r\nBODYXX0\r\n\r\n", 0),
		h("chunk extension of 5000 bytes", chunked+"\r\nHEX;"+strings.Repeat("a", 5000)+"\r\nBODY\r\n0\r\n\r\n", 0),
		h("trailer with CL", chunked+"Trailer: Content-Length\r\n\r\nCHUNKS0\r\nContent-Length: 5\r\n\r\n", -1),
		h("trailer with a PD header", chunked+"Trailer: X-Data-Parallel-Rank\r\n\r\nCHUNKS0\r\nX-Data-Parallel-Rank: 3\r\n\r\n", -1),
		h("trailer ends with a bare LF", chunked+"\r\nCHUNKS0\r\nX: y\n\n", 0),
		h("request behind a trailer line with a bare LF", chunked+"\r\nCHUNKS0\r\nX: y\n\nINNER", 0),
		h("request behind a trailer that a bare LF ends", chunked+"\r\nCHUNKS0\r\n\nINNER", 0),
		h("trailer of 100 KB", chunked+"\r\nCHUNKS0\r\n"+strings.Repeat("X: "+strings.Repeat("v", 100)+"\r\n", 1000)+"\r\n", -1),
		raw("bare LF everywhere", strings.ReplaceAll(postLine+lenLine, "\r", "")+"\nBODY", -1),
		lead("bare CR in a value", "X: a\rContent-Length: 5\r\n", 0),
		lead("NUL in a value", "X: a\x00b\r\n", 0),
		lead("NUL in a name", "X\x00: ab\r\n", 0),
		lead("no colon", "Xyz\r\n", 0),
		lead("empty name", ": x\r\n", 0),
		raw("first line folded", "POST "+chatPath+" HTTP/1.1\r\n X: y\r\nHost: x\r\n"+lenLine+endBody, 0),
		raw("no host", "POST "+chatPath+" HTTP/1.1\r\n"+lenLine+endBody, 0),
		lead("two hosts", "Host: y\r\n", 0),
		raw("absolute form", "POST http://evil.example"+chatPath+" HTTP/1.1\r\nHost: x\r\n"+lenLine+endBody, -1),
		raw("authority form", "POST evil:80 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 0),
		raw("CONNECT", "CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n", 0),
		raw("OPTIONS *", "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 0),
		raw("TRACE", "TRACE "+chatPath+" HTTP/1.1\r\nHost: x\r\n\r\n", 0),
		lead("upgrade to h2c", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n", -1),
		raw("upgrade to WebSocket", "POST "+chatPath+" HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n", 0),
		lead("Expect 100-continue", "Expect: 100-continue\r\n", 1),
		lead("Expect something else", "Expect: 200-ok\r\n", 0),
		h("Expect and a body that is too large", "Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n", 0),
		lead("Connection names a line", "Connection: X-Foo\r\nX-Foo: 1\r\n", 1),
		raw("three requests at once", plain+plain+plain, 3),
		raw("the second of two is ambiguous", plain+postLine+"Content-Length: 5\r\n"+chunked+"\r\n0\r\n\r\nINNER", 1),
		raw("GET with a request as its body", "GET /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: INNERLEN\r\n\r\nINNER", 0),
		lead("encoded CRLF in the request id", "X-Request-Id: a%0d%0aX: y\r\n", 1),
		lead("header of 70 KB", "X: "+strings.Repeat("a", 70000)+"\r\n", 0),
		raw("HTTP/2 preface behind a request", plain+"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 1),
		raw("HTTP/2 preface with a header", "PRI * HTTP/2.0\r\nTransfer-Encoding: chunked\r\n\r\nINNER", 0),
		raw("HTTP/2.0 in the request line", strings.Replace(plain, "HTTP/1.1", "HTTP/2.0", 1), 0),
		raw("HTTP/1.2", strings.Replace(plain, "HTTP/1.1", "HTTP/1.2", 1), -1),
		{name: "the body ends early", sent: postLine + "Content-Length: 500\r\n" + endBody, half: true},
		raw("line ends before the request", "\r\n\r\n"+plain, -1),
		lead("PD header lines", "X-Data-Parallel-Rank: 7\r\nx-prefiller-host-port: e:1\r\n", 1),
	}
}

// expand puts bodies into a case; their prompts name the case.
func (c framingCase) expand(n int) string {
	body := chat(fmt.Sprintf("framing-%d-", n), false)
	innerBody := chat(fmt.Sprintf("SMUGGLED-%d-", n), false)
	inner := fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s", postLine, len(innerBody), innerBody)
	return strings.NewReplacer("BODY", body, "LEN", fmt.Sprint(len(body)), "HEX", fmt.Sprintf("%x", len(body)),
		"CHUNKS", chunk(body), "INNERLEN", fmt.Sprint(len(inner)), "INNER", inner).Replace(c.sent)
}

var statusLine = regexp.MustCompile(`HTTP/1\.[01] (\d{3}) `)

// TestFraming sends every case and checks the engine's requests.
func TestFraming(t *testing.T) {
	t.Parallel()
	e := newFakeEngine(t)
	p := startProxy(t, setup{sections: e.section("both", "vllm-nixl")})
	a, cases := p.attacker(), framingCases()
	testbed.Parallel(len(cases), 16, func(n int) {
		c := cases[n]
		answer, _, err := a.exchange(c.expand(n), 800*time.Millisecond, c.half)
		if err != nil {
			t.Errorf("%s: a.exchange(c.expand(n), 800*time.Millisecond, c.half) = %v, want nil", c.name, err)
			return
		}
		ok := 0
		for _, m := range statusLine.FindAllStringSubmatch(answer, -1) {
			if m[1] == "200" && !strings.HasPrefix(c.sent, "GET") && !strings.HasPrefix(c.sent, "OPTIONS") {
				ok++
			}
		}
		seen := e.with(fmt.Sprintf("framing-%d-", n))
		if c.served >= 0 && (ok != c.served || len(seen) != c.served) || c.served < 0 && (ok > 1 || len(seen) != ok) {
			t.Errorf("%s: %d answers of success, %d requests at the engine, want %d: %.200q", c.name, ok, len(seen), c.served, answer)
		}
		if len(e.with(fmt.Sprintf("SMUGGLED-%d-", n))) > 0 {
			t.Errorf("%s: the engine received the inner request", c.name)
		}
		for _, r := range seen {
			wellFramed(t, c.name, r)
		}
	})
	p.serves("after the framing attacks")
	p.nothingLeft()
}

// wellFramed asserts that a request at an engine has one length and no bytes of
// another connection.
func wellFramed(t *testing.T, name string, r received) {
	t.Helper()
	if n := r.values("Content-Length"); len(n) != 1 || n[0] != fmt.Sprint(len(r.body)) {
		t.Errorf("%s: the engine received the lengths %q for %d bytes", name, n, len(r.body))
	}
	for _, line := range []string{"Transfer-Encoding", "Upgrade", "HTTP2-Settings", "Trailer", "TE", "Expect", "X-Data-Parallel-Rank", "x-prefiller-host-port", "X-Foo"} {
		if v := r.values(line); len(v) > 0 {
			t.Errorf("%s: the engine received %s: %q", name, line, v)
		}
	}
	if strings.ContainsAny(strings.Join(r.header, ""), "\r\x00") {
		t.Errorf("%s: the engine received control characters: %q", name, r.header)
	}
}
