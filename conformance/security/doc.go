// Package security attacks the built program over real sockets: hostile
// clients, engines, plugins, peers, local users and web pages, each together
// with a legitimate client that must be served.
//
// Every test starts its own pdproxy process and ends by asserting that nothing is
// left in it: no lease, no goroutine, no descriptor, and no more memory than the
// test allows.
//
// The suite has three tiers:
//
//   - The short tier is the default and part of make test-all. It needs root for
//     the tests of local users, and skips them without root.
//   - PDPROXY_SECURITY=long makes the floods as large as those of a determined
//     attacker, and adds the pages that a real Chromium opens (Debian's package, which
//     root's tests install). TestLong runs the tests of this tier alone, and runs
//     nothing without the variable.
//   - PDPROXY_SECURITY_SOAK=10m sets how long TestHostileSoak mixes honest and
//     hostile load. It is a few seconds by default; from a minute on, the test also
//     asserts the latency and the memory of the proxy.
//
// make security runs all of it in the long form.
package security
