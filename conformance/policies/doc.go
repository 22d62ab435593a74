// Package policies tests the policies' contract. The built-in policies decide
// the same compiled in and as WebAssembly, the embedded module is built from
// the sources, and the example policies in C, Rust and Go run. It also measures
// the cost of a decision.
package policies
