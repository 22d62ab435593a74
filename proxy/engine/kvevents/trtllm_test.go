package kvevents

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// tokensJSON returns a list of tokens in TensorRT-LLM's format.
func tokensJSON(ids ...int) string {
	var b strings.Builder
	for i, id := range ids {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, `{"type":"unique_token","token_id":%d,"token_extra_id":0}`, id)
	}
	return "[" + b.String() + "]"
}

func blockJSON(hash string, level int, rest string, ids ...int) string {
	return fmt.Sprintf(`{"type":"stored_block","block_hash":%s,"cache_level":%d,"priority":35%s,"tokens":%s}`,
		hash, level, rest, tokensJSON(ids...))
}

func storedJSON(id int, more, parent string, blocks ...string) string {
	return fmt.Sprintf(`{"event_id":%d,"data":{"type":"stored","parent_hash":%s,"blocks":[%s]},"window_size":4096%s}`,
		id, parent, strings.Join(blocks, ","), more)
}

// TestDrained reads answers that were written by hand from the code of
// TensorRT-LLM's KVCacheEventSerializer.
func TestDrained(t *testing.T) {
	for _, tt := range []struct {
		name      string
		json      string
		want      []string // rank 0
		other     []string // rank 1
		resyncs   []string
		malformed int
		strangers int
		fails     bool
	}{
		{name: "nothing new", json: `[]`},
		{name: "the four types", json: `[
{"event_id":0,"window_size":4096,"data":{"type":"created","num_blocks_per_cache_level":[900,0]}},
{"event_id":1,"window_size":4096,"attention_dp_rank":0,"hash_algo":"v1_block_key","data":{"type":"stored","parent_hash":null,
  "blocks":[{"type":"stored_block","block_hash":3720631715349728507,"cache_level":0,"priority":35,
    "tokens":[{"type":"unique_token","token_id":101,"token_extra_id":0},{"type":"unique_token","token_id":102,"token_extra_id":0}]},
   {"type":"stored_block","block_hash":18446744073709551615,"tokens":[{"token_id":103},{"token_id":104}]}]}},
{"event_id":2,"window_size":4096,"data":{"type":"updated","block_hash":3720631715349728507,"cache_level":{"type":"event_diff","old_value":0,"new_value":1},"priority":null}},
{"event_id":3,"window_size":4096,"data":{"type":"updated","block_hash":5,"cache_level":null,"priority":{"type":"event_diff","old_value":0,"new_value":1}}},
{"event_id":4,"window_size":4096,"data":{"type":"removed","block_hashes":[3720631715349728507]}}]`,
			want: []string{
				"store gpu after root: [3720631715349728507 18446744073709551615] tokens [101 102 103 104] by 2",
				"move gpu to cpu: [3720631715349728507]",
				"remove gpu: [3720631715349728507]", "remove cpu: [3720631715349728507]", "remove disk: [3720631715349728507]"}},
		{name: "digests", json: `[` + storedJSON(0, `,"hash_algo":"v2_sha256"`,
			`"0643a36c50b99c020f0209ab0a0a91fe1a132dab720f36741bdda5bf0c0e9584"`,
			blockJSON(`"42acc146cefb9748d2a5162ab9dcf0fc889566ac6717957e116cd42df7e1c2df"`, 0, "", 7)) + `]`,
			want: []string{"store gpu after 451384073273318402: [4804427412361942856] tokens [7] by 1"}},
		{name: "ranks are numbered by themselves", json: `[` +
			storedJSON(0, "", "null", blockJSON("1", 0, "", 7)) + `,` +
			storedJSON(0, `,"attention_dp_rank":1`, "null", blockJSON("2", 0, "", 8)) + `,` +
			`{"event_id":1,"data":{"type":"removed","block_hashes":[1]},"window_size":4096,"attention_dp_rank":0},` +
			`{"event_id":0,"data":{"type":"removed","block_hashes":[1]},"window_size":4096,"attention_dp_rank":2}]`,
			want:      []string{"store gpu after root: [1] tokens [7] by 1", "remove gpu: [1]"},
			other:     []string{"store gpu after root: [2] tokens [8] by 1"},
			strangers: 1},
		{name: "a gap and a restart", json: `[` +
			storedJSON(7, "", "null", blockJSON("1", 0, "", 7)) + `,` +
			storedJSON(9, "", "null", blockJSON("2", 0, "", 8)) + `,` +
			storedJSON(0, "", "null", blockJSON("3", 0, "", 9)) + `]`,
			want: []string{"store gpu after root: [1] tokens [7] by 1", "clear",
				"store gpu after root: [2] tokens [8] by 1", "clear", "store gpu after root: [3] tokens [9] by 1"},
			resyncs: []string{"0 gap", "0 restart"}},
		{name: "the largest window counts", json: `[
{"event_id":0,"window_size":4096,"data":{"type":"created","num_blocks_per_cache_level":[9]}},
{"event_id":1,"window_size":32768,"data":{"type":"created","num_blocks_per_cache_level":[9]}},
` + storedJSON(2, "", "null", blockJSON("1", 0, "", 7)) + `,` +
			strings.Replace(storedJSON(3, "", "null", blockJSON("1", 0, "", 7)), "4096", "32768", 1) + `,
{"event_id":4,"window_size":4096,"data":{"type":"removed","block_hashes":[1]}},
{"event_id":5,"window_size":32768,"data":{"type":"removed","block_hashes":[1]}}]`,
			want: []string{"clear", "store gpu after root: [1] tokens [7] by 1", "remove gpu: [1]"}},
		{name: "the first of several layer groups counts", json: `[` +
			storedJSON(0, `,"layer_group_id":0`, "null", blockJSON("1", 0, "", 7)) + `,` +
			storedJSON(1, `,"layer_group_id":1`, "null", blockJSON("2", 0, "", 7)) + `]`,
			want: []string{"store gpu after root: [1] tokens [7] by 1"}},
		{name: "a run ends where the tier or the length changes", json: `[` + storedJSON(0, "", "9",
			blockJSON("1", 0, "", 1, 2), blockJSON("2", 0, "", 3, 4), blockJSON("3", 1, "", 5, 6), blockJSON("4", 1, "", 7)) + `]`,
			want: []string{"store gpu after 9: [1 2] tokens [1 2 3 4] by 2", "store cpu after 2: [3] tokens [5 6] by 2"}},
		{name: "a partial block comes first", json: `[` +
			storedJSON(0, "", "null", blockJSON("1", 0, "", 1, 2)) + `,` +
			storedJSON(1, "", "null", blockJSON("2", 0, "", 1, 2, 3)) + `,` +
			storedJSON(2, "", "null", blockJSON("3", 0, "", 1, 2, 3, 4)) + `]`,
			want: []string{"store gpu after root: [1] tokens [1 2] by 2", "clear", "store gpu after root: [3] tokens [1 2 3 4] by 4"}},
		{name: "salt", json: `[` + storedJSON(0, "", "null", blockJSON("1", 0, `,"cache_salt":"ten\u0061nt","mm_keys":[]`, 7)) + `]`,
			want: []string{"store gpu after root: [1] tokens [7] by 1 salt tenant"}},
		{name: "facts that tokens do not show", json: `[` +
			storedJSON(0, "", "null", blockJSON("1", 0, "", 7), blockJSON("2", 0, `,"mm_keys":[{"type":"mm_key","hash":"ab","start_offset":0}]`, 8), blockJSON("3", 0, "", 9)) + `,` +
			storedJSON(1, "", "null", strings.Replace(blockJSON("4", 0, "", 7), `"token_extra_id":0`, `"token_extra_id":12`, 1)) + `,` +
			storedJSON(2, "", "null", strings.Replace(blockJSON("5", 0, "", 7), `"token_id":7`, `"token_id":"00ff"`, 1)) + `,` +
			storedJSON(3, "", "null", blockJSON("6", 0, `,"lora_id":3`, 7)) + `,` +
			storedJSON(4, "", "null", blockJSON("7", 0, `,"lora_id":null`, 7)) + `]`,
			want: []string{"store gpu after root: [1] tokens [7] by 1", "store gpu after root: [7] tokens [7] by 1"}},
		{name: "unknown types and members", json: `[{"event_id":0,"x":{"y":["}",1.5e3,true]},"data":{"type":"renamed","blocks":7}},
{"event_id":1,"data":{"z":"\"","type":"removed","block_hashes":[]}},
{"event_id":2,"data":{"z":"\"","type":"removed","block_hashes":[1]}}]`,
			want: []string{"remove gpu: [1]"}},
		{name: "an event that cannot be read", json: `[{"event_id":0,"data":{"type":"removed","block_hashes":["xyz"]}},
{"event_id":1},{"event_id":2,"data":{"type":"removed","block_hashes":[3]}}]`,
			want:    []string{"clear", "clear", "remove gpu: [3]"},
			resyncs: []string{"0 unreadable", "0 gap"}, malformed: 2},
		{name: "cut short", json: `[{"event_id":0,"data":{"type":"removed","block_hashes":[3]}},{"event_id":1,"da`,
			want: []string{"remove gpu: [3]"}, fails: true},
		{name: "an object", json: `{"error":"no"}`, fails: true},
		{name: "empty", fails: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var zero, one notes
			var resyncs []string
			d := drained{ranks: []drainedRank{{to: &zero}, {to: &one}}, resync: func(rank int, reason string) {
				resyncs = append(resyncs, fmt.Sprint(rank, " ", reason))
			}}
			if _, err := d.decode([]byte(tt.json)); (err != nil) != tt.fails {
				t.Errorf("got error %v", err)
			}
			zero.expect(t, tt.want...)
			one.expect(t, tt.other...)
			if !slices.Equal(resyncs, tt.resyncs) || d.malformed != tt.malformed || d.unknownRanks != tt.strangers {
				t.Errorf("resyncs %q, %d malformed, %d strangers", resyncs, d.malformed, d.unknownRanks)
			}
		})
	}
}

// TestDrainedReuse: after the longest event the decoder allocates no memory.
func TestDrainedReuse(t *testing.T) {
	d := drained{ranks: []drainedRank{{to: discardFeed{}}}, resync: func(int, string) {}}
	body := []byte(`[` + storedJSON(0, "", "null", blockJSON("1", 0, `,"cache_salt":"tenant"`, 1, 2), blockJSON("2", 1, "", 3, 4)) + `,` +
		`{"event_id":1,"data":{"type":"removed","block_hashes":[1,"ff"]},"window_size":4096}]`)
	if got := testing.AllocsPerRun(100, func() {
		if n, err := d.decode(body); n != 2 || err != nil {
			t.Error(n, err)
		}
	}); got != 0 {
		t.Errorf("got %v allocations", got)
	}
	if d.malformed != 0 || d.blocks == 0 {
		t.Errorf("%d malformed, %d blocks", d.malformed, d.blocks)
	}
}

func FuzzDrained(f *testing.F) {
	f.Add([]byte(`[` + storedJSON(0, `,"attention_dp_rank":1`, "null", blockJSON("1", 0, `,"cache_salt":"a\n","mm_keys":[1]`, 1, 2), blockJSON("2", 1, "", 3)) + `]`))
	f.Add([]byte(`[{"event_id":2,"window_size":4096,"data":{"type":"updated","block_hash":"00ff","cache_level":{"type":"event_diff","old_value":0,"new_value":7}}}]`))
	f.Add([]byte(`[{"event_id":18446744073709551615,"layer_group_id":-1,"data":{"type":"removed","block_hashes":[-1,"0123456789abcdef00"]}}]`))
	f.Add([]byte(`[[[{"":"\`))
	f.Add([]byte(`[.{"a":.}]`))
	f.Fuzz(func(t *testing.T, body []byte) {
		d := drained{ranks: []drainedRank{{to: checked{t}}, {to: checked{t}}}, resync: func(int, string) {}}
		for range 2 {
			_, _ = d.decode(body)
		}
	})
}

var _ feed = (*kvindex.Feed)(nil)

// BenchmarkDrained decodes one answer with 64 blocks of 32 tokens.
func BenchmarkDrained(b *testing.B) {
	ids := make([]int, 32)
	for i := range ids {
		ids[i] = 100 + i*7919%120000
	}
	blocks := make([]string, 64)
	for i := range blocks {
		blocks[i] = blockJSON(fmt.Sprint(3720631715349728507+i), 0, "", ids...)
	}
	body := []byte(`[` + storedJSON(0, "", "null", blocks...) + `]`)
	d := drained{ranks: []drainedRank{{to: discardFeed{}}}, resync: func(int, string) {}}
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.decode(body); err != nil || d.malformed > 0 {
			b.Fatal(err, d.malformed)
		}
	}
}
