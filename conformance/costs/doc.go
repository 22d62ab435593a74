// Package costs tests the costs that do not depend on the machine: the system calls and allocations
// of a request and of an event, and the memory of an open stream. internal/dev/testbed/costs.txt has
// the number of each cost.
package costs
