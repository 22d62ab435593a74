//go:build !linux

package node

// dropProgram does nothing. On Linux it takes the pages of program files out of the process.
func dropProgram() {}
