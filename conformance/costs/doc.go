// Package costs has the test of the costs that do not depend on the machine: system calls and
// allocations of a request and of an event, and the memory of an open stream. Their numbers are in
// internal/dev/testbed/costs.txt.
package costs
