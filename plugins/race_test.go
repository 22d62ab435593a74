//go:build race

package plugins

// reloads is smaller under the race detector, where each reload takes half a
// second.
const reloads = 20
