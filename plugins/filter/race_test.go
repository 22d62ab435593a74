//go:build race

package filter

// raceEnabled: the race detector allocates, so allocations are not counted.
const raceEnabled = true
