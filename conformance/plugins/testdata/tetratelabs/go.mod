module example.com/tetratelabs

go 1.24

require github.com/tetratelabs/proxy-wasm-go-sdk v0.24.0
