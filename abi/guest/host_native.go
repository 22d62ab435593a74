//go:build !wasip1

package guest

// Log writes a line into the host's log. Compiled natively it does nothing.
func Log(Level, string) {}

// Foreign calls a foreign function by its name, one of the abi.Foreign names for
// example. The result is good until the next call. Compiled natively there is
// none, and the status is NotFound.
func Foreign(string, []byte) (result []byte, status Status) { return nil, NotFound }
