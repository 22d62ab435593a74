//go:build race

package plugins

// reloads are fewer under the race detector, where each takes half a second.
const reloads = 20
