package httpguard

import (
	"sync"
	"time"
)

const (
	// quietFor is how long a client's address is not logged again.
	quietFor = time.Minute
	// maxQuiet bounds the addresses that are remembered.
	maxQuiet = 1024
)

// quiet remembers which clients were logged a short time ago. It is safe for
// concurrent use.
type quiet struct {
	mu   sync.Mutex
	last map[string]time.Time // guarded by mu
}

func newQuiet() *quiet { return &quiet{last: map[string]time.Time{}} }

// first reports whether a client is to be logged now. While too many addresses are
// remembered, no others are logged.
func (q *quiet) first(client string) bool {
	now := time.Now()
	q.mu.Lock()
	defer q.mu.Unlock()
	if then, there := q.last[client]; there && now.Sub(then) < quietFor {
		return false
	}
	if len(q.last) >= maxQuiet {
		for other, then := range q.last {
			if now.Sub(then) >= quietFor {
				delete(q.last, other)
			}
		}
		if len(q.last) >= maxQuiet {
			return false
		}
	}
	q.last[client] = now
	return true
}
