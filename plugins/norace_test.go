//go:build !race

package plugins

const (
	reloads     = 100
	raceEnabled = false
)
