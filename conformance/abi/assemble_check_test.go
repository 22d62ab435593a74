package abi

import (
	"context"
	"testing"

	"github.com/tetratelabs/wazero"
)

// TestAssembler asserts that the engine reads the assembler's output as
// intended, because all tests below depend on their modules.
func TestAssembler(t *testing.T) {
	ctx := context.Background()
	m := newModule().
		inner("twice", "i:i", "", `get 0 i32 2 i32.mul`).
		function("sum", "I:I", "I", `block loop get 0 i64.eqz br_if 1 get 1 get 0 i64.add set 1 get 0 i64 1 i64.sub set 0 br 0 end end get 1`).
		function("text", ":i", "", `"abc" drop i32.load8_u call twice`).
		function("count", ":i", "", `gget 0 i32 1 i32.add gset 0 gget 0`)
	r := wazero.NewRuntime(ctx)
	defer r.Close(ctx)
	mod, err := r.Instantiate(ctx, m.bytes())
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		args []uint64
		want uint64
	}{{"sum", []uint64{1000}, 500500}, {"text", nil, 2 * 'a'}, {"count", nil, 1}, {"count", nil, 2}, {"proxy_on_memory_allocate", []uint64{7}, heapAt}} {
		got, err := mod.ExportedFunction(tt.name).Call(ctx, tt.args...)
		if err != nil || got[0] != tt.want {
			t.Errorf("%s = %v, %v, want %d", tt.name, got, err, tt.want)
		}
	}
}
