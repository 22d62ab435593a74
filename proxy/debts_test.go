package proxy

import (
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

// TestDebts: a call is due when the process is another one, and dropped when its time
// is over.
func TestDebts(t *testing.T) {
	now := time.Now()
	i := new(engine.Instance)
	due, waits, over := new(cleanupJob), new(cleanupJob), new(cleanupJob)
	d := &debts{watched: true, list: []debt{
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

// TestDebtsAreBounded: the oldest makes room, and none is kept after the end.
func TestDebtsAreBounded(t *testing.T) {
	j := &janitor{}
	j.debts.leaving = make(chan struct{})
	i := new(engine.Instance)
	for n := range maxDebts + 5 {
		j.owe(&cleanupJob{decode: i, limit: time.Duration(n)}, &cleanupCall{})
	}
	j.debts.mu.Lock()
	if n := len(j.debts.list); n != maxDebts || j.debts.list[0].job.limit != 5 {
		t.Errorf("%d debts, the first is number %d", n, j.debts.list[0].job.limit)
	}
	j.debts.mu.Unlock()
	j.debts.close()
	j.debts.close()
	j.wg.Wait() // nobody watches any more
	j.owe(&cleanupJob{decode: i}, &cleanupCall{})
	if len(j.debts.list) != 0 {
		t.Error("a debt is kept after the end")
	}
}
