package http1

import (
	"bytes"
	"fmt"
	"math/rand/v2"
)

// mutator makes streams of one or more requests: first by a grammar whose rules are sometimes
// wrong, then with changes at random places.
type mutator struct {
	*rand.Rand
	methods []string // of most requests
	target  string
	text    func() []string // bodies
}

func rng(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 1)) }

// randomStream returns the stream of a seed.
func randomStream(seed uint64) []byte {
	bodies := []string{"hello", "", "h", "hello world, hello"}
	return mutator{rng(seed), methods, "/a", func() []string { return bodies }}.stream()
}

// chatStream is a stream of chat requests whose prompts begin with a marker.
func chatStream(seed uint64, marker string) []byte {
	m := mutator{Rand: rng(seed), methods: []string{"POST"}, target: chatPath}
	m.text = func() []string { return []string{chatBody(fmt.Sprint(marker, m.IntN(1<<30)), m.rare(3))} }
	return m.stream()
}

func (m mutator) stream() (b []byte) {
	for range 1 + m.IntN(3) {
		b = m.request(b)
	}
	if m.rare(3) {
		for range 1 + m.IntN(3) {
			b = m.change(b)
		}
	}
	if m.IntN(2) == 0 {
		b = append(b, "GET /last HTTP/1.1\r\nHost: last\r\nConnection: close\r\n\r\n"...)
	}
	return b
}

// rare is true once in n times.
func (m mutator) rare(n int) bool { return m.IntN(n) == 0 }

func (m mutator) pick(list ...string) string { return list[m.IntN(len(list))] }

// often returns the usual text, and once in n times another one.
func (m mutator) often(n int, usual string, others ...string) string {
	if m.rare(n) {
		return m.pick(others...)
	}
	return usual
}

func (m mutator) lineEnd() string {
	return m.often(150, "\r\n", "\n", "\r", "\r\r\n", "\n\r", "\r\n\n", " \r\n", "\x00\r\n", "")
}

// request appends one request.
func (m mutator) request(b []byte) []byte {
	b = append(b, m.often(15, "", "\r\n", "\n", "\r", " ", "\r\n\r\n\r\n", "\x00")...)
	method := m.often(40, m.pick(m.methods...), "post", "FOO", "P OST", "PO\tST", "", "PRI")
	target := m.often(4, m.target, "/unread", "/unread", "/some", "/some", "/a?b=c;d&e=%20", "/a?\"<>\\^`{|}", "*", "http://h/a", "http://h", "https://u:p@h:1/a?b", "//a", "/%")
	target = m.often(40, target, "h:80", "/a#f", "/%00", "/a\x00", "/a b", "/\x80\xff", "", "a", "/a\t", "http://h:/", "http://h/\x80", "x:/", "/a\x7f")
	version := m.often(12, "HTTP/1.1", "HTTP/1.0", "HTTP/1.0")
	version = m.often(60, version, "HTTP/1.2", "HTTP/2.0", "HTTP/0.9", "HTTP/1.10", "HTTP/01.1", "http/1.1", "HTTP/1.1 ", "HTTPS/1.1", "HTTP/1,1", "HTTP/", "")
	b = append(b, method+m.often(50, " ", "  ", "\t", "", " \x0b")+target+m.often(50, " ", "  ", "\t", "")+version+m.lineEnd()...)
	kind := m.IntN(5) // 0, 1: length; 2, 3: chunks; 4: no body
	lines := []string{m.often(40, "Host: h", "", "Host:", "Host: h\r\nHost: h", "Host: h\r\nHost: i", "Host : h", "host:h:80", "Host: h/x", "Host: a b", "Host: h\r\n i", "Host: [::1]", "Host: u@h")}
	body := m.body()
	switch {
	case kind < 2:
		lines = append(lines, m.length(len(body)))
	case kind < 4:
		lines = append(lines, m.often(12, "Transfer-Encoding: chunked", transferEncodings...))
	}
	for range m.IntN(3) {
		lines = append(lines, m.often(8, m.pick(goodLines...), badLines...))
	}
	if m.rare(40) {
		lines = append(lines, m.length(len(body)))
	}
	if m.rare(40) {
		lines = append(lines, m.pick(transferEncodings...))
	}
	m.Shuffle(len(lines), func(i, j int) { lines[i], lines[j] = lines[j], lines[i] })
	for _, line := range lines {
		if line != "" || m.rare(40) {
			b = append(b, line+m.lineEnd()...)
		}
	}
	b = append(b, m.lineEnd()...)
	switch {
	case kind < 2:
		return append(b, body...)
	case kind < 4:
		return m.chunks(b, body)
	}
	return b
}

// transferEncodings are header lines of Transfer-Encoding, most of them wrong.
var transferEncodings = []string{
	"transfer-encoding:chunked", "TRANSFER-ENCODING: CHUNKED", "Transfer-Encoding: \tchunked\t ", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
	"Transfer-Encoding: identity", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: chunked, gzip", "Transfer-Encoding: chunked, chunked",
	"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", "Transfer-Encoding:",
	"Transfer-Encoding: chunked;q=1", "Transfer-Encoding: \"chunked\"", "Transfer-Encoding: xchunked", "Transfer-Encoding: chunkedx", "Transfer-Encoding: ,chunked",
	"Transfer-Encoding: chunked,", "Transfer-Encoding : chunked", "Transfer-Encoding\t: chunked", " Transfer-Encoding: chunked", "Transfer-Encoding:\r\n chunked",
	"Transfer-Encoding:\x0bchunked", "Transfer-Encoding: chun\x00ked", "Transfer-Encoding\x00: chunked", "Transfer_Encoding: chunked", "Transfer-Encoding chunked",
	"X: y\rTransfer-Encoding: chunked", "X: y\nTransfer-Encoding: chunked", "X: y\r\n Transfer-Encoding: chunked", "Transfer-Encoding: chunked\r\n identity",
}

// goodLines are header lines that a server accepts.
var goodLines = []string{
	"X: y", "X:y", "X: y \t", "X:", "X:\t \t", "X-Long: " + string(bytes.Repeat([]byte("v"), 300)), "x: 1\r\nX: 2", "X: \x80\xff", "X: a\tb", "X_Y: z", "X!#$%&'*+-.^`|~: y",
	"Connection: close", "Connection: keep-alive", "Connection: close, keep-alive", "Connection: Content-Length", "Connection: Transfer-Encoding, Host", "Connection:", "Connection: x, Close",
	"Keep-Alive: timeout=5", "Expect: 100-continue", "Expect: 100-CONTINUE", "Expect:", "TE: trailers", "Trailer: X-T",
	"Upgrade: websocket\r\nConnection: upgrade", "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__", "Upgrade: x", "X-Content-Length: 3", "Content-Length-X: 3", "Content-Encoding: gzip", "Authorization: Bearer x",
}

// badLines are header lines that a server should refuse, or that may have an unexpected effect.
var badLines = []string{
	"X: a\x00b", "X: a\x01b", "X: a\x7fb", "X: a\rb", "X: a\nb", "X y", "X", ":", ": y", "X : y", "X\t: y", " X: y", "\tX: y", "X: y\r\n folded", "X: y\r\n\tContent-Length: 3", "X\r\n: y", "X(: y", "X\x80: y", "\x00: y", "X: y\r\n ",
	"Proxy-Connection: close", "Expect: 200-ok", "Trailer: Content-Length", "Trailer: Transfer-Encoding",
}

// length returns a header line of Content-Length.
func (m mutator) length(n int) string {
	if !m.rare(10) {
		return fmt.Sprintf("Content-Length: %d", n)
	}
	return fmt.Sprintf(m.pick("content-length:%d", "Content-Length:\t %d \t", "Content-Length: 0%d", "Content-Length: +%d", "Content-Length: -%d", "Content-Length: %d, %[1]d",
		"Content-Length: %d\r\nContent-Length: %[1]d", "Content-Length: %d\r\nContent-Length: 1", "Content-Length: 0x%x", "Content-Length: %d.0", "Content-Length: %d 0", "Content-Length: \"%d\"",
		"Content-Length:\r\n %d", "Content-Length: %d\r\n 0", "Content-Length : %d", "Content-Length\t: %d", " Content-Length: %d", "Content-Length: %d\x00", "Content-Length: \x0b%d",
		"Content-Length: 00000000000000000000000000000%d", "Content-Length: 1844674407370955161%d", "Content-Length: %d%%!(EXTRA)", "Content-Length: %d;x", "X: y\rContent-Length: %d",
		"X: y\nContent-Length: %d", "Content_Length: %d", "Content-Length: 9%d", "Content-Length: ", "Content-Length"), n)
}

func (m mutator) body() string {
	return m.often(5, m.pick(m.text()...), "GET /inner HTTP/1.1\r\nHost: inner\r\n\r\n", "0\r\n\r\nGET /inner HTTP/1.1\r\nHost: inner\r\n\r\n", "\r\n", "\x00\xff\n", "5\r\nhello\r\n0\r\n\r\n", string(bytes.Repeat([]byte("0123456789"), 30)))
}

// chunks appends a body in chunks.
func (m mutator) chunks(b []byte, body string) []byte {
	for len(body) > 0 {
		n := 1 + m.IntN(len(body))
		b = append(b, m.size(n)+m.lineEnd()+body[:n]+m.often(30, "\r\n", "\n", "\r", "", "X\r\n", "\r\n\r\n")...)
		body = body[n:]
	}
	b = append(b, m.often(20, "0", "00", "000000000000000000000", "0;x", "0 ", " 0", "-0", "+0", "0x0", "", "\x00")+m.lineEnd()...)
	for m.rare(5) {
		b = append(b, m.often(5, "X-T: v", "Content-Length: 5", "Transfer-Encoding: chunked", "Host: t", "X-T : v", " X-T: v", "X-T", ": v", "X-T: a\x00b", "X-T: a\rb", "X-T: v\r\n folded", "X-T: \x80", "GET / HTTP/1.1")+m.lineEnd()...)
	}
	return append(b, m.lineEnd()...)
}

// size returns a chunk size.
func (m mutator) size(n int) string {
	if !m.rare(15) {
		return fmt.Sprintf("%x", n)
	}
	return fmt.Sprintf(m.pick("%X", "0%x", "000000000000000%x", "0000000000000000%x", "0x%x", "+%x", "-%x", " %x", "%x ", "%x\t", "%x ;a", "%x; a", "%x;a=b", "%x;a=\"b\"", "%x;a=\"b\r\nc\"", "%x;a=\"b;c\"",
		"%x;\"", "%x;", "%x;;", "%x;a\x00b", "%x;a\nb", "%x;a\rb", "%x;\x80", "%x a", "%xg", "%x,1", "%x.0", "f%x", "ffffffffffffffff%x", "1%x", "%x\x00", "\r\n%x", "", "%x;a=b c", "%x;=", "%x;a=b\t"), n)
}

// pieces of change are put at random places of a stream.
var insertions = []string{
	"\r\n", "\n", "\r", " ", "\t", ":", ";", ",", "\x00", "\x80", "0", "\r\n\r\n", "\r\n ", "Content-Length: 5\r\n", "content-length:5\n", "Transfer-Encoding: chunked\r\n",
	"0\r\n\r\n", "5\r\nhello\r\n", "0\r\nT: v\r\n\r\n", "0\r\nT: v\n\n", "GET /inserted HTTP/1.1\r\nHost: x\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "Connection: close\r\n",
}

// change changes a stream at one place.
func (m mutator) change(b []byte) []byte {
	at := m.IntN(len(b) + 1)
	switch m.IntN(6) {
	case 0, 1:
		return bytes.Join([][]byte{b[:at], b[at:]}, []byte(m.pick(insertions...)))
	case 2:
		return append(bytes.Clone(b[:at]), b[min(len(b), at+1+m.IntN(6)):]...)
	case 3:
		if at < len(b) {
			b[at] = byte(m.IntN(256))
		}
	case 4: // a part comes twice
		to := min(len(b), at+m.IntN(40))
		return append(bytes.Clone(b[:to]), b[at:]...)
	case 5:
		if m.rare(3) {
			return b[:at]
		}
	}
	return b
}

// split cuts a stream at random places.
func split(r *rand.Rand, b []byte) (pieces [][]byte) {
	for len(b) > 0 {
		n := 1 + r.IntN(min(len(b), 1+r.IntN(60)))
		pieces, b = append(pieces, b[:n]), b[n:]
	}
	return pieces
}
