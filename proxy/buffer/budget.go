package buffer

import "sync/atomic"

// Budget counts bytes that are held, up to a limit. The zero value and nil have
// no limit. All methods are safe for concurrent use; none takes a lock.
type Budget struct {
	limit atomic.Int64 // bytes; 0: none
	_     [56]byte     // every request writes used: keep it off the line of limit
	used  atomic.Int64 // bytes
}

// SetLimit sets the limit in bytes; 0 is none. What is held already stays.
func (g *Budget) SetLimit(n int64) { g.limit.Store(n) }

// Limit is the limit in bytes; 0 is none.
func (g *Budget) Limit() int64 { return g.limit.Load() }

// Used is how many bytes are counted now.
func (g *Budget) Used() int64 { return g.used.Load() }

// Take counts n bytes; false means that there is no room for them, and nothing
// is counted. The caller gives them back by Release.
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

// Release gives back n bytes that were taken.
func (g *Budget) Release(n int64) { g.add(-n) }

// add counts n bytes whatever the limit.
func (g *Budget) add(n int64) {
	if g != nil {
		g.used.Add(n)
	}
}
