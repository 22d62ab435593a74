package cleanup

import (
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

const (
	// maxRestartCleanups limits the clean-ups that wait for the restart of an engine. Each
	// takes less than 2 KiB. A new one replaces the oldest.
	maxRestartCleanups = 1024
	// restartPoll is how often watchRestarts looks at the engines of these clean-ups.
	restartPoll = 100 * time.Millisecond
)

// restartCleanups are the clean-up calls that are right only if an engine's process has ended
// (connector.Cleanup.Restarted). The engine normally settles the transfer itself.
// Safe for concurrent use.
type restartCleanups struct {
	mu      sync.Mutex
	list    []restartCleanup // guarded by mu; by age
	watched bool             // guarded by mu; a goroutine checks the list
	closed  bool             // guarded by mu
	leaving chan struct{}
}

// restartCleanup is one call that waits for a restart.
type restartCleanup struct {
	job      *Job
	process  *engine.Instance
	restarts uint32    // of process when the attempt began
	until    time.Time // the engine has freed the blocks itself by then
}

// due reports whether the call can be made now. over reports whether the call is no
// longer needed.
func (d *restartCleanup) due(now time.Time) (due, over bool) {
	return d.process.Restarts() != d.restarts, d.process.Gone() || now.After(d.until)
}

// afterRestart keeps c until the decode engine of the attempt is another process.
func (r *Runner) afterRestart(job *Job, c *call) {
	again := *c
	again.Restarted = false
	one := *job
	one.calls, one.delay = []call{again}, 0
	r.afterRestarts.mu.Lock()
	defer r.afterRestarts.mu.Unlock()
	if r.afterRestarts.closed {
		return
	}
	if len(r.afterRestarts.list) >= maxRestartCleanups {
		r.afterRestarts.list = append(r.afterRestarts.list[:0], r.afterRestarts.list[1:]...)
	}
	r.afterRestarts.list = append(r.afterRestarts.list, restartCleanup{job: &one, process: job.Decode, restarts: job.Restarts, until: time.Now().Add(c.patience())})
	if !r.afterRestarts.watched {
		r.afterRestarts.watched = true
		r.running.Go(r.watchRestarts)
	}
}

// watchRestarts starts the calls that are due, until none is left.
func (r *Runner) watchRestarts() {
	poll := time.NewTicker(restartPoll)
	defer poll.Stop()
	for {
		select {
		case <-r.afterRestarts.leaving:
			return
		case <-poll.C:
		}
		due, left := r.afterRestarts.take(time.Now())
		for _, job := range due {
			r.Start(job)
		}
		if !left {
			return
		}
	}
}

// take removes the calls that are due and those that are over. left is false if no call
// remains; then nobody watches the list any more.
func (d *restartCleanups) take(now time.Time) (due []*Job, left bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	keep := d.list[:0]
	for _, one := range d.list {
		switch ready, over := one.due(now); {
		case ready:
			due = append(due, one.job)
		case !over:
			keep = append(keep, one)
		}
	}
	clear(d.list[len(keep):])
	d.list = keep
	d.watched = len(keep) > 0
	return due, d.watched
}

// close drops all calls: the engines free the blocks by their own timeouts.
func (d *restartCleanups) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed {
		d.closed, d.list = true, nil
		close(d.leaving)
	}
}
