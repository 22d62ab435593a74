package policies

import (
	"bytes"
	"compress/gzip"
	_ "embed" // for the module
	"fmt"
	"io"
	"strings"
)

// module is the module of policies/wasm, built by `make policies`.
//
//go:embed builtin.wasm.gz
var module []byte

//go:embed builtin.toolchain
var toolchain string

// Wasm returns the WebAssembly module of all built-in policies, about 2 MB.
// Each call unpacks it, so the caller should keep it.
func Wasm() []byte {
	r, err := gzip.NewReader(bytes.NewReader(module))
	if err != nil {
		panic(fmt.Sprintf("unpack built-in policies: %v", err)) // the program itself is broken
	}
	var wasm bytes.Buffer
	if _, err := io.Copy(&wasm, r); err != nil {
		panic(fmt.Sprintf("unpack built-in policies: %v", err))
	}
	return wasm.Bytes()
}

// Toolchain returns the version of Go that built the module, such as
// "go1.26.8". Another version gives other bytes.
func Toolchain() string { return strings.TrimSpace(toolchain) }
