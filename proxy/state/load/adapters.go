package load

import (
	"strings"

	"github.com/pdproxy/pdproxy/abi"
)

// Adapters are the LoRA adapters of the requests in an engine. The zero value: the engine
// reports no adapters.
type Adapters struct {
	running, waiting string // names, with commas between them
	used, most       int32  // different names, and the limit of one batch
}

// NewAdapters returns the adapters of running and of waiting requests, as lists of names with
// commas between them, which may be empty. most is the number of different adapters that one
// batch can have; it is above 0.
func NewAdapters(running, waiting string, most int32) Adapters {
	a := Adapters{running: running, waiting: waiting, most: most}
	runs := make(map[string]bool)
	for name := range names(running) {
		runs[name] = true
		a.used++
	}
	for name := range names(waiting) {
		if !runs[name] {
			a.used++
		}
	}
	return a
}

// State returns the state of the adapter of that name.
func (a *Adapters) State(name string) abi.AdapterState {
	switch {
	case a.most == 0:
		return abi.AdapterUnknown
	case lists(a.running, name):
		return abi.AdapterRunning
	case lists(a.waiting, name):
		if a.used > a.most {
			return abi.AdapterWaiting
		}
		return abi.AdapterFree // it gets a place with the next batch
	case a.used >= a.most:
		return abi.AdapterFull
	}
	return abi.AdapterFree
}

// names yields the names of a list.
func names(list string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for name := range strings.SplitSeq(list, ",") {
			if name = strings.TrimSpace(name); name != "" && !yield(name) {
				return
			}
		}
	}
}

// lists reports whether the list has the name. It does not allocate.
func lists(list, name string) bool {
	for one := range names(list) {
		if one == name {
			return true
		}
	}
	return false
}
