package proxy

import (
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

const (
	// maxDebts bounds the clean-ups that wait for the restart of an engine. Each is
	// below 2 KiB. The oldest makes room for a new one.
	maxDebts = 1024
	// debtPoll is how often the engines of debts are looked at.
	debtPoll = 100 * time.Millisecond
)

// debts are the clean-up calls that are right only if an engine's process has ended
// (connector.Cleanup.Restarted). The engine normally settles the transfer itself.
// Safe for concurrent use.
type debts struct {
	mu      sync.Mutex
	list    []debt // guarded by mu; by age
	watched bool   // guarded by mu; a goroutine looks at the list
	closed  bool   // guarded by mu
	leaving chan struct{}
}

// debt is one of them.
type debt struct {
	job      *cleanupJob
	process  *engine.Instance
	restarts uint32 // of process when the attempt began
	until    time.Time
}

// due reports whether the call can be made now; over whether it never has to be.
func (d *debt) due(now time.Time) (due, over bool) {
	return d.process.Restarts() != d.restarts, d.process.Gone() || now.After(d.until)
}

// owe keeps c until the decode engine of the attempt is another process.
func (j *janitor) owe(job *cleanupJob, c *cleanupCall) {
	call := *c
	call.Restarted = false
	one := *job
	one.calls, one.yield = []cleanupCall{call}, 0
	j.debts.mu.Lock()
	defer j.debts.mu.Unlock()
	if j.debts.closed {
		return
	}
	if len(j.debts.list) >= maxDebts {
		j.debts.list = append(j.debts.list[:0], j.debts.list[1:]...)
	}
	j.debts.list = append(j.debts.list, debt{job: &one, process: job.decode, restarts: job.restarts, until: time.Now().Add(c.patience())})
	if !j.debts.watched {
		j.debts.watched = true
		j.wg.Go(j.watchDebts)
	}
}

// watchDebts starts the calls whose time has come, until there is none left.
func (j *janitor) watchDebts() {
	poll := time.NewTicker(debtPoll)
	defer poll.Stop()
	for {
		select {
		case <-j.debts.leaving:
			return
		case <-poll.C:
		}
		due, left := j.debts.take(time.Now())
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
func (d *debts) take(now time.Time) (due []*cleanupJob, left bool) {
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

// close gives all debts up: the engines' own time-outs free.
func (d *debts) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed {
		d.closed, d.list = true, nil
		close(d.leaving)
	}
}
