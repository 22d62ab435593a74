package node

import (
	"context"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// memoryTick is the interval at which a process looks whether it can give memory back.
	memoryTick = time.Second
	// quietBytes is the number of bytes allocated in a memoryTick below which the process has little
	// to do: about 40 requests.
	quietBytes = 256 << 10
	// worthBytes and worthGoroutines are the work since memory was last given back that makes it worth
	// to do so again: bytes allocated, beside an eighth of the heap, and goroutines that have ended.
	worthBytes      = 8 << 20
	worthGoroutines = 100
)

// giveMemoryBack gives unused memory back to the operating system whenever the process has become
// quiet: after its start, a reload, or a load. Without it the memory of a load would stay, because the
// garbage collector runs only after the heap has grown. It calls shrink first.
func giveMemoryBack(ctx context.Context, shrink func()) {
	heap := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}, {Name: "/gc/heap/live:bytes"}}
	var before, given uint64
	most := 0 // goroutines
	tick := time.NewTicker(memoryTick)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		metrics.Read(heap)
		allocated, running := heap[0].Value.Uint64(), runtime.NumGoroutine()
		most = max(most, running)
		worth := allocated-given > worthBytes+heap[1].Value.Uint64()/8 || most-running > worthGoroutines
		if worth && allocated-before < quietBytes {
			given, most = allocated, running
			shrink()
			runtime.GC() // a sync.Pool keeps its objects until the second collection
			debug.FreeOSMemory()
			dropProgram()
		}
		before = allocated
	}
}
