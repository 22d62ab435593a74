package policy

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// worker is the goroutine that runs the guest of one VM of a guarded module, so
// that a request can leave a call that takes too long: the guest then comes to its
// end here, and its VM is used again or closed here.
//
// The request that holds the VM writes the task and wakes the worker, which runs the
// guest. Each of the two leaves the call once and counts that in exits. If the worker
// leaves first, the request has the result and keeps the VM. If the request leaves
// first, it does not touch the VM any more. Then the one that leaves last calls aside,
// which puts the VM back or closes it.
type worker struct {
	tasks chan struct{} // a task is written; closed with the VM
	done  chan struct{} // the worker is out first
	exits atomic.Int32  // how many are out of the call
	timer *time.Timer   // of the request's wait; who holds the VM uses it

	// The task, written by who holds the VM.
	p     *Policy
	room  uint32 // ask the guest for a scratch of this size; 0: call the hook
	at    uint32 // of the frame
	size  uint32 // of the frame
	began time.Time

	// The result, written by the worker.
	answer int64
	err    error

	kill *time.Timer // interrupts a call that was left; nil: none was, or it is interrupted already
}

// startWorker starts the goroutine of a new VM, which ends when the VM is closed.
func (v *Version) startWorker(m *vm) {
	w := &worker{tasks: make(chan struct{}, 1), done: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
	w.timer.Stop()
	m.worker = w
	v.workers.Go(func() {
		for range w.tasks {
			w.answer, w.err = w.run(m)
			if w.exits.Add(1) == 1 {
				w.done <- struct{}{}
			} else {
				v.aside(m)
			}
		}
	})
}

// run does the task.
func (w *worker) run(m *vm) (answer int64, err error) {
	ctx := context.Background()
	if w.room > 0 {
		_, _, err = m.Scratch(ctx, w.room)
		return 0, err
	}
	return m.hooks[w.p.Hook].Call(ctx, w.at, w.size)
}

// errLeft says that a call was left, with its VM.
var errLeft = errors.New("the call took longer than the request waits")

// do hands the task over and waits for the result until the given time. errLeft:
// there is none by then, and the VM is gone from the caller.
func (w *worker) do(v *Version, m *vm, until time.Time) (answer int64, err error) {
	w.exits.Store(0)
	w.began = time.Now()
	w.timer.Reset(until.Sub(w.began))
	w.tasks <- struct{}{}
	select {
	case <-w.done:
		w.timer.Stop()
		return w.answer, w.err
	case <-w.timer.C:
	}
	// What the guest asks for from now on is not part of a decision any more.
	m.Detach()
	m.notes.show(nil)
	if ran := time.Since(w.began); ran < v.opts.Budget { // the request waited for the VM before
		w.kill = time.AfterFunc(v.opts.Budget-ran, m.Interrupt)
	} else {
		m.Interrupt()
	}
	if w.exits.Add(1) == 2 {
		<-w.done
		v.aside(m)
	}
	return 0, errLeft
}

// aside deals with the VM of a call that the request has left, when the guest is
// out of it. A guest that used up its time is charged, and its VM replaced. One
// that began late and ended in time is used again; if that one failed, the cause
// may be that the host refused its calls, so its VM is replaced without a charge.
func (v *Version) aside(m *vm) {
	w, innocent := m.worker, false
	if w.kill != nil {
		if innocent = w.kill.Stop(); !innocent {
			m.Interrupt() // the timer may be about to, and must not meet the next call
		}
		w.kill = nil
	}
	why := m.Err()
	if why == nil {
		m.notes.Take()
		m.Attach()
		v.pool.put(m)
		return
	}
	if !innocent {
		v.blame(w.p, Late, why, w.began)
	}
	v.replace(m)
}
