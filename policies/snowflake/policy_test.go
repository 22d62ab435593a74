package snowflake

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// TestMint checks the published vectors of TensorRT-LLM's layout.
func TestMint(t *testing.T) {
	for _, tt := range []struct {
		milli        int64
		node, worker uint8
		counter      uint16
		want         uint64
	}{
		{0, 0, 0, 0, 1099511627776},
		{1, 0, 0, 0, 1099528404992},
		{123456789, 7, 3, 5, 2072360727809029},
	} {
		f := &abi.MintFacts{UnixMilli: abi.DisaggEpochMilli + tt.milli, Node: tt.node, Worker: tt.worker, Counter: tt.counter}
		if got := Mint(f); got != tt.want {
			t.Errorf("Mint(%+v) = %d, want %d", *f, got, tt.want)
		}
	}
}

func FuzzMintStaysInRange(f *testing.F) {
	f.Add(int64(0), uint8(0), uint8(0), uint16(0))
	f.Add(int64(-1), uint8(255), uint8(255), uint16(65535))
	f.Add(int64(1)<<62, uint8(1), uint8(63), uint16(1023))
	f.Fuzz(func(t *testing.T, milli int64, node, worker uint8, counter uint16) {
		id := Mint(&abi.MintFacts{UnixMilli: milli, Node: node, Worker: worker, Counter: counter})
		if id < abi.MinDisaggID || id >= abi.MaxDisaggID {
			t.Errorf("id %d is out of range", id)
		}
	})
}
