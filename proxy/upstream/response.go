package upstream

import "time"

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

// SetIdleTimeout bounds the wait of each further Read, in place of the request's
// IdleTimeout: the first event of a stream may take longer than the next ones. 0: no
// limit. Only the reader may call it.
func (r *Response) SetIdleTimeout(d time.Duration) { r.body.setIdle(d) }

func (c *call) setIdle(d time.Duration) { c.idle, c.idleBy = d, time.Time{} }

// Commit protects the call from eviction from now on, because the caller has begun to
// use the answer. It returns false if the call was evicted before. Only the reader may
// call it.
func (r *Response) Commit() bool { return r.body.commit() }

// Ended reports whether the next Read returns the end of the body or an error without
// waiting. It returns false if that is not known. Only the reader may call it.
func (r *Response) Ended() bool { return r.body.atEnd() }

func (c *call) atEnd() bool { return c.err != nil }

// Get returns the value of the first header line of that name, ignoring case, or "".
func (r *Response) Get(name string) string {
	for i := range r.Header {
		if sameName(r.Header[i].Name, name) {
			return r.Header[i].Value
		}
	}
	return ""
}

// Read blocks until at least one byte of the body is there, and returns all bytes that
// have arrived, across chunk borders and without framing. It may use all of p as
// scratch space. io.EOF means that the answer was complete. Every other error is an
// *Error, and all later reads return it.
func (r *Response) Read(p []byte) (int, error) { return r.body.Read(p) }

// Close ends the call. Before the end of the body it closes the connection, which makes
// the engine abort. After the end of the body Close does nothing, because the connection
// is already in the pool again. Close always returns nil and may be repeated. It makes a
// Read in progress fail with ErrClosed.
func (r *Response) Close() error { return r.body.Close() }
