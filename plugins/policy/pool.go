package policy

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
)

// vm is one guest instance with its hooks looked up.
type vm struct {
	*host.VM
	hooks  [abi.LastHook + 1]*host.Hook // nil: not exported
	notes  *Notebook
	worker *worker // nil in an unguarded module, whose guests are trusted to return
	room   uint32  // size of the scratch buffer of a guarded guest, in bytes
}

// close frees the VM. No call may be running.
func (m *vm) close(ctx context.Context) error {
	if m.worker != nil {
		close(m.worker.tasks)
	}
	return m.Close(ctx)
}

// slot is one place of the pool, with a separate cache line.
type slot struct {
	vm atomic.Pointer[vm]
	_  [56]byte
}

// pool holds the VMs that are not in use. Taking a VM and putting it back are
// one atomic exchange each; a caller waits only when it finds no VM. The VM
// that was put back last is likely to be taken first, because its memory is in
// the cache.
type pool struct {
	slots   []slot
	waiting atomic.Int32
	wake    chan struct{} // one token makes one waiter look again
	closed  chan struct{} // closed when no caller may wait any more
	close   func()        // closes closed; later calls do nothing
	timers  sync.Pool     // of *time.Timer, stopped
}

func newPool(size int) *pool {
	p := &pool{slots: make([]slot, size), wake: make(chan struct{}, size), closed: make(chan struct{})}
	p.close = sync.OnceFunc(func() { close(p.closed) })
	return p
}

// grab takes a VM; nil when none is free.
func (p *pool) grab() *vm {
	for i := range p.slots {
		s := &p.slots[i].vm
		if s.Load() == nil {
			continue
		}
		if v := s.Swap(nil); v != nil {
			return v
		}
	}
	return nil
}

// put returns a VM to the pool. There is always a free slot, because the pool
// never has more VMs than slots. A waiter counts itself before it looks, and put fills the slot
// before it checks for waiters. So either the waiter finds the VM, or put finds the waiter.
func (p *pool) put(v *vm) {
	for i := 0; ; i = (i + 1) % len(p.slots) {
		if p.slots[i].vm.CompareAndSwap(nil, v) {
			break
		}
	}
	if p.waiting.Load() > 0 {
		p.nudge()
	}
}

// nudge makes one waiter look again.
func (p *pool) nudge() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// wait takes a VM as soon as one is free, at most after limit. It returns nil when no
// VM became free, or when the pool closed.
func (p *pool) wait(limit time.Duration) *vm {
	timer, _ := p.timers.Get().(*time.Timer)
	if timer == nil {
		timer = time.NewTimer(limit)
	} else {
		timer.Reset(limit)
	}
	defer func() {
		timer.Stop()
		p.timers.Put(timer)
	}()
	p.waiting.Add(1)
	defer p.waiting.Add(-1)
	for {
		if v := p.grab(); v != nil {
			return v
		}
		select {
		case <-p.wake:
		case <-p.closed:
			return nil
		case <-timer.C:
			return nil
		}
	}
}

// isClosed reports whether the pool no longer gives VMs to waiting callers.
func (p *pool) isClosed() bool {
	select {
	case <-p.closed:
		return true
	default:
		return false
	}
}
