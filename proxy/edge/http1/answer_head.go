package http1

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// headRoom is the space for the lines of a head that depend on the body: status, Date, Content-Type,
// Content-Length or Transfer-Encoding, Connection. They are written in front of the lines of the handler.
const headRoom = 256

var (
	crlf      = []byte("\r\n")
	lastChunk = []byte("0\r\n")
)

func newBuffer() []byte { return buffers.Get().(*[bufferSize]byte)[:] }

func freeBuffer(b []byte) {
	if cap(b) == bufferSize {
		buffers.Put((*[bufferSize]byte)(b[:bufferSize]))
	}
}

// appendHeader appends the header lines as they are now, and the end of the head. It leaves out, and
// notes, what beginBody writes.
func (a *answer) appendHeader(b []byte) []byte {
	for name, values := range a.header {
		if len(values) == 0 {
			continue
		}
		switch name {
		case "Content-Length":
			if n, ok := parseLength(values[0]); ok {
				a.length = n
			}
			continue
		case "Transfer-Encoding":
			a.typed = true // as net/http does
			continue
		case "Connection":
			if hasToken(values, "close") {
				a.closes = true
				continue
			}
			if hasToken(values, "keep-alive") {
				continue
			}
		case "Date":
			a.dated = true
		case "Content-Type":
			if a.typed = true; a.status == http.StatusNotModified {
				continue
			}
		case "Content-Encoding":
			a.typed = a.typed || values[0] != ""
		case "Trailer":
			for _, line := range values {
				for part := range strings.SplitSeq(line, ",") {
					if part = http.CanonicalHeaderKey(trim(part)); part != "" && !forbiddenTrailer(part) {
						a.trailer = append(a.trailer, part)
					}
				}
			}
		}
		if strings.HasPrefix(name, http.TrailerPrefix) {
			if a.trailer == nil {
				a.trailer = []string{}
			}
			continue
		}
		b = appendField(b, name, values)
	}
	_, noDate := a.header["Date"] // nil: the handler wants none
	a.dated = a.dated || noDate
	_, noType := a.header["Content-Type"]
	a.typed = a.typed || noType
	return append(b, crlf...)
}

// beginBody completes the head. whole: the answer ends here. next is the next part of the body,
// which is not in the buffer yet.
func (a *answer) beginBody(whole bool, next []byte) {
	a.begun = true
	isHead, allowed, buffered := a.req.Method == http.MethodHead, a.bodyAllowed(), a.out[a.bodyAt:]
	if whole && allowed && a.length < 0 && a.trailer == nil && (!isHead || len(buffered) > 0) {
		a.length = a.written
	}
	// If the client may have waited for 100 Continue, and the body has not been read, the next bytes
	// may be the body or another request.
	asks := a.continues && !a.body.Whole()
	if asks || a.conn.server.retired.Load() || a.body.broken.Load() {
		a.closes = true
	}
	var room [headRoom]byte
	b := a.appendStatus(room[:0], a.status)
	if !a.dated {
		b = append(b, *a.conn.server.date.Load()...)
	}
	if len(buffered) > 0 {
		next = buffered
	}
	if allowed && !a.typed && len(next) > 0 {
		b = append(append(append(b, "Content-Type: "...), http.DetectContentType(next)...), crlf...)
	}
	switch {
	case !allowed:
	case a.length >= 0:
		b = append(strconv.AppendInt(append(b, "Content-Length: "...), a.length, 10), crlf...)
	case isHead:
	case a.req.ProtoMinor > 0:
		a.chunked = true
		b = append(b, "Transfer-Encoding: chunked\r\n"...)
	default:
		a.closes = true // it ends the body
	}
	switch {
	case a.closes && a.status != http.StatusSwitchingProtocols:
		b = append(b, "Connection: close\r\n"...)
	case !a.closes && a.keeps:
		b = append(b, "Connection: keep-alive\r\n"...)
	}
	a.at = headRoom - len(b)
	copy(a.out[a.at:], b)
	switch {
	case isHead:
		a.out = a.out[:a.bodyAt]
	case a.chunked && len(buffered) > 0:
		var size [longestSize]byte
		line := append(strconv.AppendInt(size[:0], int64(len(buffered)), 16), crlf...)
		a.out = append(slices.Insert(a.out, a.bodyAt, line...), crlf...)
	}
}

// appendTrailer appends the fields behind the last chunk.
func (a *answer) appendTrailer(b []byte) []byte {
	for _, name := range a.trailer {
		b = appendField(b, name, a.header[name])
	}
	for name, values := range a.header {
		if name, ok := strings.CutPrefix(name, http.TrailerPrefix); ok && !forbiddenTrailer(name) {
			b = appendField(b, name, values)
		}
	}
	return b
}

// appendStatus appends a status line, of the version of the request.
func (a *answer) appendStatus(b []byte, status int) []byte {
	b = append(append(b, a.req.Proto...), ' ')
	b = append(strconv.AppendInt(b, int64(status), 10), ' ')
	if text := http.StatusText(status); text != "" {
		b = append(b, text...)
	} else {
		b = append(b, "status code "...)
		b = strconv.AppendInt(b, int64(status), 10)
	}
	return append(b, crlf...)
}

// appendField appends a line for each value. It leaves out names that are no names, and replaces line
// ends in values, so that no value can end the head.
func appendField(b []byte, name string, values []string) []byte {
	if name == "" || !all(name, tokenByte) {
		return b
	}
	for _, v := range values {
		if !all(v, valueByte) {
			v = lineEnds.Replace(v)
		}
		b = append(append(append(append(b, name...), ": "...), v...), crlf...)
	}
	return b
}

var lineEnds = strings.NewReplacer("\r", " ", "\n", " ", "\x00", " ")
