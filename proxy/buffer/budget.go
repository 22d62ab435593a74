package buffer

import "sync/atomic"

// Budget counts held bytes up to a limit. The zero value and nil have no limit. All
// methods are safe for concurrent use and take no lock.
type Budget struct {
	limit atomic.Int64 // bytes; 0: none
	_     [56]byte     // every request writes used: keep it on another cache line than limit
	used  atomic.Int64 // bytes
}

// SetLimit sets the limit in bytes; 0 means none. Bytes that are already held stay.
func (g *Budget) SetLimit(n int64) { g.limit.Store(n) }

// Limit returns the limit in bytes; 0 means none.
func (g *Budget) Limit() int64 { return g.limit.Load() }

// Used returns the number of counted bytes.
func (g *Budget) Used() int64 { return g.used.Load() }

// Take counts n bytes. It returns false and counts nothing if there is no room. The
// caller returns the bytes by Release.
func (g *Budget) Take(n int64) bool {
	if g == nil {
		return true
	}
	used, limit := g.used.Add(n), g.limit.Load()
	if limit > 0 && used > limit {
		g.used.Add(-n)
		return false
	}
	return true
}

func (g *Budget) take(n int64) error {
	if !g.Take(n) {
		return ErrFull
	}
	return nil
}

// Release returns n bytes that were taken.
func (g *Budget) Release(n int64) { g.add(-n) }

// Add counts n bytes regardless of the limit. A negative n returns bytes.
func (g *Budget) Add(n int64) { g.add(n) }

// add counts n bytes regardless of the limit.
func (g *Budget) add(n int64) {
	if g != nil {
		g.used.Add(n)
	}
}
