//go:build race

package coordinator

const raceEnabled = true
