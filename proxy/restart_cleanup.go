package proxy

import (
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

const (
	// maxRestartCleanups limits the clean-ups that wait for the restart of an engine. Each is
	// below 2 KiB. A new one replaces the oldest.
	maxRestartCleanups = 1024
	// restartPoll is how often the engines of these clean-ups are looked at.
	restartPoll = 100 * time.Millisecond
)

// restartCleanups are the clean-up calls that are right only if an engine's process has ended
// (connector.Cleanup.Restarted). The engine normally settles the transfer itself.
// Safe for concurrent use.
type restartCleanups struct {
	mu      sync.Mutex
	list    []restartCleanup // guarded by mu; by age
	watched bool             // guarded by mu; a goroutine looks at the list
	closed  bool             // guarded by mu
	leaving chan struct{}
}

// restartCleanup is one of them.
type restartCleanup struct {
	job      *cleanupJob
	process  *engine.Instance
	restarts uint32 // of process when the attempt began
	until    time.Time
}

// due reports whether the call can be made now. over reports whether the call is no
// longer needed.
func (d *restartCleanup) due(now time.Time) (due, over bool) {
	return d.process.Restarts() != d.restarts, d.process.Gone() || now.After(d.until)
}

// afterRestart keeps c until the decode engine of the attempt is another process.
func (j *janitor) afterRestart(job *cleanupJob, c *cleanupCall) {
	call := *c
	call.Restarted = false
	one := *job
	one.calls, one.yield = []cleanupCall{call}, 0
	j.afterRestarts.mu.Lock()
	defer j.afterRestarts.mu.Unlock()
	if j.afterRestarts.closed {
		return
	}
	if len(j.afterRestarts.list) >= maxRestartCleanups {
		j.afterRestarts.list = append(j.afterRestarts.list[:0], j.afterRestarts.list[1:]...)
	}
	j.afterRestarts.list = append(j.afterRestarts.list, restartCleanup{job: &one, process: job.decode, restarts: job.restarts, until: time.Now().Add(c.patience())})
	if !j.afterRestarts.watched {
		j.afterRestarts.watched = true
		j.wg.Go(j.watchRestarts)
	}
}

// watchRestarts starts the calls whose time has come, until there is none left.
func (j *janitor) watchRestarts() {
	poll := time.NewTicker(restartPoll)
	defer poll.Stop()
	for {
		select {
		case <-j.afterRestarts.leaving:
			return
		case <-poll.C:
		}
		due, left := j.afterRestarts.take(time.Now())
		for _, job := range due {
			j.start(job)
		}
		if !left {
			return
		}
	}
}

// take removes what is due and what is over. left is false, and the list is watched
// no more, when nothing remains.
func (d *restartCleanups) take(now time.Time) (due []*cleanupJob, left bool) {
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

// close gives all of them up: the engines' own time-outs free.
func (d *restartCleanups) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed {
		d.closed, d.list = true, nil
		close(d.leaving)
	}
}
