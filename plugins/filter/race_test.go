//go:build race

package filter

// raceEnabled: the race detector allocates, so tests do not count allocations.
const raceEnabled = true
