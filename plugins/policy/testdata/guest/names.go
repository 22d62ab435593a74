//go:build names

package main

import "unsafe"

var names = []byte("plan gate\nplace last\nplace first\n")

//go:wasmexport pdproxy_v1_policies
func policies() uint64 {
	return uint64(uintptr(unsafe.Pointer(&names[0])))<<32 | uint64(len(names))
}

//go:wasmexport pdproxy_v1_needs
func needs() uint64 { return 5 }
