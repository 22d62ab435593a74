package abi

import (
	"bytes"
	"reflect"
	"testing"
)

// TestTraits: the traits come through a frame with Header.Traits, without an allocation.
// A frame without it has the same bytes as that of a request without traits.
func TestTraits(t *testing.T) {
	h := header
	h.Extended = true
	f := detailed(3)
	plain := AppendPlace(nil, &h, f)
	f.Request.Traits = Traits{Salt: 1 << 63, Remaining: -5, TokenMicros: 1 << 31, Adapter: "sql", Tools: true, Images: true, Audio: true}
	if !bytes.Equal(AppendPlace(nil, &h, f), plain) {
		t.Error("traits change a frame without them")
	}
	h.Traits = true
	frame := AppendPlace(nil, &h, f)
	var got PlaceFacts
	var spare []Candidate
	var read Header
	if !DecodePlace(frame, &got, &spare) || !reflect.DeepEqual(&got, f) || len(frame) != f.FrameSize(&h.Layout) {
		t.Errorf("got %+v", got.Request)
	}
	if _, ok := DecodeHeader(frame, &read); !ok || !read.Traits {
		t.Errorf("header %+v", read)
	}
	StoreScores(frame, &got)
	if ReadScores(frame, &h, f); !f.Scored || f.Candidates[1].Score != 0.5 {
		t.Errorf("scores %+v", f.Candidates)
	}
	buffer := make([]byte, 4096)
	if n := testing.AllocsPerRun(10, func() { DecodePlace(AppendPlace(buffer[:0], &h, f), &got, &spare) }); n != 0 {
		t.Errorf("got %v allocations", n)
	}
	put32(frame[HeaderSize:], placeSize+identitySize+moreSize+traitsAdapter, 1<<31)
	if DecodePlace(frame, &got, &spare) {
		t.Error("an adapter outside the frame is accepted")
	}
}
