//go:build !unix

package upstream

// look cannot look at the socket on this system: a dead connection fails when it is
// used.
func (c *conn) look(uintptr) { c.isQuiet = true }

// follow leaves all of the body to Read on this system.
func (c *call) follow(Sink) (n int, ok bool) { return 0, true }

// follower has no state on this system.
type follower struct{}
