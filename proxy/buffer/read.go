package buffer

import (
	"errors"
	"io"
	"os"
	"time"
)

const (
	// MaxAnswer limits an answer of an engine that is held whole, in bytes: the token ids
	// of a very long prompt and an opaque state fit.
	MaxAnswer = 64 << 20
	// MaxErrorAnswer limits the first event of a stream that may be an error, and the
	// answer to a clean-up, in bytes.
	MaxErrorAnswer = 64 << 10
	// FirstRead is the memory in bytes that a body gets before its bytes have arrived,
	// if its sender announces more than WholeRead.
	FirstRead = 16 << 10
	// WholeRead is the announced length in bytes up to which a body gets all its memory
	// at once: most prompts are not copied then.
	WholeRead = 64 << 10
)

// FirstRoom returns the memory in bytes for a body of that announced length.
func FirstRoom(announced int) int {
	if announced <= WholeRead {
		return announced
	}
	return FirstRead
}

// ErrTooLarge reports that a body is larger than its limit.
var ErrTooLarge = errors.New("the answer is too large")

// TimedReader is a body whose reads have a limit of time.
type TimedReader interface {
	io.Reader
	// SetIdleTimeout limits the time of each read from now on.
	SetIdleTimeout(d time.Duration)
}

// ReadAll reads a body of at most limit bytes to its end, into a buffer that g counts.
// Announced is the length that the sender announced, not positive if there is none. The
// end must have been read at the time by; zero sets no limit but that of each read. The
// error is ErrFull, ErrTooLarge, os.ErrDeadlineExceeded or that of r. The caller frees
// the buffer also after an error; it may then be nil.
func (g *Budget) ReadAll(r TimedReader, announced int64, limit int, by time.Time) (*Buffer, error) {
	if announced > int64(limit) {
		return nil, ErrTooLarge
	}
	first, want := 4<<10, 0
	if announced > 0 {
		want = int(announced) + 1 // room for the read that finds the end
		first = FirstRoom(want)
	}
	b, err := g.Get(first)
	if err != nil {
		return nil, err
	}
	for {
		if len(b.B) == cap(b.B) {
			if err := b.Grow(want, limit+1); err != nil {
				return b, err
			}
		}
		if !by.IsZero() {
			left := time.Until(by)
			if left <= 0 {
				return b, os.ErrDeadlineExceeded
			}
			r.SetIdleTimeout(left)
		}
		n, err := r.Read(b.B[len(b.B):cap(b.B)])
		b.B = b.B[:len(b.B)+n]
		if err == io.EOF {
			return b, nil
		}
		if err == nil && len(b.B) > limit {
			err = ErrTooLarge
		}
		if err != nil {
			return b, err
		}
	}
}
