package downstream

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// ErrWrite reports that the client does not take the answer.
var ErrWrite = errors.New("write to client")

// ErrDraining is the cause with which the contexts of requests end when the proxy shuts
// down, and Draining is the answer.
var (
	ErrDraining = errors.New("the proxy is shutting down")
	Draining    = openai.NewError(openai.CodeDraining, "the proxy is shutting down")
)

// Reasons to stop reading a body.
var (
	errBodySlow = openai.NewError(openai.CodeBodyTimeout, "the request body arrived more slowly than server.min_body_rate")
	// ErrReading reports that the body had to make room for another.
	ErrReading = openai.NewError(openai.CodeReadingLimit, "too many request bodies are being read; this one was the slowest")
)

// stoppedBody is the error of a body that the proxy has stopped reading.
type stoppedBody struct{ why *openai.Error }

func (e *stoppedBody) Error() string { return e.why.Message }

// Unwrap returns the reason, and for filters the error of a passed deadline.
func (e *stoppedBody) Unwrap() []error { return []error{e.why, os.ErrDeadlineExceeded} }

func errBodyTooLarge(limit int64) error {
	return openai.NewError(openai.CodeBodyTooLarge, fmt.Sprintf("the request body is larger than %d bytes", limit))
}

var errBodyTimeout = openai.NewError(openai.CodeBodyTimeout, "the request body did not come in time")

// bodyReadError returns the answer for a request body that did not come whole: the
// client left, was too slow, or broke the framing.
func bodyReadError(ctx context.Context, err error) error {
	var stopped *stoppedBody
	var refused *openai.Error // by the reader of a gateway's messages
	switch {
	case errors.As(err, &stopped):
		return stopped.why
	case errors.As(err, &refused):
		return refused
	case errors.Is(err, os.ErrDeadlineExceeded): // the deadline ends the context too
		return errBodyTimeout
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return openai.NewError(openai.CodeBodyIncomplete, "the request body could not be read")
}

// BodyStopped reports whether err is a request body that did not come in time.
func BodyStopped(err error) bool {
	var oe *openai.Error
	return errors.As(err, &oe) && oe.Status == http.StatusRequestTimeout
}

// Failures because the proxy itself lacks memory or descriptors. They are not charged to
// an engine, and no leg is retried because of them. Their codes are reasons of
// pdproxy_shed_total.
var (
	ErrMemory       = openai.NewError(openai.CodeMemoryLimit, "the memory of the proxy for requests and answers is used up")
	ErrOverloaded   = openai.NewError(openai.CodeProxyOverloaded, "the proxy has no descriptor, port or memory for a connection to an engine")
	errClientMemory = openai.NewError(openai.CodeClientMemoryLimit, "the requests of this client hold as much memory as one client may")
)

var errBodyNeverFits = openai.NewError(openai.CodeBodyTooLarge, "the request does not fit in limits.buffer_memory, or in the half of it that one client may hold")

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
