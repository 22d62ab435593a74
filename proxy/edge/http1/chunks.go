package http1

import (
	"io"
	"net/http"
)

// chunkReader is where a chunked body stands outside of the data of chunks.
type chunkReader struct {
	state  chunkState
	digits int    // of the size so far
	size   int64  // so far
	line   int    // bytes of the line so far
	excess int    // bytes of lines beyond what useful chunks need
	lines  []byte // of the trailer so far
}

type chunkState uint8

const (
	chunkSize      chunkState = iota // before a hex digit, or behind one
	chunkName                        // in the name of an extension
	chunkNameFirst                   // before it
	chunkValue                       // in the value of an extension
	chunkQuoted                      // in a quoted value
	chunkPair                        // behind a backslash
	chunkClosed                      // behind a quoted value
	chunkSizeLF                      // behind the CR of the line
	chunkData                        // in the data
	chunkDataCR                      // behind it
	chunkDataLF                      // behind its CR
	chunkTrailer                     // in the trailer
)

const (
	// maxSizeDigits is the number of digits of a chunk's size. net/http allows one more.
	maxSizeDigits = 15
	// maxChunkLine bounds the line of a size with its extensions in bytes, as net/http does.
	maxChunkLine = 4 << 10
	// maxExcess bounds the bytes that are not data, as net/http does (internal/chunked.go).
	maxExcess = 16 << 10
	// maxTrailer bounds a trailer in bytes, as net/http does.
	maxTrailer = 4 << 10
)

// readChunks reads data of chunks. It returns data as soon as there is some.
func (b *body) readChunks(p []byte) (n int, err error) {
	for {
		if b.chunks.state == chunkData {
			if len(p) == 0 || n > 0 && b.conn.r == b.conn.w {
				return n, nil
			}
			got, err := b.readPart(p)
			n, p = n+got, p[got:]
			if err != nil {
				return n, err
			}
			if b.left > 0 {
				continue
			}
			b.chunks.state = chunkDataCR
		}
		if b.conn.r == b.conn.w {
			if n > 0 {
				return n, nil
			}
			if err := b.conn.fill(); err != nil {
				if err == io.EOF {
					err = io.ErrUnexpectedEOF
				}
				return n, err
			}
		}
		if err = b.readLines(); err != nil {
			return n, err
		}
	}
}

// readLines reads buffered bytes up to the data of a chunk. At the end of the body it returns io.EOF.
func (b *body) readLines() error {
	c := &b.chunks
	for b.conn.r < b.conn.w && c.state != chunkData {
		at := b.conn.buf[b.conn.r]
		b.conn.r++
		if c.state == chunkTrailer {
			if err := b.trailerByte(at); err != nil {
				return err
			}
			continue
		}
		if c.line++; c.line > maxChunkLine || !c.next(at) {
			return errMalformedBody
		}
		if c.state == chunkData {
			c.excess = max(c.excess+c.line-16-2*int(min(c.size, maxExcess)), 0)
			if c.excess > maxExcess {
				return errMalformedBody
			}
			b.left, c.size, c.digits, c.line = c.size, 0, 0, 0
			if b.left == 0 {
				c.state = chunkTrailer
			}
		}
	}
	return nil
}

// next reads one byte of the lines around the data, and reports whether it may stand there. The
// rules are those of llhttp (http.ts, chunk_size to chunk_data_almost_done).
func (c *chunkReader) next(b byte) bool {
	switch c.state {
	case chunkSize:
		if v := hexValue(b); v >= 0 && c.digits < maxSizeDigits {
			c.size, c.digits = c.size<<4|int64(v), c.digits+1
			return true
		}
		return c.digits > 0 && c.endOfExtension(b)
	case chunkNameFirst, chunkName:
		switch {
		case classes[b]&tokenByte != 0:
			c.state = chunkName
		case c.state == chunkNameFirst && b == '\r': // other empty names are allowed
			return false
		case b == '=':
			c.state = chunkValue
		default:
			return c.endOfExtension(b)
		}
	case chunkValue:
		switch {
		case classes[b]&tokenByte != 0:
		case b == '"':
			c.state = chunkQuoted
		default:
			return c.endOfExtension(b)
		}
	case chunkQuoted:
		switch {
		case classes[b]&quotedByte != 0:
		case b == '"':
			c.state = chunkClosed
		case b == '\\':
			c.state = chunkPair
		default:
			return false
		}
	case chunkPair:
		c.state = chunkQuoted
		return classes[b]&valueByte != 0
	case chunkClosed:
		return c.endOfExtension(b)
	case chunkSizeLF:
		c.state = chunkData
		return b == '\n'
	case chunkDataCR:
		c.state = chunkDataLF
		return b == '\r'
	case chunkDataLF:
		c.state = chunkSize
		return b == '\n'
	}
	return true
}

// endOfExtension reads the byte behind a size or an extension.
func (c *chunkReader) endOfExtension(b byte) bool {
	switch b {
	case ';':
		c.state = chunkNameFirst
	case '\r':
		c.state = chunkSizeLF
	default:
		return false
	}
	return true
}

func hexValue(b byte) int {
	switch {
	case digit(b):
		return int(b - '0')
	case 'a' <= b && b <= 'f':
		return int(b-'a') + 10
	case 'A' <= b && b <= 'F':
		return int(b-'A') + 10
	}
	return -1
}

// trailerByte reads one byte of the trailer. Behind its last byte it returns io.EOF.
func (b *body) trailerByte(at byte) error {
	t := append(b.chunks.lines, at)
	b.chunks.lines = t
	n := len(t)
	switch {
	case n > maxTrailer:
		return errMalformedBody
	case at != '\n':
		return nil
	case n < 2 || t[n-2] != '\r': // a server in front of the proxy may see another end
		return errMalformedBody
	case n > 2 && string(t[max(n-4, 0):]) != "\r\n\r\n":
		return nil
	case n == 2:
		return io.EOF
	}
	var fields http.Header
	if parseFields(string(t), &fields) != nil {
		return errMalformedBody
	}
	for name := range fields {
		if frames(name) {
			return errMalformedBody
		}
	}
	if b.req.Trailer == nil {
		b.req.Trailer = make(http.Header)
	}
	for name, lines := range fields {
		b.req.Trailer[name] = append(b.req.Trailer[name], lines...)
	}
	return io.EOF
}
