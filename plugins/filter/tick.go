package filter

import (
	"context"
	"errors"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
)

// stir wakes the background goroutine.
func (v *vm) stir() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

// maxReady is of how many items of one queue a guest is told that have come
// since it was told of the last one.
const maxReady = 1 << 16

// queueReady is told of an item by the queue, from inside some guest's call.
func (v *vm) queueReady(queue uint32) {
	v.mu.Lock()
	v.ready[queue] = min(v.ready[queue]+1, maxReady)
	v.mu.Unlock()
	v.stir()
}

// background does what comes from no stream: ticks, which are re-armed when the
// callback has returned, so that they never overlap, news of queues, and the
// ends of contexts, which no client waits for. It returns when the VM is gone.
func (v *vm) background() {
	ticks := time.NewTimer(time.Hour)
	defer ticks.Stop()
	v.rearmTicks(ticks, false)
	for {
		ticked := false
		select {
		case <-v.gone:
			return
		case <-v.wake:
			v.endContexts()
			v.tellQueues()
		case <-ticks.C:
			ticked = true
			_ = v.callRoot(host.OnTick, func(ctx context.Context) error { return v.guest.Tick(ctx, rootContext) })
		}
		v.rearmTicks(ticks, ticked)
	}
}

// rearmTicks sets the timer when the period was set or the tick is over.
func (v *vm) rearmTicks(ticks *time.Timer, ticked bool) {
	v.mu.Lock()
	period, set := v.period, v.rearm
	v.rearm = false
	v.mu.Unlock()
	switch {
	case period == 0:
		ticks.Stop()
	case set || ticked:
		ticks.Reset(period)
	}
}

// callRoot enters the guest for its root context however long that takes: it
// has to happen some time.
func (v *vm) callRoot(c host.Callback, do func(ctx context.Context) error) error {
	if err := v.enter(false); err != nil {
		return err
	}
	return v.run(c, do)
}

// tellQueues calls proxy_on_queue_ready for each item that came.
func (v *vm) tellQueues() {
	v.mu.Lock()
	ready := v.ready
	if len(ready) > 0 {
		v.ready = make(map[uint32]int)
	}
	v.mu.Unlock()
	for queue, items := range ready {
		for range items {
			err := v.callRoot(host.OnQueueReady, func(ctx context.Context) error {
				return v.guest.QueueReady(ctx, rootContext, queue)
			})
			if err != nil {
				return
			}
		}
	}
}

// end has the context of a stream that is over ended, in the background.
func (v *vm) end(f *filter) {
	v.mu.Lock()
	if v.streams == nil {
		v.mu.Unlock()
		f.free()
		f.release()
		return
	}
	v.ended = append(v.ended, f)
	v.mu.Unlock()
	v.stir()
}

// endContexts ends contexts: done, then log and delete, unless the guest still
// needs the context and says so later.
func (v *vm) endContexts() {
	v.mu.Lock()
	ended := v.ended
	v.ended = nil
	v.mu.Unlock()
	for _, f := range ended {
		err := v.callRoot(host.OnDone, func(ctx context.Context) error { return v.endContext(ctx, f, false) })
		f.release()
		if err != nil && v.dead.Load() {
			for _, f := range ended {
				f.free()
				f.release()
			}
			return
		}
	}
}

// endContext takes a context through the last callbacks; with force whatever
// the guest wants. v.lock is held.
func (v *vm) endContext(ctx context.Context, f *filter, force bool) error {
	f.over = true
	if !f.doneSaid {
		f.doneSaid = true
		done, err := v.guest.Done(ctx, f.id)
		if err != nil {
			return err
		}
		if !done && !force && v.waiting < maxWaiting {
			v.waiting++
			f.waiting = true
			return nil
		}
	}
	if f.waiting {
		f.waiting = false
		v.waiting--
	}
	err := v.guest.Log(ctx, f.id)
	v.remove(f.id)
	f.free()
	return errors.Join(err, v.guest.Delete(ctx, f.id))
}

// leave takes leave of the guest: contexts that still wait are ended, then
// proxy_on_done of the root context, and if the guest wants it so, its
// proxy_done is waited for until ctx ends; then log and delete.
func (v *vm) leave(ctx context.Context) {
	v.endContexts()
	v.mu.Lock()
	rest := make([]*filter, 0, len(v.streams))
	for _, f := range v.streams {
		rest = append(rest, f)
	}
	v.mu.Unlock()
	var later chan struct{}
	err := v.callRoot(host.OnDone, func(ctx context.Context) error {
		for _, f := range rest {
			if f.waiting {
				if err := v.endContext(ctx, f, true); err != nil {
					return err
				}
			}
		}
		done, err := v.guest.Done(ctx, rootContext)
		if !done && err == nil {
			later = make(chan struct{})
			v.rootDone = later
		}
		return err
	})
	if err != nil {
		return
	}
	if later != nil {
		select {
		case <-later:
		case <-v.gone:
		case <-ctx.Done():
		}
	}
	_ = v.callRoot(host.OnDelete, func(ctx context.Context) error {
		if err := v.guest.Log(ctx, rootContext); err != nil {
			return err
		}
		return v.guest.Delete(ctx, rootContext)
	})
}
