package abi

import (
	"bytes"
	"reflect"
	"testing"
)

// TestPredictions: the table comes through a frame; a frame without it, and a table that
// ends after the frame, are told apart; nothing is allocated.
func TestPredictions(t *testing.T) {
	h := header
	h.Extended = true
	f := detailed(3)
	without := AppendPlace(nil, &h, f)
	for i := range f.Candidates {
		v := float32(i * 10)
		f.Predictions = append(f.Predictions, Prediction{v + 1, v + 2, v + 3, v + 4, v + 5, v + 6, v + 7, 0})
	}
	frame := AppendPlace(nil, &h, f)
	if len(frame) != len(without)+3*PredictionSize || len(frame) != f.FrameSize(&Layout{Extended: true}) {
		t.Errorf("a frame of %d bytes, without predictions %d", len(frame), len(without))
	}
	var got PlaceFacts
	var spare []Candidate
	if !DecodePlace(frame, &got, &spare) || !reflect.DeepEqual(got.Predictions, f.Predictions) || !reflect.DeepEqual(got.Details, f.Details) {
		t.Errorf("predictions %+v", got.Predictions)
	}
	shifted := append(make([]byte, 4, len(frame)+4), frame...)[4:] // rows are read field by field
	if !DecodePlace(shifted, &got, &spare) || !reflect.DeepEqual(got.Predictions, f.Predictions) {
		t.Errorf("predictions at another alignment: %+v", got.Predictions)
	}
	if !DecodePlace(without, &got, &spare) || got.Predictions != nil {
		t.Errorf("predictions without a table: %+v", got.Predictions)
	}
	buffer := make([]byte, 4096)
	if n := testing.AllocsPerRun(10, func() { DecodePlace(AppendPlace(buffer[:0], &h, f), &got, &spare) }); n != 0 {
		t.Errorf("got %v allocations", n)
	}
	for _, at := range []uint32{uint32(len(frame) - 3*PredictionSize + 1), uint32(len(frame)), 1 << 31} {
		put32(frame[HeaderSize:], placeSize+identitySize+morePredictions, at)
		if DecodePlace(frame, &got, &spare) {
			t.Errorf("a table at %d of %d bytes is accepted", at, len(frame))
		}
	}
	if empty := appendPredictions(nil, nil); !bytes.Equal(empty, nil) {
		t.Errorf("no rows are %d bytes", len(empty))
	}
}
