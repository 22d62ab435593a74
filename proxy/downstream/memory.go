package downstream

import (
	"io"

	"github.com/pdproxy/pdproxy/proxy/buffer"
)

// MinDerived is the memory in bytes for data derived from a body that is not counted: each exchange
// keeps this memory for the next request.
const MinDerived = 64 << 10

// CountFor makes the memory of the request count for a client, where limits.per_client
// is set. The request must hold no memory yet.
func (c *Client) CountFor(client string) {
	var clients *buffer.Clients
	if c.cfg.Limits.PerClient > 0 {
		clients = &c.bodies.clients
	}
	c.share.Open(c.bodies.memory, clients, client)
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

// noMemory returns the answer for a request that needs n more bytes beside its body. Err
// is the error of package buffer.
func (c *Client) noMemory(n int, err error) error {
	if c.body.Counted()+int64(buffer.Room(n)) > c.share.Most() {
		return errBodyNeverFits
	}
	return memoryError(err)
}

// TakeMemory counts n bytes until the caller gives them back by ReleaseMemory. The error
// satisfies OwnFault; nothing is counted then. Safe for concurrent use.
func (c *Client) TakeMemory(n int64) error {
	if err := c.share.Take(n); err != nil {
		return memoryError(err)
	}
	return nil
}

// TakeScratch is TakeMemory for a scan of the body. It is part of [openai.Memory]. The error
// is the answer for the client.
func (c *Client) TakeScratch(n int64) error {
	if err := c.share.Take(n); err != nil {
		return c.noMemory(int(n), err)
	}
	return nil
}

// ReleaseMemory gives back n bytes of TakeMemory or TakeScratch. Safe for concurrent use.
func (c *Client) ReleaseMemory(n int64) { c.share.Release(n) }

// Reserve counts n bytes outside of buffers until Close. The error satisfies OwnFault.
// Safe for concurrent use.
func (c *Client) Reserve(n int) error {
	if n <= 0 {
		return nil
	}
	if err := c.TakeMemory(int64(n)); err != nil {
		return err
	}
	c.reserved.Add(int64(n))
	return nil
}

// Derive counts n bytes that are made of the request's body, until ReleaseBody. The error
// satisfies OwnFault.
func (c *Client) Derive(n int) error {
	if err := c.TakeMemory(int64(n)); err != nil {
		return err
	}
	c.derived += int64(n)
	return nil
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
