package upstream

import (
	"io"
	"time"
)

// Response is an engine's answer: the head, and the body to be read. One
// goroutine reads it; Close may come from any.
type Response struct {
	Status int
	// Header is in order and as sent, framing and hop-by-hop lines included.
	// It stays valid after Close.
	Header []Field
	// ContentLength is the length of the body, -1 when the engine did not say;
	// for HEAD, of the body that GET would have.
	ContentLength int64

	body body
}

// body is what a call of either client gives its Response.
type body interface {
	io.ReadCloser
	setIdle(d time.Duration)
	atEnd() bool
	commit() bool
	each(p []byte, use func(n int, err error) bool)
}

// SetIdleTimeout bounds the wait of each further Read, in place of the
// request's IdleTimeout: the first event of a stream may take longer than the
// next. 0: none. The reader calls it.
func (r *Response) SetIdleTimeout(d time.Duration) { r.body.setIdle(d) }

func (c *call) setIdle(d time.Duration) { c.idle, c.idleBy = d, time.Time{} }

func (c *netHTTPCall) setIdle(d time.Duration) { c.idle = d }

// Commit says that the answer is wanted from here on, however silent the engine
// falls: it is past being got elsewhere. False: the call has been left already.
// The reader calls it.
func (r *Response) Commit() bool { return r.body.commit() }

// Ended reports whether the next Read ends without waiting, at the end of the
// body or with an error. False also where that is not known. The reader calls
// it.
func (r *Response) Ended() bool { return r.body.atEnd() }

func (c *call) atEnd() bool { return c.err != nil }

func (c *netHTTPCall) atEnd() bool { return false }

// Get returns the value of the first header line of that name, in any case, or "".
func (r *Response) Get(name string) string {
	for i := range r.Header {
		if sameName(r.Header[i].Name, name) {
			return r.Header[i].Value
		}
	}
	return ""
}

// Read blocks until there is at least one byte of the body and takes what else
// has arrived, over chunk borders; framing is gone. All of p may be used as
// scratch space. io.EOF means that the answer was whole; every other error is
// an *Error and stays.
func (r *Response) Read(p []byte) (int, error) { return r.body.Read(p) }

// Close ends the call. After the end of the body it does nothing, the
// connection is back in the pool by then; before, it closes the connection,
// which is what tells the engine to abort. It returns nil, also when repeated,
// and makes a Read under way fail with ErrClosed.
func (r *Response) Close() error { return r.body.Close() }
