package filter

import (
	"context"
	"errors"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
)

// wakeBackground wakes the background goroutine.
func (v *vm) wakeBackground() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

// maxReady is the largest number of unannounced items of one queue. The guest gets no
// callback for further items.
const maxReady = 1 << 16

// queueReady records a new item. The queue calls it from inside a guest's call.
func (v *vm) queueReady(queue uint32) {
	v.mu.Lock()
	v.ready[queue] = min(v.ready[queue]+1, maxReady)
	v.mu.Unlock()
	v.wakeBackground()
}

// background runs the callbacks that do not belong to a stream's own calls: ticks, items
// of queues, and the ends of contexts. No client waits for these callbacks. The timer of
// a tick starts again after the callback has returned, so ticks never overlap. background
// returns when the VM was lost or closed.
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

// rearmTicks sets the timer when the guest has set the period or a tick has run.
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

// callRoot enters the guest for its root context. It waits without a limit,
// because the call must not be skipped.
func (v *vm) callRoot(c host.Callback, do func(ctx context.Context) error) error {
	if err := v.enter(false); err != nil {
		return err
	}
	return v.run(c, do)
}

// tellQueues calls proxy_on_queue_ready for each new item.
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

// end schedules the end of a stream's context in the background.
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
	v.wakeBackground()
}

// endContexts ends contexts: done, then log and delete. If the guest still
// needs a context, log and delete wait for its proxy_done.
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

// endContext runs the last callbacks of a context. With force it ignores the
// guest's wish to keep the context. The caller holds v.lock.
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

// shutDown runs the last callbacks of the guest. It ends the contexts that
// still wait and calls proxy_on_done of the root context. If the guest returns
// false, it waits for proxy_done until ctx ends. Then it calls log and delete.
func (v *vm) shutDown(ctx context.Context) {
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
