package policies

import (
	"runtime"
	"testing"

	"github.com/pdproxy/pdproxy/policies"
)

// maxModule is the bound in bytes of Go's heap that the module of the built-in policies keeps with
// one instance. It is 2 MB, of which 1.3 MB are the initial memory of new instances. The binary with
// the tables of the compiler would take 9 MB.
const maxModule = 3 << 20

// TestModuleKeepsLittle: what only the compilation needs is freed after it.
func TestModuleKeepsLittle(t *testing.T) {
	before := liveHeap()
	g := run(t, policies.Wasm())
	if kept := int64(liveHeap()) - int64(before); kept > maxModule {
		t.Errorf("the module keeps %d KB, more than %d", kept>>10, maxModule>>10)
	} else {
		t.Logf("the module keeps %d KB", kept>>10)
	}
	runtime.KeepAlive(g)
}

// liveHeap returns the size in bytes of all objects that are in use.
func liveHeap() uint64 {
	runtime.GC()
	runtime.GC() // finalizers of the first have run
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
