package coordinator

import (
	"sync/atomic"

	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// Lease is what a placement holds of its targets: load on both, and the disagg
// id. Both methods may be called any number of times, by any goroutine: each
// hold is dropped once.
type Lease struct {
	local       *Local
	id          uint64
	prefill     load.Hold
	decode      load.Hold
	prefillDone atomic.Bool
	released    atomic.Bool
}

// PrefillDone drops prefill's load: the engine has computed the prompt.
func (l *Lease) PrefillDone() {
	if l.prefillDone.CompareAndSwap(false, true) {
		l.prefill.Drop()
	}
}

// Release drops whatever the lease still holds.
func (l *Lease) Release() {
	if !l.released.CompareAndSwap(false, true) {
		return
	}
	l.PrefillDone()
	l.decode.Drop()
	if l.id != 0 {
		l.local.live.Drop(l.id)
	}
	l.local.open.Add(-1)
}
