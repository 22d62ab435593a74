package connector

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// TestBootstrapRoom checks the three requirements of a room: it fits a signed 64-bit
// number, its remainder is the placed rank, and it is not another attempt's room.
func TestBootstrapRoom(t *testing.T) {
	ids := []uint64{abi.MinDisaggID, abi.MinDisaggID + 1, 2072360727809029, 1<<62 + 12345, abi.MaxDisaggID - 1}
	for _, dp := range []int{1, 2, 3, 8, 64} {
		seen := make(map[uint64]bool)
		for _, id := range ids {
			for rank := range dp {
				a := &Attempt{ID: id, Prefill: place(config.Engine{Ranks: dp}, "h", rank, engine.Facts{DPSize: dp})}
				room := bootstrapRoom(a, 0)
				if room >= 1<<63 {
					t.Errorf("dp %d id %d: room %d is above 2^63", dp, id, room)
				}
				if dp > 1 && room%uint64(dp) != uint64(rank) {
					t.Errorf("dp %d id %d: room %d has rank %d, want %d", dp, id, room, room%uint64(dp), rank)
				}
				if seen[room] {
					t.Errorf("dp %d id %d rank %d: room %d is already used", dp, id, rank, room)
				}
				seen[room] = true
			}
		}
	}
}

// TestBootstrapRoomOfMixedConfiguration: a rank that the engine does not have must not
// get another id's room.
func TestBootstrapRoomOfMixedConfiguration(t *testing.T) {
	at := func(id uint64, rank int) uint64 {
		return bootstrapRoom(&Attempt{ID: id, Prefill: place(config.Engine{Ranks: 8}, "h", rank, engine.Facts{DPSize: 4})}, 0)
	}
	if at(abi.MinDisaggID, 5) == at(abi.MinDisaggID+1, 1) {
		t.Error("two ids share a room")
	}
	if got := at(abi.MinDisaggID, 5) % 4; got != 1 {
		t.Errorf("rank %d, want 5 mod 4", got)
	}
}

// TestBootstrapRoomsOfBatches: no room of a batch equals one of another attempt that
// may be in flight at the same time, whatever the positions in the batches. Below the
// milliseconds, ids have 24 bits of node, worker and counter.
func TestBootstrapRoomsOfBatches(t *testing.T) {
	const hour = 3600 * 1000
	for _, dp := range []int{1, 2, 3, 8, 64} {
		seen := make(map[uint64]string)
		for _, milli := range []uint64{0, 1, 2, 1000, hour, 17 * hour} {
			for _, low := range []uint64{0, 1, 2, 127, 128, 1<<24 - 1} {
				id := 2072360727809029&^(1<<24-1) + milli<<24 + low
				a := &Attempt{ID: id, Prefill: place(config.Engine{Ranks: dp}, "h", dp-1, engine.Facts{DPSize: dp})}
				for i := range maxBatch {
					room := bootstrapRoom(a, i)
					if room >= 1<<63 || room%uint64(dp) != uint64(dp-1) {
						t.Fatalf("dp %d: room %d", dp, room)
					}
					here := fmt.Sprint("id ", id, " place ", i)
					if there := seen[room]; there != "" {
						t.Fatalf("dp %d: %s and %s share room %d", dp, there, here, room)
					}
					seen[room] = here
				}
			}
		}
	}
}

// TestBootstrapRoomsSpread: if ranks are not placed here, the sequences of a batch meet
// on different ranks.
func TestBootstrapRoomsSpread(t *testing.T) {
	a := &Attempt{ID: 2072360727809029, Prefill: place(config.Engine{Ranks: 1}, "h", 0, engine.Facts{DPSize: 8})}
	var on [8]int
	for i := range 64 {
		on[bootstrapRoom(a, i)%8]++
	}
	if on != [8]int{8, 8, 8, 8, 8, 8, 8, 8} {
		t.Errorf("sequences by rank: %v", on)
	}
}

// TestBatchIDs: no id of a batch is a prefix of another.
func TestBatchIDs(t *testing.T) {
	const leg = "0123456789abcdef0123456789abcdef"
	for i := range maxBatch {
		for j := range maxBatch {
			if i != j && strings.HasPrefix(ridOf(leg, i, maxBatch), ridOf(leg, j, maxBatch)) {
				t.Fatalf("%s begins with %s", ridOf(leg, i, maxBatch), ridOf(leg, j, maxBatch))
			}
		}
	}
}
