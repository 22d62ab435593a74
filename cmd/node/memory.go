package node

import (
	"context"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// memoryTick is the interval at which a process checks whether to give memory back.
	memoryTick = time.Second
	// quietBytes is the limit for a quiet process: such a process allocates less in a memoryTick.
	// About 40 requests allocate quietBytes.
	quietBytes = 256 << 10
	// worthBytes and worthGoroutines are the least work after which a process gives memory back again.
	// Either the process has allocated worthBytes and an eighth of its heap, or worthGoroutines have ended.
	worthBytes      = 8 << 20
	worthGoroutines = 100
)

// giveMemoryBack gives unused memory back to the operating system whenever the process has become
// quiet: after its start, a reload, or a load. Otherwise the memory of a load would stay, because the
// garbage collector runs only after the heap has grown. giveMemoryBack calls shrink first.
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
