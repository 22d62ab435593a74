module example.com/older

go 1.24

require github.com/tetratelabs/proxy-wasm-go-sdk v0.19.0
