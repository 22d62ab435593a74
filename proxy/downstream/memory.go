package downstream

import "github.com/pdproxy/pdproxy/proxy/buffer"

// MinDerived is the memory in bytes for data derived from a body that is not counted: each exchange
// keeps this memory for the next request.
const MinDerived = 64 << 10

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
