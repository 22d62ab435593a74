package openai

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
)

// trusted is how much room a declared length gets before any byte has come, so
// that a client cannot reserve memory by a header alone.
const trusted = 1 << 20

// ReadBody reads src to its end into the room of dst, which it overwrites and
// grows as needed. size is the declared length, -1 if there is none. A body of
// more than limit bytes is an *Error with status 413, before anything is read
// if size says so; any other error is that of src, wrapped.
func ReadBody(dst []byte, src io.Reader, size, limit int64) ([]byte, error) {
	dst = dst[:0]
	if size > limit {
		return dst, tooLarge(limit)
	}
	// One byte more than is due, so that the read that meets the end has room.
	if want := min(size, trusted) + 1; int64(cap(dst)) < want {
		dst = make([]byte, 0, want)
	}
	for {
		if len(dst) == cap(dst) {
			dst = append(dst, 0)[:len(dst)]
		}
		room := min(int64(cap(dst)), limit+1)
		n, err := src.Read(dst[len(dst):room])
		dst = dst[:len(dst)+n]
		if int64(len(dst)) > limit {
			return dst[:0], tooLarge(limit)
		}
		switch err {
		case nil:
		case io.EOF:
			return dst, nil
		default:
			return dst, fmt.Errorf("read body: %w", err)
		}
	}
}

func tooLarge(limit int64) *Error {
	return &Error{
		Status:  http.StatusRequestEntityTooLarge,
		Code:    "body_too_large",
		Message: "The body is larger than " + strconv.FormatInt(limit, 10) + " bytes.",
	}
}
