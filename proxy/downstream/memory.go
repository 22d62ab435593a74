package downstream

import (
	"errors"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// MinDerived is the memory for data made of a body that is not counted, in bytes: each
// exchange keeps that much for the next request.
const MinDerived = 64 << 10

// Failures because the proxy itself lacks memory or descriptors. They are not charged to
// an engine, and no leg is retried because of them. Their codes are reasons of
// pdproxy_shed_total.
var (
	ErrMemory       = &openai.Error{Status: 503, Type: "overloaded_error", Code: "memory_limit", Message: "the memory of the proxy for requests and answers is used up"}
	ErrOverloaded   = &openai.Error{Status: 503, Type: "overloaded_error", Code: "proxy_overloaded", Message: "the proxy has no descriptor, port or memory for a connection to an engine"}
	errClientMemory = &openai.Error{Status: 429, Type: "rate_limit_error", Code: "client_memory_limit", Message: "the requests of this client hold as much memory as one client may"}
)

var errBodyNeverFits = &openai.Error{Status: 413, Code: "body_too_large", Message: "the request does not fit in limits.buffer_memory, or in the half of it that one client may hold"}

// OwnFault reports whether err is a failure because the proxy itself lacks memory or
// descriptors.
func OwnFault(err error) bool {
	return errors.Is(err, ErrMemory) || errors.Is(err, errClientMemory) || errors.Is(err, ErrOverloaded)
}

// memoryError returns the answer for an error of package buffer.
func memoryError(err error) error {
	if errors.Is(err, buffer.ErrShare) {
		return errClientMemory
	}
	return ErrMemory
}

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

// LegBuffer is Buffer for the bytes of one leg. Its error satisfies OwnFault.
func (c *Client) LegBuffer(n int) (*buffer.Buffer, error) {
	b, err := c.share.Get(n)
	if err != nil {
		return nil, memoryError(err)
	}
	return b, nil
}

// TakeMemory counts n bytes until the caller gives them back by ReleaseMemory. The error
// satisfies OwnFault; nothing is counted then. Safe for concurrent use.
func (c *Client) TakeMemory(n int64) error {
	if err := c.share.Take(n); err != nil {
		return memoryError(err)
	}
	return nil
}

// ReleaseMemory gives back n bytes of TakeMemory. Safe for concurrent use.
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
