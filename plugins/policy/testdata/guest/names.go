package main

import "unsafe"

var names = []byte("plan gate\nplace last\nplace first\n")

// policies returns the list of names if the configuration requests the list.
//
//go:wasmexport pdproxy_v1_policies
func policies() uint64 {
	if told("names", "") == "" {
		return 0
	}
	return uint64(uintptr(unsafe.Pointer(&names[0])))<<32 | uint64(len(names))
}

//go:wasmexport pdproxy_v1_needs
func needs() uint64 {
	if told("needs", "") == "version2" {
		return 96
	}
	if told("names", "") == "" {
		return 0
	}
	return 5
}
