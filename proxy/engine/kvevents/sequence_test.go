package kvevents

import (
	"fmt"
	"testing"
)

// TestSequence checks the order of sequence numbers. The byte life stands for the
// content of the batch: another life of the engine sends other batches.
func TestSequence(t *testing.T) {
	type step struct {
		seq  uint64
		life byte
		want order
	}
	many := func(n int) (steps []step) {
		for i := range n {
			steps = append(steps, step{uint64(i), 1, inOrder})
		}
		return steps
	}
	for _, tt := range []struct {
		name  string
		steps []step
	}{
		{"in order", many(600)},
		{"joined late", []step{{500, 1, inOrder}, {501, 1, inOrder}}},
		{"twice", []step{{0, 1, inOrder}, {0, 1, seenBefore}, {1, 1, inOrder}, {0, 1, seenBefore}, {1, 1, seenBefore}}},
		{"a gap, and the lost one comes late", []step{{0, 1, inOrder}, {3, 1, ahead}, {2, 1, seenBefore}, {1, 1, seenBefore}, {4, 1, inOrder}}},
		{"restart", []step{{0, 1, inOrder}, {1, 1, inOrder}, {0, 2, behind}, {1, 2, inOrder}}},
		{"restart, and its first batches are lost", []step{{0, 1, inOrder}, {1, 1, inOrder}, {2, 1, inOrder}, {1, 2, behind}, {2, 2, inOrder}}},
		{"restart of one that was joined late", []step{{9, 1, inOrder}, {0, 2, behind}}},
		{"restart after long", append(many(remembered+2), step{0, 2, behind}, step{1, 2, inOrder})},
		{"a gap longer than the memory", []step{{0, 1, inOrder}, {remembered * 3, 1, ahead}, {remembered*3 - 1, 1, seenBefore}, {0, 1, behind}}},
		{"the highest numbers", []step{{1<<64 - 3, 1, inOrder}, {1<<64 - 2, 1, inOrder}, {0, 1, behind}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var s sequence
			for i, step := range tt.steps {
				payload := fmt.Append(nil, step.seq, step.life)
				got := s.classify(step.seq, payload)
				if got != step.want {
					t.Fatalf("step %d, batch %d: verdict %d, want %d", i, step.seq, got, step.want)
				}
				if got == seenBefore {
					continue
				}
				s.take(step.seq, payload)
				if !s.last(step.seq, payload) || s.last(step.seq, fmt.Append(nil, "other")) {
					t.Fatalf("step %d: the last batch is not recognized", i)
				}
			}
		})
	}
}
