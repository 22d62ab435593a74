//go:build race

package replay

// raceEnabled shortens what the race detector would make long.
const raceEnabled = true
