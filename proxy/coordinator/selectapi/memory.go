package selectapi

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/pdproxy/pdproxy/proxy/buffer"
)

// held is the memory of one request: its body, the body as MessagePack, and the lists that are
// read from it. All of it is counted before it is allocated.
type held struct {
	memory *buffer.Budget
	body   *buffer.Buffer // nil: not read
	packed *buffer.Buffer // nil: the body is MessagePack
	lists  int64          // bytes
}

// The errors of a body that is not read.
var (
	errMemory   = errors.New("there is no memory for the body")
	errTooLarge = errors.New("the body is too large")
	errBody     = errors.New("cannot read the body")
)

// receive reads the body of at most limit bytes. The result is never nil.
func (h *Handler) receive(r *http.Request, limit int) (m *held, err error) {
	m = &held{memory: &h.memory}
	m.body, err = h.memory.ReadAll(untimed{r.Body}, r.ContentLength, limit, time.Time{})
	switch {
	case errors.Is(err, buffer.ErrFull) && r.ContentLength > h.o.Memory:
		err = errTooLarge
	case errors.Is(err, buffer.ErrFull):
		err = errMemory
	case errors.Is(err, buffer.ErrTooLarge):
		err = errTooLarge
	case err != nil:
		err = errBody
	}
	return m, err
}

// untimed is a body whose reads have the limits of the server.
type untimed struct{ io.Reader }

// SetIdleTimeout implements buffer.TimedReader.
func (untimed) SetIdleTimeout(time.Duration) {}

// bytes returns the body.
func (m *held) bytes() []byte {
	if m.body == nil {
		return nil
	}
	return m.body.B
}

// pack returns a JSON body as MessagePack. ok is false for invalid JSON.
func (m *held) pack() (packed []byte, ok bool, err error) {
	if bytes.IndexByte(m.bytes(), '\\') >= 0 { // a copy of the longest string, while it is unescaped
		if err := m.take(len(m.bytes())); err != nil {
			return nil, false, err
		}
	}
	// "1e1," has 4 bytes, and 9 as MessagePack. A list "[]," has 3, and 5.
	if m.packed, err = m.memory.Get(len(m.bytes())*9/4 + 16); err != nil {
		return nil, false, errMemory
	}
	packed, err = appendMsgpack(m.packed.B, m.bytes())
	if err != nil {
		return nil, false, nil
	}
	m.packed.Set(packed)
	return packed, true, nil
}

// text returns a string that the budget counts, "" for a value of another type.
func (m *held) text(raw []byte) (string, error) {
	text, _, err := msgp.ReadStringZC(raw)
	if err != nil {
		return "", nil
	}
	if err := m.take(len(text)); err != nil {
		return "", err
	}
	return string(text), nil
}

// take counts n bytes until release. The error is errMemory.
func (m *held) take(n int) error {
	if !m.memory.Take(int64(n)) {
		return errMemory
	}
	m.lists += int64(n)
	return nil
}

// release frees all.
func (m *held) release() {
	m.body.Free()
	m.packed.Free()
	m.memory.Release(m.lists)
	*m = held{memory: m.memory}
}
