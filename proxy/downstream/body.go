package downstream

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
)

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

// receive reads the body into c.body. Its memory grows with the bytes that have arrived,
// whatever length the client announces.
func (c *Client) receive(limit int) (err error) {
	first, announced := 4<<10, 0
	if c.r.ContentLength >= 0 {
		announced = int(c.r.ContentLength) + 1 // room for the read that finds the end
		if first = announced; announced > buffer.WholeRead {
			first = buffer.FirstRead
		}
	}
	if announced > buffer.WholeRead && int64(announced) > c.share.Most() {
		return errBodyNeverFits
	}
	if c.body, err = c.Buffer(first); err != nil {
		return err
	}
	return c.fill(c.r.Body, announced, limit, func(err error) error {
		if b := incomingOf(c.r.Context()); b != nil && b.mustClose() {
			c.w.Header().Set("Connection", "close")
		}
		return bodyReadError(c.r.Context(), err)
	})
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
