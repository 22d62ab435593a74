// Package conformance is the proof: tests that cross packages, against the
// simulated engines of enginesim, real clients, real engines and peers. It has
// no code of its own beyond its tests.
package conformance
