package engine

import (
	"testing"
	"unsafe"
)

// A placement reads one cache line of each candidate's instance.
func TestPlacementReadsOneCacheLine(t *testing.T) {
	const cacheLine = 64
	var i Instance
	until := unsafe.Offsetof(i.Breaker) + unsafe.Sizeof(i.Breaker) - 8 // the last field of a Breaker
	name := unsafe.Offsetof(i.Spec) + unsafe.Offsetof(i.Spec.Name) + unsafe.Sizeof(i.Spec.Name)
	if until/cacheLine != (name-1)/cacheLine {
		t.Errorf("the fields are at bytes %d to %d", until, name)
	}
}
