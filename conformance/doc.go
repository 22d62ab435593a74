// Package conformance contains the tests that cross packages, against the
// simulated engines of enginesim, real clients, real engines and peers. It has
// no code except its tests.
package conformance
