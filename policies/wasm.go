package policies

import (
	_ "embed" // for the module
	"strings"
)

// module is the module of policies/wasm, built by `make policies`. The file is not
// compressed: each start of a proxy reads it, and git compresses its own copies.
//
//go:embed builtin.wasm
var module []byte

//go:embed builtin.toolchain
var toolchain string

// Wasm returns the WebAssembly module of all built-in policies, about 2 MB. All
// callers share the bytes and must not change them.
func Wasm() []byte { return module }

// Toolchain returns the version of Go that built the module, such as
// "go1.26.8". Another version gives other bytes.
func Toolchain() string { return strings.TrimSpace(toolchain) }
