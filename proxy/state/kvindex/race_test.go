//go:build race

package kvindex

// raceEnabled: pools then forget at random, and so allocate.
const raceEnabled = true
