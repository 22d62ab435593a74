package inflight

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestGroup: Wait covers running work and the work that this work starts. Several
// goroutines may wait while work starts from a count of zero.
func TestGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Group
		g.Wait() // without work
		var done atomic.Int32
		g.Go(func() {
			time.Sleep(time.Second)
			g.Go(func() {
				time.Sleep(time.Second)
				done.Add(1)
			})
			done.Add(1)
		})
		var waiting sync.WaitGroup
		for range 3 {
			waiting.Go(func() {
				if g.Wait(); done.Load() < 2 {
					t.Errorf("%d have ended", done.Load())
				}
			})
		}
		waiting.Wait()
		for range 1000 {
			waiting.Go(func() { g.Go(func() { done.Add(1) }) })
			waiting.Go(g.Wait)
		}
		waiting.Wait()
		if g.Wait(); done.Load() != 1002 {
			t.Errorf("%d have ended", done.Load())
		}
	})
}

// TestGroupIdle: the channel closes with the last Done, and a later Add does not
// change it.
func TestGroupIdle(t *testing.T) {
	var g Group
	open := func(c <-chan struct{}) bool {
		select {
		case <-c:
			return false
		default:
			return true
		}
	}
	if open(g.Idle()) {
		t.Error("a group without work is not idle")
	}
	g.Add()
	g.Add()
	idle := g.Idle()
	g.Done()
	if !open(idle) {
		t.Error("the group is idle while one piece of work runs")
	}
	g.Done()
	g.Add()
	if open(idle) {
		t.Error("the channel is still open after the last Done")
	}
	if !open(g.Idle()) {
		t.Error("the group is idle after an Add")
	}
	g.Done()
}
