package abi

import "math"

func getFloat(b []byte, at int) float32 { return math.Float32frombits(get32(b, at)) }

func putFloat(b []byte, at int, v float32) { put32(b, at, math.Float32bits(v)) }
