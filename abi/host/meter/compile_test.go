//go:build !race

package meter

import (
	"context"
	"errors"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
)

// maxHeap is the bound in bytes of the heap that the compilation of a module takes. It is more
// than maxMemory, because the garbage collector runs late. The race detector takes memory of
// its own, so that the test does not run with it.
const maxHeap = 400 << 20

// TestCompilationIsBounded compiles each shape at the limit: the largest module that Check accepts.
func TestCompilationIsBounded(t *testing.T) {
	for _, s := range allShapes() {
		t.Run(s.name, func(t *testing.T) {
			n := largest(s)
			wasm := s.make(n)
			m, err := Read(wasm)
			if err != nil {
				t.Fatal(err)
			}
			size := len(wasm)
			wasm = m.Meter()
			var took time.Duration
			memory := peak(func() {
				began := time.Now()
				ctx := context.Background()
				r := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfig().WithCoreFeatures(api.CoreFeaturesV2))
				defer r.Close(ctx)
				if _, err = r.CompileModule(ctx, wasm); err != nil {
					t.Error(err)
				}
				took = time.Since(began)
			})
			t.Logf("n %d, %d bytes: %d MiB, %.1f s", n, size, memory>>20, took.Seconds())
			if memory > maxHeap {
				t.Errorf("the compilation of %d bytes took %d MiB", size, memory>>20)
			}
		})
	}
}

// largest returns the largest number of units that Check accepts, at most 1<<16.
func largest(s shape) int {
	fits := func(n int) bool {
		m, err := Read(s.make(n))
		if err == nil {
			_, err = m.Check(1)
		}
		if err != nil && !errors.Is(err, ErrTooLarge) {
			panic(err)
		}
		return err == nil
	}
	low, high := 1, 2
	for high <= s.most() && fits(high) {
		low, high = high, 2*high
	}
	for high-low > 1+low/64 {
		if middle := (low + high) / 2; middle <= s.most() && fits(middle) {
			low = middle
		} else {
			high = middle
		}
	}
	return low
}

func (s shape) most() int {
	if s.limit > 0 {
		return s.limit
	}
	return 1 << 16
}

// peak returns the most bytes of the heap that do takes at the same time.
func peak(do func()) uint64 {
	debug.FreeOSMemory()
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/unused:bytes"}}
	read := func() uint64 {
		metrics.Read(sample)
		return sample[0].Value.Uint64() + sample[1].Value.Uint64()
	}
	before, most := read(), uint64(0)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				most = max(most, read())
			}
		}
	}()
	do()
	most = max(most, read())
	close(stop)
	<-stopped
	runtime.KeepAlive(sample)
	return most - min(most, before)
}
