package upstream

import (
	"io"
	"math"
	"time"
)

// Response is an engine's answer: the head, and the body to be read. One goroutine
// reads it. Close may be called by any goroutine.
type Response struct {
	Status int
	// Header has the lines as sent and in order, including framing and hop-by-hop
	// lines. It stays valid after Close.
	Header []Field
	// ContentLength is the length of the body in bytes, or -1 if the engine did not
	// send it. For HEAD it is the length of the body that GET would return.
	ContentLength int64

	body *call
}

// Get returns the value of the first header line of that name, ignoring case, or "".
func (r *Response) Get(name string) string {
	for i := range r.Header {
		if sameName(r.Header[i].Name, name) {
			return r.Header[i].Value
		}
	}
	return ""
}

// SetIdleTimeout bounds the wait of each further Read, in place of the request's
// IdleTimeout: the first event of a stream may take longer than the next ones. 0: no
// limit. Only the reader may call it.
func (r *Response) SetIdleTimeout(d time.Duration) { r.body.idle, r.body.idleBy = d, time.Time{} }

// Commit protects the call from eviction from now on, because the caller has begun to
// use the answer. It returns false if the call was evicted before. Only the reader may
// call it.
func (r *Response) Commit() bool {
	c := r.body
	c.client.pool.mu.Lock()
	defer c.client.pool.mu.Unlock()
	c.pinned = true
	return !c.evicted
}

// Uncommit permits the eviction again. Only the reader may call it.
func (r *Response) Uncommit() {
	c := r.body
	c.client.pool.mu.Lock()
	defer c.client.pool.mu.Unlock()
	c.pinned = c.evicted
}

// Read blocks until at least one byte of the body is there, and returns all bytes that
// have arrived, across chunk borders and without framing. It may use all of p as
// scratch space. io.EOF means that the answer was complete. Every other error is an
// *Error, and all later reads return it.
func (r *Response) Read(p []byte) (n int, err error) {
	c := r.body
	if c.err != nil || len(p) == 0 {
		return 0, c.err
	}
	cn, err := c.begin()
	if err == nil {
		n, err = c.fill(cn, p)
	}
	switch {
	case err != nil:
		c.err = c.fail(cn, &Error{Op: OpBody, Err: err})
	case c.body.state == inEnd:
		c.finish(cn)
	}
	if n > 0 {
		return n, nil
	}
	return 0, c.err
}

// Sink takes the pieces of a body that Each reads, and lends the memory for them. Only the
// goroutine of Each calls its methods.
type Sink interface {
	// Take returns the memory for the next piece, not empty. Until Free it returns the
	// same memory.
	Take() []byte
	// Free takes the memory back while Each waits for the engine. Each may call it several
	// times in a row.
	Free()
	// Use gets a piece, the first n bytes of the memory, which came at that time, and, without
	// a piece, the error that ends the body. After false, Each returns.
	Use(n int, at time.Time, err error) (more bool)
}

// Each reads the rest of the body into the memory of s, as Read does. It gives each piece to
// s, then the error that ends the body. On a plain TCP socket Each waits for a piece without a
// read that finds the socket empty, which saves a system call, and without memory. Close and
// the end of the context tell the engine at once, but wait for a use in progress; Use must not
// call Close. Each may return without a last call of Free.
func (r *Response) Each(s Sink) {
	for !r.Ended() {
		if n, ok := r.body.follow(s); !ok || n > 0 && !s.Use(n, time.Now(), nil) {
			return
		}
		if n, _ := r.Read(s.Take()); n > 0 && !s.Use(n, time.Now(), nil) {
			return
		}
	}
	s.Use(0, time.Now(), r.body.err)
}

// Ended reports whether the next Read returns the end of the body or an error without
// waiting. It returns false if that is not known. Only the reader may call it.
func (r *Response) Ended() bool { return r.body.err != nil }

// Close ends the call. Before the end of the body it closes the connection, which makes
// the engine abort. After the end of the body Close does nothing, because the connection
// is already in the pool again. Close always returns nil and may be repeated. It makes a
// Read in progress fail with ErrClosed.
func (r *Response) Close() error {
	c := r.body
	if cn, _ := c.end(); cn != nil {
		c.client.pool.remove(c)
		c.mu.Lock()
		c.abort(cn)
		c.mu.Unlock()
		c.client.pool.give(c, nil)
	}
	return nil
}

// begin returns the connection with the deadline of one Read set. It returns nil after
// Close.
func (c *call) begin() (*conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cn := c.conn
	switch {
	case cn == nil:
		return nil, ErrClosed
	case c.ended != nil && c.lingerBy.IsZero():
		return cn, c.ended
	case c.evicted:
		return cn, ErrEvicted
	case cn.r < cn.w: // bytes are buffered
		return cn, nil
	}
	by := c.lingerBy
	if c.idle > 0 {
		c.readAt = time.Now()
		if by.IsZero() && c.idleBy.Sub(c.readAt) >= c.idle-c.idle/16 {
			return cn, nil // the deadline of an earlier read stands; tooEarly corrects it
		}
		if idleBy := c.readAt.Add(c.idle); by.IsZero() || idleBy.Before(by) {
			by = idleBy
		}
	}
	c.idleBy = by
	cn.readDeadline(by)
	return cn, nil
}

// fill reads until it has a byte of data or the end of the body. It takes bytes that
// are buffered behind the head first, then reads straight into p, where decode removes
// the framing.
func (c *call) fill(cn *conn, p []byte) (n int, err error) {
	for n < len(p) && c.body.state != inEnd {
		var k int
		var lostBy error
		if cn.r < cn.w {
			k = copy(p[n:], cn.buf[cn.r:cn.w])
			cn.r += k
		} else if n > 0 {
			return n, nil
		} else {
			c.client.freeBuffer(cn)
			if k, lostBy = cn.Read(p); k == 0 && c.tooEarly(lostBy) {
				k, lostBy = cn.Read(p)
			}
			if k > 0 {
				c.noteRead(time.Now())
			}
		}
		m, used, err := c.body.decode(p[n : n+k])
		n += m
		if err != nil {
			return n, err
		}
		if used < k {
			c.reusable = false // the engine sent bytes after its answer
		}
		if lostBy != nil && c.body.state != inEnd {
			return n, c.connectionEnded(lostBy)
		}
	}
	return n, nil
}

// tooEarly reports whether err is the timeout of a deadline that an earlier read had
// set, and sets the deadline of the present read. Moving the deadline at each event of
// a stream would cost more than reading the event.
func (c *call) tooEarly(err error) bool {
	if err == nil || !isTimeout(err) {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	by := c.readAt.Add(c.idle)
	if c.conn == nil || c.evicted || c.idle == 0 || !c.lingerBy.IsZero() || !c.idleBy.Before(by) {
		return false
	}
	c.idleBy = by
	c.conn.readDeadline(by)
	return true
}

// connectionEnded interprets the end of the connection inside a body: the end of the
// connection is the regular end if the body has neither a length nor chunks.
func (c *call) connectionEnded(err error) error {
	switch {
	case err == io.EOF && c.body.kind == byClose:
		c.body = framing{}
		return nil
	case isTimeout(err):
		return err
	}
	return lost(err)
}

// framing finds the end of a body that may be cut anywhere: by its length, by the end of
// the connection, or by chunks (RFC 9112, 7.1), whose extensions and trailers are
// dropped. The zero value stands for no body.
type framing struct {
	kind   framingKind
	state  framingState
	left   int64 // inData: bytes of the body, or of the chunk's data, still to come
	line   int   // number of size digits, or bytes of the extension or of the trailer
	failed error
}

type framingKind uint8

const (
	byLength framingKind = iota
	byChunks             // state begins as inSize
	byClose              // left is never used up
)

// framingState is the part of a body to which the next byte belongs.
type framingState uint8

const (
	inEnd framingState = iota // the body has ended
	inData
	inSize      // hex digits
	inSizeSpace // white space after the digits, with which some servers pad
	inExtension
	inSizeLF
	inDataCR
	inDataLF
	inTrailer // start of a trailer line, or of the final empty line
	inTrailerLine
	inTrailerLF
	inLastLF
)

const (
	maxChunkLine = 2 << 10  // bytes of one chunk's size and extensions
	maxTrailer   = 16 << 10 // bytes of all trailer lines
)

// decode removes the framing from b in place. Afterwards b[:n] is data, and used is how
// many bytes of b belonged to the body. used < len(b) only at the end of the body or
// with an error. An error is permanent.
func (f *framing) decode(b []byte) (n, used int, err error) {
	for used < len(b) && f.state != inEnd && f.failed == nil {
		if f.state != inData {
			f.failed = f.step(b[used])
			used++
			continue
		}
		k := int(min(f.left, int64(len(b)-used)))
		if n < used {
			copy(b[n:], b[used:used+k])
		}
		n, used, f.left = n+k, used+k, f.left-int64(k)
		switch {
		case f.left > 0:
		case f.kind == byChunks:
			f.state = inDataCR
		default:
			f.state = inEnd
		}
	}
	return n, used, f.failed
}

// step reads one byte of the framing of chunks.
func (f *framing) step(c byte) error {
	switch f.state {
	case inSize, inSizeSpace, inExtension:
		return f.sizeLine(c)
	case inTrailerLine, inTrailerLF:
		return f.trailer(c)
	}
	next := &lineEnds[f.state]
	if c != next.byte {
		if f.state == inTrailer { // the byte begins a line of the trailer
			return f.trailer(c)
		}
		return next.err
	}
	f.line, f.state = 0, next.state
	if f.state == inData && f.left == 0 { // the last chunk
		f.state = inTrailer
	}
	return nil
}

// lineEnds has, for each state that waits for a certain byte, that byte and the state that follows.
var lineEnds = [...]struct {
	byte  byte
	state framingState
	err   error
}{
	inSizeLF:  {'\n', inData, errChunkSize},
	inDataCR:  {'\r', inDataLF, errChunkEnd},
	inDataLF:  {'\n', inSize, errChunkEnd},
	inTrailer: {'\r', inLastLF, nil},
	inLastLF:  {'\n', inEnd, errTrailer},
}

// sizeLine reads one byte of the line with the size of a chunk.
func (f *framing) sizeLine(c byte) error {
	if f.line > 0 && c == '\r' {
		f.state = inSizeLF
		return nil
	}
	f.line++
	switch f.state {
	case inSize:
		digit := int64(-1)
		switch {
		case '0' <= c && c <= '9':
			digit = int64(c - '0')
		case 'a' <= c|0x20 && c|0x20 <= 'f':
			digit = int64(c | 0x20 - 'a' + 10)
		}
		if digit >= 0 {
			if f.line > 16 || f.left > math.MaxInt64>>4 {
				return errChunkSize
			}
			f.left = f.left<<4 | digit
			return nil
		}
		switch {
		case f.line == 1:
			return errChunkSize
		case c == ';':
			f.state = inExtension
		case c == ' ' || c == '\t':
			f.state = inSizeSpace
		default:
			return errChunkSize
		}
	case inSizeSpace:
		if c != ' ' && c != '\t' {
			return errChunkSize
		}
	case inExtension:
		if c < ' ' && c != '\t' {
			return errChunkSize
		}
	}
	if f.line > maxChunkLine {
		return errChunkLine
	}
	return nil
}

// trailer reads one byte of the trailer, which is dropped.
func (f *framing) trailer(c byte) error {
	if f.line++; f.line > maxTrailer {
		return errTrailerBytes
	}
	switch {
	case f.state == inTrailerLine && c == '\r':
		f.state = inTrailerLF
	case f.state == inTrailerLF && c == '\n':
		f.state = inTrailer
	case (f.state == inTrailer || f.state == inTrailerLine) && (c >= ' ' || c == '\t'):
		f.state = inTrailerLine
	default:
		return errTrailer
	}
	return nil
}
