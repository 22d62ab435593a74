package proxy

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestBackground: it is waited for what runs, and for what that starts; what comes
// beside several who wait, when nothing runs, does no harm.
func TestBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b background
		b.Wait() // for nothing
		var done atomic.Int32
		b.Go(func() {
			time.Sleep(time.Second)
			b.Go(func() {
				time.Sleep(time.Second)
				done.Add(1)
			})
			done.Add(1)
		})
		var waiting sync.WaitGroup
		for range 3 {
			waiting.Go(func() {
				if b.Wait(); done.Load() < 2 {
					t.Errorf("%d have ended", done.Load())
				}
			})
		}
		waiting.Wait()
		for range 1000 {
			waiting.Go(func() { b.Go(func() { done.Add(1) }) })
			waiting.Go(b.Wait)
		}
		waiting.Wait()
		if b.Wait(); done.Load() != 1002 {
			t.Errorf("%d have ended", done.Load())
		}
	})
}
