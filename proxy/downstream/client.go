// Package downstream is the side of a client: the bytes of its request, with the limits
// of memory and time for them, and the only way to write the answer.
//
// The decisions behind this package are in docs/design/edge.md.
package downstream

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Client is one request of a client, and its answer. The goroutine of the handler uses
// it; Reserve, TakeMemory and ReleaseMemory are safe for concurrent use. Open comes
// first and Close last; then the Client may be opened for another request. The zero
// value is not open.
type Client struct {
	bodies *Bodies
	cfg    *config.Config
	w      http.ResponseWriter
	rc     http.ResponseController
	r      *http.Request

	body     *buffer.Buffer // nil: not read, or released
	share    *buffer.Share  // the memory that the request holds
	reserved atomic.Int64   // bytes of the share that are not in buffers
	derived  int64          // bytes of the share for data that is derived from the body

	begun bool // the client has a status line
	cut   bool // the connection must be cut

	renewed time.Time // the last call of Events.RenewWrites that had an effect

	received, sent int64 // bytes of the bodies; see Transferred
}

// Open begins a request. It counts the request's memory in b, and takes the limits of
// the body and of writes from cfg.
func (c *Client) Open(b *Bodies, cfg *config.Config, w http.ResponseWriter, r *http.Request) {
	c.bodies, c.cfg, c.w, c.r = b, cfg, w, r
	c.rc = *http.NewResponseController(w)
	if c.share == nil {
		c.share = new(buffer.Share)
	}
	c.share.Open(b.memory, nil, "")
}

// Header returns the header lines of the request. The caller must not change them.
func (c *Client) Header() http.Header { return c.r.Header }

// Request returns the request as it arrived. The caller must not change it, and must not read
// its body.
func (c *Client) Request() *http.Request { return c.r }

// URL returns the target of the request. The caller must not change it.
func (c *Client) URL() *url.URL { return c.r.URL }

// Transferred returns the bytes of the request's body that have come, as the client coded it, and
// the bytes of the answer's body that have been sent. Heads do not count.
func (c *Client) Transferred() (received, sent int64) { return c.received, c.sent }

// Relayed counts bytes of the answer's body that a gateway sends to the client.
func (c *Client) Relayed(n int) { c.sent += int64(n) }

// RemoteAddr returns the address of the client, as net/http has it.
func (c *Client) RemoteAddr() string { return c.r.RemoteAddr }

// Gone reports whether the client has left. A shutdown of the proxy does not count.
func (c *Client) Gone() bool {
	ctx := c.r.Context()
	return ctx.Err() != nil && !errors.Is(context.Cause(ctx), ErrDraining)
}

// ReadBody reads the body whole, within the limits, and decodes it if the client has
// compressed it. The body counts for the client of that name, and so does the memory of the
// request where limits.per_client is set; the memory of a request without a name does not.
// The request must hold no memory yet.
func (c *Client) ReadBody(client string) (err error) {
	limit := int64(c.cfg.Server.MaxBody)
	if c.r.ContentLength > limit {
		return errBodyTooLarge(limit)
	}
	var decode decoder
	if c.r.Header["Content-Encoding"] != nil {
		if decode, err = decoderOf(c.r.Header); err != nil {
			return err
		}
	}
	in := incomingOf(c.r.Context())
	if in != nil {
		in.mu.Lock()
		if !in.begun { // else a filter has begun to read it
			in.client = client
		}
		in.mu.Unlock()
	}
	if client != "" && c.cfg.Limits.PerClient > 0 {
		c.share.Open(c.bodies.memory, &c.bodies.clients, client)
	}
	// The memory grows with the bytes that have arrived, whatever length the client announces.
	first, announced := 4<<10, 0
	if c.r.ContentLength >= 0 {
		announced = int(c.r.ContentLength) + 1 // room for the read that finds the end
		if first = announced; first > buffer.WholeRead {
			first = buffer.FirstRead
			if int64(announced) > c.share.Most() {
				return errBodyNeverFits
			}
		}
	}
	if c.body, err = c.Buffer(first); err != nil {
		return err
	}
	err = c.fill(c.r.Body, announced, int(limit), func(err error) error {
		if in != nil && in.mustClose() {
			c.w.Header().Set("Connection", "close")
		}
		return bodyReadError(c.r.Context(), err)
	})
	c.received = int64(len(c.body.B))
	if err != nil {
		return err
	}
	c.rc.SetReadDeadline(time.Time{}) // later reads only notice that the client hangs up
	if decode == nil {
		return nil
	}
	return c.decode(decode, int(limit))
}

// Buffer returns a buffer with room for n bytes made of the request, which counts until
// it is freed. The error is the answer for the client.
func (c *Client) Buffer(n int) (*buffer.Buffer, error) {
	b, err := c.share.Get(n)
	if err != nil {
		return nil, c.noMemory(n, err)
	}
	return b, nil
}

// fill reads r to its end into c.body. Announced is the likely number of bytes, 0 if it
// is not known. More than limit bytes are an error. Failed turns the error of a read into
// the error that the client gets.
func (c *Client) fill(r io.Reader, announced, limit int, failed func(error) error) error {
	for {
		if len(c.body.B) == cap(c.body.B) {
			if err := c.grow(c.body, announced, limit); err != nil {
				return err
			}
		}
		n, err := r.Read(c.body.B[len(c.body.B):cap(c.body.B)])
		c.body.B = c.body.B[:len(c.body.B)+n]
		if len(c.body.B) > limit {
			return errBodyTooLarge(int64(limit))
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return failed(err)
		}
	}
}

// grow gives b, which is full, more room for a body of at most limit bytes.
func (c *Client) grow(b *buffer.Buffer, announced, limit int) error {
	if err := b.Grow(announced, limit+1); err != nil {
		return c.noMemory(max(announced, min(2*cap(b.B), limit)), err)
	}
	return nil
}

// Body returns the request's body, nil before ReadBody and after ReleaseBody. It is valid
// until the last holder frees it, and must not be changed.
func (c *Client) Body() []byte {
	if c.body == nil {
		return nil
	}
	return c.body.B
}

// HoldBody returns the buffer of the body with another holder, who frees it.
func (c *Client) HoldBody() *buffer.Buffer { return c.body.Hold() }

// ReleaseBody frees the body, and the memory that Derive counts.
func (c *Client) ReleaseBody() {
	c.body.Free()
	c.body = nil
	if c.derived > 0 {
		c.share.Release(c.derived)
		c.derived = 0
	}
}

// RewriteBody replaces the body by the bytes that write appends, n at most. The memory of
// the old body is free when its other holders have freed it. The error is the answer for
// the client; the body is then unchanged.
func (c *Client) RewriteBody(n int, write func(dst []byte) []byte) error {
	next, err := c.Buffer(n)
	if err != nil {
		return err
	}
	next.Set(write(next.B[:0]))
	c.body.Free()
	c.body = next
	return nil
}

// AnswerHeader returns the header lines of the answer. Changes have an effect until the
// answer begins.
func (c *Client) AnswerHeader() http.Header { return c.w.Header() }

// EarlyHints sends the Link lines of an engine's answer 103 (RFC 8297) before the answer has begun,
// except to clients of HTTP/1.0. It sends no other line, because a client may treat the lines as those
// of the answer, which another engine may give.
func (c *Client) EarlyHints(fields []upstream.Field) {
	h := c.w.Header()
	kept := maps.Clone(h)
	clear(h)
	for _, f := range fields {
		if strings.EqualFold(f.Name, "Link") {
			h.Add("Link", f.Value)
		}
	}
	if len(h) > 0 && !c.begun && c.r.ProtoAtLeast(1, 1) {
		c.limitAnswer()
		c.w.WriteHeader(http.StatusEarlyHints)
	}
	clear(h)
	maps.Copy(h, kept)
}

// Begun reports whether the client has a status line: nothing can be retried then.
func (c *Client) Begun() bool { return c.begun }

// Begin sends the head of the answer.
func (c *Client) Begin(status int) {
	c.begun = true
	c.w.WriteHeader(status)
}

// WriteBody sends the answer with its whole body. The error is ErrWrite.
func (c *Client) WriteBody(status int, body []byte) error {
	c.w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	c.limitAnswer()
	c.Begin(status)
	return c.Write(body)
}

// Error answers with an error in the form of an API.
func (c *Client) Error(api openai.API, e *openai.Error) {
	c.begun = true
	c.limitAnswer()
	c.sent += int64(ErrorOf(c.w, api, e))
}

// limitAnswer gives the client server.write_timeout from now to receive the written bytes.
func (c *Client) limitAnswer() { c.LimitWrites(time.Duration(c.cfg.Server.WriteTimeout)) }

// LimitWrites gives the client that long from now to receive the bytes that are written to it: see
// the function LimitWrites.
func (c *Client) LimitWrites(limit time.Duration) {
	if c.r.ProtoMajor >= 2 {
		c.rc.SetWriteDeadline(time.Now().Add(limit))
	}
}

// Write writes a part of an answer that has begun. The error is ErrWrite.
func (c *Client) Write(p []byte) error {
	n, err := c.w.Write(p)
	c.sent += int64(n)
	if err != nil {
		return ErrWrite
	}
	return nil
}

// Flush sends what has been written.
func (c *Client) Flush() { c.rc.Flush() }

// breakLimit is how long the client has to take the event of a broken stream.
const breakLimit = time.Second

// Break ends a stream, between two events, with an event that reports that the stream is not
// complete. sequence is the number of the event in a responses stream.
func (c *Client) Break(api openai.API, e *openai.Error, sequence int64) {
	c.LimitWrites(breakLimit)
	n, _ := c.w.Write(api.AppendErrorEvent(nil, e, sequence))
	c.sent += int64(n)
	c.rc.Flush()
}

// Cut marks the connection to be cut, because any regular end would look like the end
// of a complete answer. The handler then panics with http.ErrAbortHandler.
func (c *Client) Cut() { c.cut = true }

// MustCut reports whether Cut was called.
func (c *Client) MustCut() bool { return c.cut }

// Close frees the memory of the request and clears the request.
func (c *Client) Close() {
	c.ReleaseBody()
	if n := c.reserved.Swap(0); n > 0 {
		c.share.Release(n)
	}
	share := c.share
	if share.Held() > 0 { // the clean-up of a leg still holds the body
		share = nil
	}
	*c = Client{share: share}
}
