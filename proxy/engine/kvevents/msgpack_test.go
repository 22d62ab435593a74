package kvevents

import (
	"encoding/hex"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// unhex reads bytes in hexadecimal. Spaces and line breaks separate bytes, a slash
// begins a comment to the end of the line, and "text" stands for its bytes.
func unhex(t testing.TB, s string) []byte {
	t.Helper()
	var out []byte
	for line := range strings.Lines(s) {
		line, _, _ = strings.Cut(line, "/")
		for i, part := range strings.Split(line, `"`) {
			if i%2 == 1 {
				out = append(out, part...)
				continue
			}
			b, err := hex.DecodeString(strings.Join(strings.Fields(part), ""))
			if err != nil {
				t.Fatalf(`%q: hex.DecodeString(strings.Join(strings.Fields(part), "")) = %v, want nil`, part, err)
			}
			out = append(out, b...)
		}
	}
	return out
}

const ts = "cb 41d9a3c2e0000000 " // a float64 time stamp

// TestBatches decodes payloads that were written by hand from the msgpack
// specification and the field lists of vLLM and SGLang.
func TestBatches(t *testing.T) {
	for _, tt := range []struct {
		name      string
		hex       string
		want      []string
		malformed int
		fails     bool
	}{
		{name: "vLLM of 2025-06: arrays, no medium", hex: `93 ` + ts + ` 91
			96 ab "BlockStored"
			92 cf f000000000000001 05      / two hashes, the first above 2^63
			c0                             / no parent
			94 01 cc ff cd 1234 ce 00012345
			02 c0                          / block_size, lora_id
			00                             / data_parallel_rank`,
			want: []string{"store gpu after root: [17293822569102704641 5] tokens [1 255 4660 74565] by 2"}},
		{name: "vLLM of 2026-02: arrays with all fields", hex: `93 ` + ts + ` 92
			9c ab "BlockStored" 91 07 06 92 01 02 02 03 a3 "CPU" a3 "sql"
			91 91 a3 "sql"                 / extra_keys: the LoRA alone
			00 ae "full_attention" c0      / group, kind, window
			94 ac "BlockRemoved" 91 07 a3 "GPU" 00
			c0`,
			want: []string{"remove gpu: [7]"}}, // outside the GPU the block length of the event is not reliable yet
		{name: "vLLM since 2026-06: maps, defaults omitted", hex: `93 ` + ts + ` 93
			89 a4 "type" ab "BlockStored"
			ac "block_hashes" 91 cf ffffffffffffffff
			b1 "parent_block_hash" 2a
			a9 "token_ids" 92 0a 0b
			aa "block_size" 02
			a7 "lora_id" c0
			a6 "medium" a3 "GPU"
			a9 "lora_name" c0
			a8 "locality" a5 "LOCAL"
			82 a4 "type" ac "BlockRemoved" ac "block_hashes" 91 01
			81 a4 "type" b0 "AllBlocksCleared"
			03`,
			want: []string{"store gpu after 42: [18446744073709551615] tokens [10 11] by 2", "remove gpu: [1]", "clear"}},
		{name: "batch as a map", hex: `83 a2 "ts" ` + ts + `
			b2 "data_parallel_rank" 01
			a6 "events" 91 92 ac "BlockRemoved" 91 09`,
			want: []string{"remove gpu: [9]"}},
		{name: "hashes as bytes: their last eight count", hex: `92 ` + ts + ` 91
			97 ab "BlockStored"
			91 c4 20 c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb
			c4 10 00000000000000000000000000000100
			91 2a 01 c0 a3 "GPU"`,
			want: []string{"store gpu after 256: [2164874634404590027] tokens [42] by 1"}},
		{name: "SGLang: signed hashes, CPU_PINNED and EXTERNAL", hex: `93 ` + ts + ` 94
			97 ab "BlockStored" 91 d3 8000000000000000 c0 91 07 01 c0 a3 "GPU"
			97 ab "BlockStored" 91 d3 8000000000000000 c0 91 07 01 c0 aa "CPU_PINNED"
			97 ab "BlockStored" 91 ff c0 91 07 01 c0 a8 "EXTERNAL"
			93 ac "BlockRemoved" 91 ff a4 "DISK"
			c0`,
			want: []string{
				"store gpu after root: [9223372036854775808] tokens [7] by 1",
				"store cpu after root: [9223372036854775808] tokens [7] by 1",
				"store disk after root: [18446744073709551615] tokens [7] by 1",
				"remove disk: [18446744073709551615]"}},
		{name: "SGLang: salt in a map at the end", hex: `93 ` + ts + ` 91
			98 ab "BlockStored" 91 01 c0 91 07 01 c0 a3 "GPU" 81 aa "cache_salt" a6 "tenant"
			c0`,
			want: []string{"store gpu after root: [1] tokens [7] by 1 salt tenant"}},
		{name: "SGLang since 0.5.20: maps, with the salt as a member", hex: `93 ` + ts + ` 94
			88 a4 "type" ab "BlockStored"
			ac "block_hashes" 91 01
			b1 "parent_block_hash" c0
			a9 "token_ids" 91 07
			aa "block_size" 01
			a7 "lora_id" c0
			a6 "medium" a3 "GPU"
			aa "cache_salt" a6 "tenant"
			89 a4 "type" ab "BlockStored"
			ac "block_hashes" 91 02
			b1 "parent_block_hash" 01
			a9 "token_ids" 91 08
			aa "block_size" 01
			a7 "lora_id" c0
			a6 "medium" a3 "GPU"
			aa "cache_salt" a5 "other"
			aa "session_id" a1 "s"
			87 a4 "type" ab "BlockStored"
			ac "block_hashes" 91 03
			b1 "parent_block_hash" c0
			a9 "token_ids" 91 09
			aa "block_size" 01
			a7 "lora_id" c0
			aa "cache_salt" c0
			83 a4 "type" ac "BlockRemoved" ac "block_hashes" 91 01 a6 "medium" a3 "GPU"
			00`,
			want: []string{
				"store gpu after root: [1] tokens [7] by 1 salt tenant",
				"store gpu after 1: [2] tokens [8] by 1 salt other",
				"store gpu after root: [3] tokens [9] by 1",
				"remove gpu: [1]"}},
		{name: "SGLang: a salt of another type", hex: `92 ` + ts + ` 91
			86 a4 "type" ab "BlockStored" ac "block_hashes" 91 01 b1 "parent_block_hash" c0 a9 "token_ids" 91 07 aa "block_size" 01
			aa "cache_salt" 05`, malformed: 1},
		{name: "SGLang with EAGLE: pairs of tokens", hex: `92 ` + ts + ` 91
			97 ab "BlockStored" 91 01 c0 92 92 07 08 92 08 09 02 c0 a3 "GPU"`,
			want: []string{"store gpu after root: [1] tokens [7 8] by 2"}},
		{name: "salt and LoRA in extra keys of the first block", hex: `92 ` + ts + ` 91
			99 ab "BlockStored" 92 01 02 c0 92 07 08 01 03 a3 "GPU" a3 "sql"
			92 92 a3 "sql" a6 "tenant" 91 a3 "sql"`,
			want: []string{"store gpu after root: [1 2] tokens [7 8] by 1 lora sql salt tenant"}},
		{name: "an image in the second block: only the first is known by its tokens", hex: `92 ` + ts + ` 91
			99 ab "BlockStored" 93 01 02 03 c0 93 07 08 09 01 c0 a3 "GPU" c0
			93 c0 91 92 a4 "0123" 00 c0`,
			want: []string{"store gpu after root: [1] tokens [7] by 1"}},
		{name: "an image by name alone, as before 2026-03", hex: `92 ` + ts + ` 91
			99 ab "BlockStored" 91 02 01 91 08 01 c0 a3 "GPU" c0
			91 91 a4 "0123"`},
		{name: "embeddings", hex: `92 ` + ts + ` 91
			99 ab "BlockStored" 91 01 c0 91 07 01 c0 a3 "GPU" c0
			91 91 c4 02 0102`},
		{name: "LoRA known by its number alone", hex: `92 ` + ts + ` 91
			97 ab "BlockStored" 91 01 c0 91 07 01 03 a3 "GPU"`,
			want: []string{"store gpu after root: [1] tokens [7] by 1 lora lora id 3"}},
		{name: "stored below the GPU without tokens", hex: `92 ` + ts + ` 91
			88 a4 "type" ab "BlockStored" ac "block_hashes" 91 05 b1 "parent_block_hash" c0
			a9 "token_ids" 90 aa "block_size" 00 a7 "lora_id" c0 a6 "medium" a3 "CPU" a9 "group_idx" 00`,
			want: []string{"store cpu after root: [5] tokens [] by 0"}},
		{name: "Mooncake store: a first block without its parent", hex: `92 ` + ts + ` 92
			97 ab "BlockStored" 91 05 c0 91 07 01 c0 a3 "cpu"
			97 ab "BlockStored" 91 06 05 91 07 01 c0 a3 "cpu"`,
			want: []string{"store cpu after root: [5] tokens [] by 0"}},
		{name: "held by another host", hex: `92 ` + ts + ` 91
			84 a4 "type" ac "BlockRemoved" ac "block_hashes" 91 05 a6 "medium" a3 "CPU" a8 "locality" a6 "REMOTE"`,
			want: []string{"remove disk: [5]"}},
		{name: "fewer hashes than blocks", hex: `92 ` + ts + ` 91
			97 ab "BlockStored" 91 01 c0 92 07 08 01 c0 a3 "GPU"`},
		{name: "groups: sliding window is not counted beside full attention", hex: `92 ` + ts + ` 95
			9b ab "BlockStored" 91 01 c0 91 07 01 c0 a3 "GPU" c0 c0 01 ae "full_attention"
			9b ab "BlockStored" 91 02 c0 91 08 01 c0 a3 "GPU" c0 c0 00 ae "sliding_window"
			94 ac "BlockRemoved" 91 02 a3 "GPU" 00
			94 ac "BlockRemoved" 91 01 a3 "GPU" 01
			93 ac "BlockRemoved" 91 03 a3 "GPU"`,
			want: []string{"store gpu after root: [1] tokens [7] by 1", "remove gpu: [1]", "remove gpu: [3]"}},
		{name: "groups: full attention comes late", hex: `92 ` + ts + ` 92
			9b ab "BlockStored" 91 02 c0 91 08 01 c0 a3 "GPU" c0 c0 00 ae "sliding_window"
			9b ab "BlockStored" 91 01 c0 91 07 01 c0 a3 "GPU" c0 c0 01 ae "full_attention"`,
			want: []string{"store gpu after root: [2] tokens [8] by 1", "clear", "store gpu after root: [1] tokens [7] by 1"}},
		{name: "a partial block, and another store's chunks", hex: `92 ` + ts + ` 93
			97 ab "BlockStored" 91 01 c0 92 07 08 02 c0 a3 "GPU"
			97 ab "BlockStored" 91 02 01 91 09 01 c0 a3 "GPU"
			97 ab "BlockStored" 91 03 c0 94 07 08 09 0a 04 c0 a3 "CPU"`,
			want: []string{"store gpu after root: [1] tokens [7 8] by 2"}},
		{name: "unknown events and fields", hex: `94 ` + ts + ` 93
			93 ad "BlockMigrated" 91 01 a3 "far"
			83 a4 "type" ad "BlockMigrated" ac "block_hashes" a1 "x" a1 "y" c3
			96 ac "BlockRemoved" 91 04 a3 "GPU" c0 c0 81 01 02
			00 c0`,
			want: []string{"remove gpu: [4]"}, malformed: 1},
		{name: "an event that cannot be read is left out", hex: `92 ` + ts + ` 93
			97 ab "BlockStored" a1 "x" c0 91 07 01 c0 a3 "GPU"
			05
			92 ac "BlockRemoved" 91 04`,
			want: []string{"remove gpu: [4]"}, malformed: 2},
		{name: "a removal that cannot be read", hex: `92 ` + ts + ` 92
			92 ac "BlockRemoved" 91 04
			92 ac "BlockRemoved" 91 c3`,
			want: []string{"remove gpu: [4]"}, malformed: 1, fails: true},
		{name: "cut short", hex: `92 ` + ts + ` 92 92 ac "BlockRemoved" 91 04`,
			want: []string{"remove gpu: [4]"}, malformed: 1, fails: true},
		{name: "no events", hex: `92 ` + ts + ` 90`},
		{name: "an array of one", hex: `91 ` + ts, fails: true},
		{name: "a map without events", hex: `81 a2 "ts" ` + ts, fails: true},
		{name: "not a batch", hex: `a5 "hello"`, fails: true},
		{name: "empty", fails: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var n notes
			d := batches{to: &n}
			err := d.decode(unhex(t, tt.hex))
			if (err != nil) != tt.fails {
				t.Errorf("got error %v", err)
			}
			n.expect(t, tt.want...)
			if d.malformed != tt.malformed {
				t.Errorf("got %d malformed, want %d", d.malformed, tt.malformed)
			}
		})
	}
}

// TestBatchesReuse: the decoder reuses its memory. No field of one event appears in
// the next event, and after the longest event the decoder allocates nothing.
func TestBatchesReuse(t *testing.T) {
	first := unhex(t, `92 `+ts+` 91
		99 ab "BlockStored" 93 01 02 03 2a 93 07 08 09 01 03 a3 "CPU" a3 "sql" 91 92 a3 "sql" a6 "tenant"`)
	second := unhex(t, `92 `+ts+` 92
		97 ab "BlockStored" 91 01 c0 91 07 01 c0 a3 "GPU"
		92 ac "BlockRemoved" 91 04`)
	var n notes
	d := batches{to: &n, filter: eventFilter{block: 1}}
	for range 2 {
		if err := d.decode(first); err != nil {
			t.Fatal(err)
		}
		n.expect(t) // the first block has extra keys, so its tokens alone do not identify it
		if err := d.decode(second); err != nil {
			t.Fatal(err)
		}
		n.expect(t, "store gpu after root: [1] tokens [7] by 1", "remove gpu: [4]")
	}
	d.to = discardFeed{}
	if got := testing.AllocsPerRun(100, func() {
		if d.decode(first) != nil || d.decode(second) != nil {
			t.Error("not read")
		}
	}); got != 0 {
		t.Errorf("got %v allocations", got)
	}
}

// discardFeed is a feed that ignores every event.
type discardFeed struct{}

func (discardFeed) Stored(e *kvindex.Stored) (int, int)            { return len(e.Hashes), 0 }
func (discardFeed) Removed(kvindex.Tier, []uint64)                 {}
func (discardFeed) Moved(kvindex.Tier, kvindex.Tier, []uint64) int { return 0 }
func (discardFeed) Cleared()                                       {}

// checked is a feed that fails the test at an inconsistent event.
type checked struct{ t *testing.T }

func (c checked) Stored(e *kvindex.Stored) (applied, refused int) {
	if len(e.Hashes) == 0 || len(e.Tokens) > 0 && len(e.Tokens) != len(e.Hashes)*e.BlockTokens {
		c.t.Errorf("%d hashes, %d tokens by %d", len(e.Hashes), len(e.Tokens), e.BlockTokens)
	}
	if e.Tier > kvindex.Disk {
		c.t.Errorf("tier %d", e.Tier)
	}
	return len(e.Hashes), 0
}
func (c checked) Removed(tier kvindex.Tier, hashes []uint64) {
	if tier > kvindex.Disk {
		c.t.Errorf("tier %d", tier)
	}
}
func (c checked) Moved(from, to kvindex.Tier, hashes []uint64) (refused int) {
	if from > kvindex.Disk || to > kvindex.Disk || len(hashes) == 0 {
		c.t.Errorf("moved %v from %d to %d", hashes, from, to)
	}
	return 0
}
func (c checked) Cleared() {}

func FuzzBatches(f *testing.F) {
	for _, s := range []string{
		`93 ` + ts + ` 91 97 ab "BlockStored" 92 cf f000000000000001 05 c0 92 01 ce 00012345 01 c0 a3 "GPU" 00`,
		`92 ` + ts + ` 91 99 ab "BlockStored" 91 c4 02 0102 03 91 07 01 03 a3 "CPU" a3 "sql" 91 93 a3 "sql" 92 a1 "x" 00 a1 "s"`,
		`83 a2 "ts" ` + ts + ` b2 "data_parallel_rank" 01 a6 "events" 91 82 a4 "type" ac "BlockRemoved" ac "block_hashes" 91 ff`,
		`93 ` + ts + ` 91 98 ab "BlockStored" 91 01 c0 91 92 07 08 01 c0 a3 "GPU" 81 aa "cache_salt" a6 "tenant" c0`,
		`92 ` + ts + ` 91 9b ab "BlockStored" 91 01 c0 91 07 01 c0 a3 "GPU" c0 c0 01 ae "full_attention"`,
		`92 ` + ts + ` 91 91 b0 "AllBlocksCleared"`,
		`92 ` + ts + ` dd ffffffff dd ffffffff`,
		`92 ` + ts + ` 91 95 ab "BlockStored" 91 01 c0 dd ffffffff`,
	} {
		f.Add(unhex(f, s))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		d := batches{to: checked{t}}
		for range 2 {
			_ = d.decode(payload)
		}
	})
}
