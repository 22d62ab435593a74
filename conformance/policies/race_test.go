//go:build race

package policies

// raceEnabled shortens tests that take long under the race detector.
const raceEnabled = true
