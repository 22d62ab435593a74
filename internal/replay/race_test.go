//go:build race

package replay

// raceEnabled shortens tests that take long under the race detector.
const raceEnabled = true
