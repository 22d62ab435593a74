// Command official is the same plugin over the SDK of the proxy-wasm project,
// where an init function registers it. The tests put ../tetratelabs/tour.go
// beside this file, with the import path of that SDK.
package main

import (
	"math"

	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm"
)

// everything is the largest size that the SDK hands on whole.
const everything = math.MaxInt32

func init() { proxywasm.SetVMContext(&vm{}) }

func main() {}
