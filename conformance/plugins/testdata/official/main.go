// Command official is the same plugin for the SDK of the proxy-wasm project,
// where an init function registers it. The tests copy ../tetratelabs/tour.go
// into this folder, with the import path of that SDK.
package main

import (
	"math"

	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm"
)

// everything is the largest size that the SDK passes on unchanged.
const everything = math.MaxInt32

func init() { proxywasm.SetVMContext(&vm{}) }

func main() {}
