package downstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

func errBodyTooLarge(limit int64) error {
	return &openai.Error{Status: 413, Code: "body_too_large", Message: fmt.Sprintf("the request body is larger than %d bytes", limit)}
}

var errBodyTimeout = &openai.Error{Status: 408, Type: "invalid_request_error", Code: "body_timeout", Message: "the request body did not come in time"}

// bodyReadError returns the answer for a request body that did not come whole: the
// client left, was too slow, or broke the framing.
func bodyReadError(ctx context.Context, err error) error {
	var stopped *stoppedBody
	switch {
	case errors.As(err, &stopped):
		return stopped.why
	case errors.Is(err, os.ErrDeadlineExceeded): // the deadline ends the context too
		return errBodyTimeout
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return &openai.Error{Status: 400, Code: "body_incomplete", Message: "the request body could not be read"}
}

// BodyStopped reports whether err is a request body that did not come in time.
func BodyStopped(err error) bool {
	var oe *openai.Error
	return errors.As(err, &oe) && oe.Status == http.StatusRequestTimeout
}

// ReadBody reads the body whole, within the limits, and decodes it if the client has
// compressed it. The body counts for the client of that name.
func (c *Client) ReadBody(client string) error {
	limit := int64(c.cfg.Server.MaxBody)
	if c.r.ContentLength > limit {
		return errBodyTooLarge(limit)
	}
	decode, err := decoderOf(c.r.Header)
	if err != nil {
		return err
	}
	if b := incomingOf(c.r.Context()); b != nil {
		b.countFor(client)
	}
	if err := c.receive(int(limit)); err != nil {
		return err
	}
	c.rc.SetReadDeadline(time.Time{}) // later reads only notice that the client hangs up
	if decode == nil {
		return nil
	}
	return c.decode(decode, int(limit))
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

// ReleaseBody frees the body, and what Derive counts.
func (c *Client) ReleaseBody() {
	c.body.Free()
	c.body = nil
	if c.derived > 0 {
		c.share.Release(c.derived)
		c.derived = 0
	}
}

// receive reads the body into c.body. Its memory grows with the bytes that have arrived,
// whatever length the client announces.
func (c *Client) receive(limit int) (err error) {
	first, announced := 4<<10, 0
	if c.r.ContentLength >= 0 {
		announced = int(c.r.ContentLength) + 1 // room for the read that finds the end
		first = buffer.FirstRoom(announced)
	}
	if announced > buffer.WholeRead && int64(announced) > c.share.Most() {
		return errBodyNeverFits
	}
	if c.body, err = c.Buffer(first); err != nil {
		return err
	}
	return c.fill(c.r.Body, announced, limit, func(err error) error { return bodyReadError(c.r.Context(), err) })
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
