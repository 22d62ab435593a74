package cleanup

import (
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

// TestRestartCleanups: a call is due if the engine's process has restarted. The list
// drops the call after its time limit.
func TestRestartCleanups(t *testing.T) {
	now := time.Now()
	i := new(engine.Instance)
	due, waits, over := new(Job), new(Job), new(Job)
	d := &restartCleanups{watched: true, list: []restartCleanup{
		{job: due, process: i, restarts: 7, until: now.Add(time.Hour)}, // the process has had none
		{job: waits, process: i, until: now.Add(time.Hour)},
		{job: over, process: i, until: now.Add(-time.Second)},
	}}
	got, left := d.take(now)
	if len(got) != 1 || got[0] != due || !left || len(d.list) != 1 || d.list[0].job != waits {
		t.Errorf("due %v, left %v: %v", got, left, d.list)
	}
	if got, left = d.take(now.Add(2 * time.Hour)); len(got) != 0 || left || d.watched {
		t.Errorf("due %v, left %v, watched %v", got, left, d.watched)
	}
}

// TestRestartCleanupsAreBounded: a full list drops its oldest call, and the list is empty
// after the end.
func TestRestartCleanupsAreBounded(t *testing.T) {
	j := &Runner{}
	j.afterRestarts.leaving = make(chan struct{})
	i := new(engine.Instance)
	for n := range maxRestartCleanups + 5 {
		j.afterRestart(&Job{Decode: i, Limit: time.Duration(n)}, &call{})
	}
	j.afterRestarts.mu.Lock()
	if n := len(j.afterRestarts.list); n != maxRestartCleanups || j.afterRestarts.list[0].job.Limit != 5 {
		t.Errorf("got %d clean-ups, the first has number %d", n, j.afterRestarts.list[0].job.Limit)
	}
	j.afterRestarts.mu.Unlock()
	j.afterRestarts.close()
	j.afterRestarts.close()
	j.running.Wait() // no goroutine watches the list any more
	j.afterRestart(&Job{Decode: i}, &call{})
	if len(j.afterRestarts.list) != 0 {
		t.Error("the list has a clean-up after the end")
	}
}
