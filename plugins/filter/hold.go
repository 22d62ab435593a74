package filter

import (
	"errors"
	"io"

	"github.com/pdproxy/pdproxy/plugins/budget"
)

// What the bytes are of that the host holds for a guest in a stream: of a body in
// one direction (those are numbered as the directions), or of anything that lasts
// as long as the stream.
const ofStream = 2

// hold counts n bytes more that the host holds for the guest; n below 0 gives
// back, but no more than was taken. false: the plugin's budget does not suffice.
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
	if f.freed.Load() { // a guest that outlives its stream, because nothing can interrupt the guest
		budget.Give(f.held[of].Swap(0))
		return false
	}
	return true
}

// letGo gives back n bytes, or all that is held.
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

// free gives back all that is held, for good.
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

// readHeld reads r to its end and counts the capacity of what it returns, also
// with an error, in budget: the caller gives that back. errTooLong: there are
// more than most bytes. errNoRoom: the budget does not suffice.
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
