package edge

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"golang.org/x/net/http2"
)

// The watch determines after each byte whether the byte is inside a head. The frames may arrive in
// any pieces.
func TestHeadWatchAtEverySplit(t *testing.T) {
	var stream bytes.Buffer
	var inside []bool // after each byte
	frames := http2.NewFramer(&stream, nil)
	wrote := func(data, block bool) {
		for i := len(inside) + 1; i <= stream.Len(); i++ {
			begun := i-len(inside) > 0 && i < stream.Len()
			inside = append(inside, begun && !data || block)
		}
	}
	frames.WriteSettings()
	wrote(false, false)
	for i := range inside[:len(inside)-1] {
		inside[i] = true
	}
	frames.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte("abc"), EndHeaders: true})
	wrote(false, false)
	frames.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, BlockFragment: []byte("abc")})
	wrote(false, true)
	frames.WriteContinuation(3, false, []byte("d"))
	wrote(false, true)
	frames.WriteContinuation(3, true, nil)
	n := len(inside)
	wrote(false, false)
	for i := n; i < len(inside)-1; i++ {
		inside[i] = true
	}
	frames.WritePing(false, [8]byte{})
	wrote(false, false)
	frames.WriteData(1, false, []byte("body"))
	n = len(inside)
	wrote(true, false)
	for i := n; i < n+frameHead-1; i++ { // the type of the frame is not known yet
		inside[i] = true
	}
	var w headWatch
	for i, b := range stream.Bytes() {
		if w.follow([]byte{b}); w.inside() != inside[i] {
			t.Errorf("after byte %d: got inside %t", i, w.inside())
		}
	}
	for range 1000 {
		var pieces headWatch
		for rest, at := stream.Bytes(), 0; len(rest) > 0; {
			step := 1 + rand.IntN(len(rest))
			pieces.follow(rest[:step])
			rest = rest[step:]
			if at += step; pieces.inside() != inside[at-1] {
				t.Fatalf("after byte %d, in pieces: got inside %t", at-1, pieces.inside())
			}
		}
		if pieces != w {
			t.Fatalf("in pieces %+v, byte by byte %+v", pieces, w)
		}
	}
}

func FuzzHeadWatch(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x04\x00\x00\x00\x00\x00"), 3) // SETTINGS
	f.Add([]byte("\x00\x00\x01\x01\x00\x00\x00\x00\x01\x82\x00\x00\x00\x09\x04\x00\x00\x00\x01"), 5)
	f.Fuzz(func(t *testing.T, stream []byte, at int) {
		var whole, pieces headWatch
		whole.follow(stream)
		at = min(max(at, 0), len(stream))
		pieces.follow(stream[:at])
		pieces.follow(stream[at:])
		if whole != pieces {
			t.Errorf("whole %+v, in pieces %+v", whole, pieces)
		}
		if whole.n >= frameHead || whole.left > 1<<24 {
			t.Errorf("%+v", whole)
		}
	})
}
