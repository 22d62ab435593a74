package main

import (
	"strings"
	"unsafe"
)

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
	switch told("needs", "") {
	case "version2":
		return 96
	case "facts":
		return 32 | 128
	case "headers":
		return 512
	}
	if told("names", "") == "" {
		return 0
	}
	return 5
}

var declared []byte

// headers returns the names that the configuration lists with commas.
//
//go:wasmexport pdproxy_v1_headers
func headers() uint64 {
	declared = []byte(strings.ReplaceAll(told("headers", ""), ",", "\n"))
	if len(declared) == 0 {
		return 0
	}
	return uint64(uintptr(unsafe.Pointer(&declared[0])))<<32 | uint64(len(declared))
}
