// Package fleet tests that a coordinator and its workers act as one proxy. One
// coordinator places the workers' requests. The requests continue while no coordinator is
// available, and the next coordinator knows their leases.
package fleet
