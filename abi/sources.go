//go:build !wasm

package abi

import "embed"

// Sources are the files that a guest needs from this module: the packages abi and
// abi/guest without this file and without tests, the specification, and the bindings
// for C and Rust. `pdproxy plugin new` copies them beside a new plugin.
//
//go:embed README.md pdproxy.h pdproxy.rs
//go:embed answer.go decode.go detail.go edits.go encode.go evict.go frame.go hooks.go leg.go needs.go pd.go prediction.go reqheaders.go retain.go rows.go scale.go score.go stream.go traits.go words.go words_wasm.go
//go:embed guest/exports_wasip1.go guest/guest.go guest/hooks.go guest/host.go guest/host_native.go guest/host_wasip1.go guest/standalone_wasip1.go
var Sources embed.FS
