package load

import (
	"testing"
	"unsafe"
)

const cacheLine = 64

// View and Full of a counter read one cache line.
func TestViewIsOneCacheLine(t *testing.T) {
	var c Counter
	if last := unsafe.Offsetof(c.Prefill) + unsafe.Offsetof(c.Prefill.fit) + unsafe.Sizeof(c.Prefill.fit); last > cacheLine {
		t.Errorf("the fields of View and Full end at byte %d", last)
	}
	if size := unsafe.Sizeof(c); size%cacheLine != 0 {
		t.Errorf("a counter has %d bytes", size)
	}
}
