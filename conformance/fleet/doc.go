// Package fleet tests that a coordinator and its workers act as one proxy: one
// coordinator places the workers' requests, the requests continue while it is
// unavailable, and they are in its books again when it is back.
package fleet
