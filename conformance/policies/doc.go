// Package policies is the proof of the policies' contract: the built-in policies
// decide the same compiled in and as WebAssembly, the embedded module is that of
// the sources, the example policies in C, Rust and Go run, and what a decision
// costs is measured.
package policies
