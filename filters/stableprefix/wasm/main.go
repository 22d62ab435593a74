// Command wasm is the module of the filter stable_prefix: `make policies` builds it into
// ../../stable_prefix.wasm. Natively it is an empty program.
package main

func main() {}
