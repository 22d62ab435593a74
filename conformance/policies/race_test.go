//go:build race

package policies

// raceEnabled shortens what the race detector would make long.
const raceEnabled = true
