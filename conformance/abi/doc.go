// Package abi proves the plugin platform from outside: guests of its own and of
// others, run by a whole proxy between real clients and simulated engines.
//
// testdata/filter is a guest that does what its configuration says, and is
// compiled by the tests; modules that no compiler makes are put together by
// assemble_test.go.
package abi
