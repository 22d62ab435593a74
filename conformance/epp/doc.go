// Package epp has the tests of the endpoint picker behind a real Envoy: Envoy, pdproxy with
// [epp], simulated engines, and pdproxy as a sidecar of each decode engine. make test-epp runs
// them.
package epp
