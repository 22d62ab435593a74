// Package lograte limits the log lines that peers can cause: each key, such as a peer's
// address, may log one line in a period.
//
// The decisions behind this package are in docs/design/request.md.
package lograte

import (
	"cmp"
	"sync"
	"time"
)

// defaultMost is the number of keys of a Limiter without Most.
const defaultMost = 1024

// Limiter decides which keys may be logged now: each key once in Every. It stores at most
// Most keys. While all of these are younger than Every, the Limiter allows no other key.
// Limiter is safe for concurrent use. The zero value logs everything.
type Limiter[K comparable] struct {
	Every time.Duration // must not change after the first call of Allow
	Most  int           // 0: 1024. Must not change after the first call of Allow

	mu   sync.Mutex
	last map[K]time.Time // guarded by mu
}

// Allow reports whether key may be logged now, and then counts the line.
func (l *Limiter[K]) Allow(key K) bool {
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if then, known := l.last[key]; known && now.Sub(then) < l.Every {
		return false
	}
	if len(l.last) >= l.most() && !l.forget(now) {
		return false
	}
	if l.last == nil {
		l.last = make(map[K]time.Time)
	}
	l.last[key] = now
	return true
}

// forget drops the keys that are older than Every, and reports whether there is room for
// another key. The caller holds mu.
func (l *Limiter[K]) forget(now time.Time) bool {
	for key, then := range l.last {
		if now.Sub(then) >= l.Every {
			delete(l.last, key)
		}
	}
	return len(l.last) < l.most()
}

func (l *Limiter[K]) most() int { return cmp.Or(l.Most, defaultMost) }
