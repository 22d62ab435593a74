package node

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"
	"time"
)

// garbage keeps the compiler from removing an allocation.
var garbage [][]byte

// TestMemoryGoesBack: the memory of a load goes back to the operating system some seconds after its
// end, and not before.
func TestMemoryGoesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go giveMemoryBack(ctx, func() {})
		load := func() {
			garbage = append(garbage[:0], make([]byte, 64<<20))
			for i := range garbage[0] {
				garbage[0][i] = 1
			}
		}
		load()
		time.Sleep(memoryTick / 2)
		busy := kept()
		load() // the process allocates in each tick
		time.Sleep(memoryTick)
		if after := kept(); after < busy {
			t.Errorf("memory went back during the load: %d MB of %d MB are kept", after>>20, busy>>20)
		}
		garbage = nil
		time.Sleep(3 * memoryTick)
		synctest.Wait()
		if quiet := kept(); quiet > busy-(48<<20) {
			t.Errorf("%d MB are kept after the load, %d MB during it", quiet>>20, busy>>20)
		}
	})
}

// TestGoroutinesThatEnd: memory also goes back after the end of goroutines that allocated nothing
// lately, such as those of idle streams.
func TestGoroutinesThatEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go giveMemoryBack(ctx, func() {})
		time.Sleep(3 * memoryTick) // the memory of the tests before has gone back
		block := make(chan struct{})
		const streams = 4 * worthGoroutines
		for range streams {
			go func() {
				var own [16 << 10]byte
				for i := range own {
					own[i] = byte(i)
				}
				<-block
				runtime.KeepAlive(&own)
			}()
		}
		time.Sleep(2 * memoryTick)
		open := kept()
		close(block)
		time.Sleep(3 * memoryTick)
		synctest.Wait()
		if after := kept(); after+streams*(16<<10) > open {
			t.Errorf("%d KB are kept after %d streams, %d KB before their end", after>>10, streams, open>>10)
		}
	})
}

// kept returns the bytes that the Go runtime has from the operating system.
func kept() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapSys + m.StackSys - m.HeapReleased
}
