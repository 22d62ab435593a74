package http1

import (
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
)

// errMalformedBody ends the reading of a chunked body that is not well-formed. The connection
// serves no further request.
var errMalformedBody = errors.New("malformed chunked body")

// body is the body of one request. The zero value is an empty one. One goroutine at a time reads it.
type body struct {
	conn *conn
	req  *http.Request // gets the trailer; nil: the body has no chunks
	ask  *answer       // sends 100 Continue at the first read; nil: the client does not wait

	mu     sync.Mutex
	left   int64       // bytes of the body, or of the chunk, that have not been read; guarded by mu
	chunks chunkReader // guarded by mu
	err    error       // the result of all further reads; guarded by mu
	closed bool        // guarded by mu
	whole  atomic.Bool // no byte of the body is still to come from the connection
	broken atomic.Bool // its end will not be found
}

// maxRest is how many bytes of a body that no handler has read the server reads, as net/http does.
const maxRest = 256 << 10

// begin prepares the body of r, which has that head.
func (b *body) begin(c *conn, r *http.Request, h head, a *answer) {
	b.conn = c
	switch {
	case h.length < 0:
		b.req = r
	case h.length == 0:
		b.err = io.EOF
	}
	if h.continues {
		b.ask = a
	}
	b.left = max(h.length, 0)
	b.whole.Store(h.length >= 0 && h.length <= int64(c.w-c.r) && !h.continues)
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (n int, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.closed:
		return 0, http.ErrBodyReadAfterClose
	case b.err != nil:
		return 0, b.err
	case len(p) == 0:
		return 0, nil
	case b.ask != nil:
		b.ask.sendContinue()
		b.ask = nil
	}
	if b.req != nil {
		n, err = b.readChunks(p)
	} else {
		n, err = b.readPart(p)
		if err == nil && b.left == 0 {
			err = io.EOF
		}
	}
	switch {
	case err == nil:
		return n, nil
	case err == io.EOF:
		b.whole.Store(true)
		b.conn.watch()
		b.conn.release()
	case isTimeout(err): // the reader may set another deadline and go on
		return n, err
	case err != errMalformedBody: // the connection has ended
		b.conn.leave()
	}
	b.err = err
	b.broken.Store(err != io.EOF)
	return n, err
}

// readPart reads at most left bytes. An end of the connection is io.ErrUnexpectedEOF.
func (b *body) readPart(p []byte) (int, error) {
	if int64(len(p)) > b.left {
		p = p[:b.left]
	}
	var n int
	var err error
	if c := b.conn; c.r < c.w {
		n = copy(p, c.buf[c.r:c.w])
		c.r += n
	} else {
		n, err = c.nc.Read(p)
	}
	if b.left -= int64(n); b.left > 0 && err == io.EOF {
		return n, io.ErrUnexpectedEOF
	}
	if n > 0 {
		err = nil // the next read finds it
	}
	return n, err
}

// Close implements io.Closer. The connection reads the rest of the body.
func (b *body) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	return nil
}

// Whole reports whether no byte of the body is still to come from the client. Reads do not
// wait then. Safe for concurrent use.
func (b *body) Whole() bool { return b.whole.Load() }

// end takes the body from its readers, after the handler, and reads the rest if that is of use. It reports
// whether the connection stands before the next request.
func (b *body) end(useful bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	switch {
	case b.err != nil:
	case b.whole.Load():
		b.conn.r += int(b.left)
		b.err = io.EOF
	case !useful, b.ask != nil, b.req == nil && b.left > maxRest: // behind ask, the next bytes may be another request
		b.err = http.ErrBodyReadAfterClose
	default:
		b.err = b.drop()
	}
	b.broken.Store(b.err != io.EOF)
	return b.err == io.EOF
}

// drop reads the rest of the body, for which the client has as much time as for a head. At the end of
// the body it returns io.EOF.
func (b *body) drop() (err error) {
	b.conn.limitRest()
	var piece [512]byte
	for n, got := 0, 0; got <= maxRest; got += n {
		switch {
		case b.req != nil:
			n, err = b.readChunks(piece[:])
		case b.left == 0:
			return io.EOF
		default:
			n, err = b.readPart(piece[:])
		}
		if err != nil {
			return err
		}
	}
	return http.ErrBodyReadAfterClose
}
