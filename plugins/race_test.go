//go:build race

package plugins

// reloads is smaller under the race detector, where each reload takes half a
// second. There sync.Pool drops some entries, so that calls allocate.
const (
	reloads     = 20
	raceEnabled = true
)
