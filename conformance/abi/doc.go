// Package abi tests the plugin platform from outside: a whole proxy between
// real clients and simulated engines runs the project's own guests and those of
// others.
//
// testdata/filter is a guest that does what its configuration says; the tests
// compile it. assemble_test.go assembles modules that no compiler makes.
package abi
