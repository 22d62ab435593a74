//go:build race

package kvindex

// raceEnabled: with the race detector, pools drop objects at random, which causes
// allocations.
const raceEnabled = true
