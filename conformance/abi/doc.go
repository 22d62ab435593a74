// Package abi tests the plugin platform from outside: a whole proxy between real clients
// and simulated engines runs guests of this project and guests of other projects.
//
// testdata/filter is a guest whose configuration is a script; the tests compile it.
// assemble_test.go assembles modules that no compiler produces.
package abi
