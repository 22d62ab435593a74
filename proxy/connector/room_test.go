package connector

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// TestBootstrapRoom checks the three duties of a room: a signed 64-bit number,
// the placed rank as its remainder, and no other attempt's room.
func TestBootstrapRoom(t *testing.T) {
	ids := []uint64{abi.MinDisaggID, abi.MinDisaggID + 1, 2072360727809029, 1<<62 + 12345, abi.MaxDisaggID - 1}
	for _, dp := range []int{1, 2, 3, 8, 64} {
		seen := make(map[uint64]bool)
		for _, id := range ids {
			for rank := range dp {
				a := &Attempt{ID: id, Prefill: place(config.Engine{Ranks: dp}, "h", rank, engine.Facts{DPSize: dp})}
				room := bootstrapRoom(a)
				if room >= 1<<63 {
					t.Errorf("dp %d id %d: room %d is above 2^63", dp, id, room)
				}
				if dp > 1 && room%uint64(dp) != uint64(rank) {
					t.Errorf("dp %d id %d: room %d has rank %d, want %d", dp, id, room, room%uint64(dp), rank)
				}
				if seen[room] {
					t.Errorf("dp %d id %d rank %d: room %d is taken", dp, id, rank, room)
				}
				seen[room] = true
			}
		}
	}
}

// TestBootstrapRoomOfMixedConfiguration keeps a rank that the engine does not
// have from taking another id's room.
func TestBootstrapRoomOfMixedConfiguration(t *testing.T) {
	at := func(id uint64, rank int) uint64 {
		return bootstrapRoom(&Attempt{ID: id, Prefill: place(config.Engine{Ranks: 8}, "h", rank, engine.Facts{DPSize: 4})})
	}
	if at(abi.MinDisaggID, 5) == at(abi.MinDisaggID+1, 1) {
		t.Error("two ids share a room")
	}
	if got := at(abi.MinDisaggID, 5) % 4; got != 1 {
		t.Errorf("rank %d, want 5 mod 4", got)
	}
}
