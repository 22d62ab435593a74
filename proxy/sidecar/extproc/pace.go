package extproc

import "sync/atomic"

// waitsAfter is the number of heads in a row that a late picker must answer in time until answers
// wait for it again.
const waitsAfter = 5

// pace records whether the picker keeps up with the answers that it sees. While the picker does
// not, no answer waits for it. The zero value keeps up. Safe for concurrent use.
type pace struct {
	missing atomic.Int32 // heads that the picker must still answer in time
}

// keepsUp reports whether an answer may wait for the picker.
func (p *pace) keepsUp() bool { return p.missing.Load() == 0 }

// late notes that the picker has not answered a head in time, or reads a body too slowly.
func (p *pace) late() { p.missing.Store(waitsAfter) }

// inTime notes that the picker has answered a head in time.
func (p *pace) inTime() {
	for n := p.missing.Load(); n > 0 && !p.missing.CompareAndSwap(n, n-1); n = p.missing.Load() {
	}
}
