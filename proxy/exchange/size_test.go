package exchange

import (
	"testing"
	"unsafe"
)

// TestExchangeSize: an exchange fits into 4,096 bytes, a size class of the allocator. The next one has 768
// bytes more, which each open stream would need.
func TestExchangeSize(t *testing.T) {
	if n := unsafe.Sizeof(exchange{}); n > 4096 {
		t.Errorf("an exchange has %d bytes: put fields that few requests need behind a pointer", n)
	}
}
