package policy

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// worker is the goroutine that runs the guest of one VM of a guarded module, so
// that a request can leave a call that takes too long. The guest's call then
// ends here, and the worker reuses or closes its VM.
//
// The request that holds the VM writes the task and wakes the worker, which
// runs the guest. Each of the two leaves the call once and counts that in
// exits. If the worker leaves first, the request has the result and keeps the
// VM. If the request leaves first, it must not use the VM any more; the worker,
// which leaves last, then calls aside to put the VM back or to close it.
type worker struct {
	tasks chan struct{} // a task is written; closed with the VM
	done  chan struct{} // the worker left first
	exits atomic.Int32  // number of parties that have left the call
	timer *time.Timer   // for the wait of the request; the goroutine that holds the VM uses it

	// The task, written by the holder of the VM.
	p     *Policy
	room  uint32 // ask the guest for a scratch of this size; 0: call the hook
	at    uint32 // of the frame
	size  uint32 // of the frame
	began time.Time

	// The result, written by the worker.
	answer int64
	err    error

	kill *time.Timer // interrupts a call that the request has left; nil: no such call, or it is interrupted already
}

// startWorker starts the goroutine of a new VM. It ends when the VM is closed.
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

// run executes the task.
func (w *worker) run(m *vm) (answer int64, err error) {
	ctx := context.Background()
	if w.room > 0 {
		_, _, err = m.Scratch(ctx, w.room)
		return 0, err
	}
	return m.hooks[w.p.Hook].Call(ctx, w.at, w.size)
}

// errLeft reports that the request left the call and its VM.
var errLeft = errors.New("the call took longer than the request waits")

// do passes the task to the worker and waits for the result until the given time. The
// error errLeft means that there is no result and that the caller no longer owns the VM.
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
	// From now on, the guest's calls of host functions do not belong to a
	// decision.
	m.Detach()
	m.notes.show(nil)
	if ran := time.Since(w.began); ran < v.opts.Budget { // the request had waited for the VM before the call began
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

// aside handles the VM of a call that the request has left, after the guest's
// call has ended. A guest that used up its time counts as failed, and its VM is
// replaced. If the call began late and ended in time, the VM is reused. If such
// a call failed, the refused host calls may be the cause, so the VM is replaced
// without counting a failure.
func (v *Version) aside(m *vm) {
	w, innocent := m.worker, false
	if w.kill != nil {
		if innocent = w.kill.Stop(); !innocent {
			m.Interrupt() // the timer may fire now, and must not interrupt the next call
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
