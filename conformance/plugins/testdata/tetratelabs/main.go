// Command tetratelabs is a plugin for the SDK that was written for TinyGo, in the form of that SDK:
// main registers it.
package main

import (
	"math"

	"github.com/tetratelabs/proxy-wasm-go-sdk/proxywasm"
)

// everything is longer than the host's limit: the size is cut to 32 bits.
const everything = math.MaxInt

func main() { proxywasm.SetVMContext(&vm{}) }
