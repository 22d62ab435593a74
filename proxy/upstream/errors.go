package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
)

// The steps at which a call can fail: Error.Op.
const (
	OpCap   = "cap"   // waiting for a connection at MaxConns
	OpDial  = "dial"  // connecting, TLS handshake included
	OpWrite = "write" // checking and sending the request
	OpHead  = "head"  // waiting for and reading the head of the answer
	OpBody  = "body"  // reading the body
)

// Error describes how a call failed. Its text contains nothing of the request or the
// answer.
type Error struct {
	Op      string // one of the Op constants
	Sent    bool   // some of the request may have reached the engine, in any try
	Timeout bool   // a deadline of an option, the request or the context has passed
	// Local: this host could not open a connection because it has no descriptor, port or
	// memory left. The engine has not failed.
	Local bool
	// Err is the cause. If the context ended, errors.Is finds both its Err and its
	// Cause. A connection that was lost before the end of a body is
	// io.ErrUnexpectedEOF.
	Err error
	// Detached is the rest of an evicted call whose answer may still arrive; nil if there is none.
	Detached *Detached
}

// Error implements error.
func (e *Error) Error() string {
	switch e.Op {
	case OpCap:
		return "await connection: " + e.Err.Error()
	case OpDial:
		return "dial engine: " + e.Err.Error()
	case OpWrite:
		return "send request: " + e.Err.Error()
	case OpHead:
		return "read answer head: " + e.Err.Error()
	}
	return "read answer body: " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// ErrClosed is the cause of a Read after or during Close.
var ErrClosed = errors.New("answer is closed")

var (
	errBadURL    = errors.New("engine url is not http or https with a host")
	errBadMethod = errors.New("method is not a token")
	errBadPath   = errors.New("path does not begin with a slash or has a control character or space")
	errBadField  = errors.New("header field has a name that is no token or a control character in its value")
	errBadCoding = errors.New("header field Transfer-Encoding is not the caller's to set")

	errTimeout = fmt.Errorf("%w", os.ErrDeadlineExceeded)

	errStatusLine   = errors.New("malformed status line")
	errFieldLine    = errors.New("malformed header line")
	errFolded       = errors.New("folded header line")
	errBigHead      = errors.New("head is too large")
	errLength       = errors.New("malformed Content-Length")
	errLengths      = errors.New("differing Content-Length")
	errCoding       = errors.New("unsupported Transfer-Encoding")
	errTwoFramings  = errors.New("both Content-Length and Transfer-Encoding")
	errInformations = errors.New("too many informational answers")
	errSwitched     = errors.New("status 101 without an upgrade")

	errChunkSize    = errors.New("malformed chunk size")
	errChunkLine    = errors.New("chunk line is too long")
	errChunkEnd     = errors.New("chunk without line end")
	errTrailer      = errors.New("malformed trailer")
	errTrailerBytes = errors.New("trailer is too large")
)

// contextError returns why ctx ended: its Err, joined with its Cause if the Cause
// differs.
func contextError(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if errors.Is(cause, err) {
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// isTimeout reports whether err means that a deadline passed.
func isTimeout(err error) bool {
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
		return true
	}
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// lost wraps err, with which a connection ended inside an answer, in
// io.ErrUnexpectedEOF.
func lost(err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%w: %w", io.ErrUnexpectedEOF, err)
}
