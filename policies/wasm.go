package policies

import (
	"bytes"
	"compress/gzip"
	_ "embed" // for the module
	"fmt"
	"io"
	"strings"
)

// module is that of policies/wasm, as `make policies` built it.
//
//go:embed builtin.wasm.gz
var module []byte

//go:embed builtin.toolchain
var toolchain string

// Wasm returns the WebAssembly module of all built-in policies, about 2 MB. It
// is unpacked by each call: keep it.
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

// Toolchain is the version of Go that built the module, as in "go1.26.8".
// Another one gives other bytes.
func Toolchain() string { return strings.TrimSpace(toolchain) }
