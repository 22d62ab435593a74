package proxy

import (
	"errors"
	"os"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// leastDerived is how much memory for what is made of a body is not counted, in
// bytes: exchanges keep that much for the next request.
const leastDerived = 64 << 10

// Failures for want of memory or of descriptors in the proxy itself. No engine is
// charged for them, and no leg is retried because of them. Their codes are reasons
// of pdproxy_shed_total.
var (
	errMemory       = &openai.Error{Status: 503, Type: "overloaded_error", Code: "memory_limit", Message: "the memory of the proxy for requests and answers is used up"}
	errClientMemory = &openai.Error{Status: 429, Type: "rate_limit_error", Code: "client_memory_limit", Message: "the requests of this client hold as much memory as one client may"}
	errOverloaded   = &openai.Error{Status: 503, Type: "overloaded_error", Code: "proxy_overloaded", Message: "the proxy has no descriptor, port or memory for a connection to an engine"}
)

var errBodyNeverFits = &openai.Error{Status: 413, Code: "body_too_large", Message: "the request does not fit in limits.buffer_memory, or in the half of it that one client may hold"}

// ownFault reports whether err is a failure for want of memory or of descriptors in
// the proxy itself.
func ownFault(err error) bool {
	return errors.Is(err, errMemory) || errors.Is(err, errClientMemory) || errors.Is(err, errOverloaded)
}

// shareOf makes what the exchange holds count for a client, where limits.per_client
// counts clients. The exchange holds nothing yet.
func (x *exchange) shareOf(client string) {
	var clients *buffer.Clients
	if x.cfg.Limits.PerClient > 0 {
		clients = &x.s.holding
	}
	x.share.Open(x.s.memory, clients, client)
}

// memoryError is what the client is told of an error of the package buffer.
func memoryError(err error) error {
	if errors.Is(err, buffer.ErrShare) {
		return errClientMemory
	}
	return errMemory
}

// hold returns a buffer with room for n bytes of the request, counted by the
// process's budget. The exchange's goroutine calls it.
func (x *exchange) hold(n int) (*buffer.Buffer, error) {
	b, err := x.share.Get(n)
	if err != nil {
		return nil, x.noMemory(n, err)
	}
	return b, nil
}

// noMemory is the answer to a request that there is no room for, by err: n more
// bytes beside its body.
func (x *exchange) noMemory(n int, err error) error {
	if x.body.Counted()+int64(buffer.Room(n)) > x.share.Most() {
		return errBodyNeverFits
	}
	return memoryError(err)
}

// reserve counts n bytes that the exchange holds outside of pooled buffers, until
// it is closed. Any goroutine of the exchange may call it.
func (x *exchange) reserve(n int) error {
	if n <= 0 {
		return nil
	}
	if err := x.share.Take(int64(n)); err != nil {
		return memoryError(err)
	}
	x.reserved.Add(int64(n))
	return nil
}

// Derive is reserve for what is made of the request's body, until the body is given
// back. The exchange's goroutine calls it.
func (x *exchange) Derive(n int) error {
	if err := x.share.Take(int64(n)); err != nil {
		return memoryError(err)
	}
	x.derived += int64(n)
	return nil
}

// unreserve gives back what reserve counted.
func (x *exchange) unreserve() {
	if n := x.reserved.Swap(0); n > 0 {
		x.share.Release(n)
	}
}

// readAnswer reads an answer whole into a buffer that memory counts. The whole
// answer must be there at the time by; zero sets no limit but that of each read.
// The error is errMemory, buffer.ErrTooLarge or an *upstream.Error; the buffer may
// then be nil.
func readAnswer(memory *buffer.Budget, resp *upstream.Response, limit int, by time.Time) (*buffer.Buffer, error) {
	b, err := memory.ReadAll(resp, resp.ContentLength, limit, by)
	switch err {
	case buffer.ErrFull:
		err = errMemory
	case os.ErrDeadlineExceeded:
		err = &upstream.Error{Op: upstream.OpBody, Sent: true, Timeout: true, Err: err}
	}
	return b, err
}
