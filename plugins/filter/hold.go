package filter

import (
	"errors"
	"io"

	"github.com/pdproxy/pdproxy/plugins/budget"
)

// ofStream is the kind of bytes that the host holds for a guest as long as the
// stream lasts. The other kinds are the bodies of the two directions, with the
// direction's number.
const ofStream = 2

// hold counts n more bytes that the host holds for the guest. A negative n
// subtracts, but no more than was counted. It returns false when the plugin's
// budget is too small.
func (f *filter) hold(of direction, n int64) bool {
	budget := f.p.deps.Host
	if n <= 0 {
		f.letGo(of, -n)
		return true
	}
	if !budget.Take(n) {
		return false
	}
	f.held[of].Add(n)
	if f.freed.Load() { // the guest cannot be interrupted and still runs after the stream's end
		budget.Give(f.held[of].Swap(0))
		return false
	}
	return true
}

// letGo subtracts n bytes, or all held bytes if there are fewer.
func (f *filter) letGo(of direction, n int64) {
	for {
		held := f.held[of].Load()
		n = min(n, held)
		if n == 0 {
			return
		}
		if f.held[of].CompareAndSwap(held, held-n) {
			f.p.deps.Host.Give(n)
			return
		}
	}
}

// free subtracts all held bytes; further bytes are refused.
func (f *filter) free() {
	f.freed.Store(true)
	for of := range f.held {
		if n := f.held[of].Swap(0); n != 0 {
			f.p.deps.Host.Give(n)
		}
	}
}

var (
	errNoRoom  = errors.New("the plugin's budget does not suffice")
	errTooLong = errors.New("it is too long")
)

// readHeld reads r to its end. It counts the capacity of its result in budget,
// also when it returns an error; the caller subtracts it later. errTooLong: r
// has more than most bytes. errNoRoom: the budget is too small.
func readHeld(budget *budget.Host, r io.Reader, most int) (b []byte, err error) {
	for {
		if len(b) == cap(b) {
			size := min(max(4<<10, 2*cap(b)), most+1)
			if !budget.Take(int64(size)) {
				return b, errNoRoom
			}
			grown := append(make([]byte, 0, size), b...)
			budget.Give(int64(cap(b)))
			b = grown
		}
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		switch {
		case len(b) > most:
			return b, errTooLong
		case errors.Is(err, io.EOF):
			return b, nil
		case err != nil:
			return b, err
		}
	}
}
