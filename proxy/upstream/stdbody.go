package upstream

import (
	"errors"
	"io"
	"sync"
)

var errBodyReleased = errors.New("request body is released")

// stdBody lends a request's body to the transport, which may go on reading it
// in its own goroutine after RoundTrip has returned, when the caller has already
// reused the memory.
type stdBody struct {
	mu     sync.Mutex
	pieces [][]byte       // guarded by mu
	last   *stdBodyReader // guarded by mu; of the present try
	kept   bool           // guarded by mu; pieces are a copy
	gone   bool           // guarded by mu
}

// stdBodyReader reads the body once.
type stdBodyReader struct {
	body   *stdBody
	left   [][]byte // guarded by body.mu
	closed bool     // guarded by body.mu
}

func (b *stdBody) reader() io.ReadCloser {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last = &stdBodyReader{body: b, left: append([][]byte(nil), b.pieces...)}
	return b.last
}

func (r *stdBodyReader) Read(p []byte) (int, error) {
	r.body.mu.Lock()
	defer r.body.mu.Unlock()
	if r.body.gone || r.closed {
		return 0, errBodyReleased
	}
	n := 0
	for len(r.left) > 0 && n < len(p) {
		k := copy(p[n:], r.left[0])
		n += k
		if r.left[0] = r.left[0][k:]; len(r.left[0]) == 0 {
			r.left = r.left[1:]
		}
	}
	if len(r.left) == 0 {
		return n, io.EOF
	}
	return n, nil
}

func (r *stdBodyReader) Close() error {
	r.body.mu.Lock()
	defer r.body.mu.Unlock()
	r.closed, r.left = true, nil
	return nil
}

// keepRest copies what the transport has still to send after the answer came.
func (b *stdBody) keepRest() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.kept, b.pieces = true, nil
	if b.last == nil {
		return
	}
	for i, piece := range b.last.left {
		b.last.left[i] = append([]byte(nil), piece...)
	}
}

// release takes the body back, unless keepRest has seen to it.
func (b *stdBody) release() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.gone = !b.kept
}
