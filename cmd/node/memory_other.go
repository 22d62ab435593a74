//go:build !linux

package node

// dropProgram takes the pages of program files out of the process, on Linux.
func dropProgram() {}
