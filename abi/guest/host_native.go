//go:build !wasip1

package guest

// Log writes a line into the host's log. In a native build, Log does nothing.
func Log(Level, string) {}

// Foreign calls a foreign function by its name, for example one of the
// abi.Foreign names. The result is valid until the next call. In a native build
// it only returns NotFound.
func Foreign(string, []byte) (result []byte, status Status) { return nil, NotFound }
