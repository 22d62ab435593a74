package kvevents

import (
	"encoding/binary"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// benchBatch returns a batch in the format of vLLM since 2026-06. One event stores
// 64 blocks of 16 tokens with extra keys. Then 64 events remove one block each. The
// arguments are the lowest numbers of the stored and of the removed blocks.
func benchBatch(stored, removed uint64) []byte {
	const blocks, block = 64, 16
	str := func(b []byte, s string) []byte { return append(append(b, 0xa0|byte(len(s))), s...) }
	b := append([]byte{0x93, 0xcb, 0x41, 0xd9, 0xa3, 0xc2, 0xe0, 0, 0, 0, 0xdc, 0, 1 + blocks}, 0x89)
	b = str(str(b, "type"), "BlockStored")
	b = append(str(b, "block_hashes"), 0xdc, 0, blocks)
	hash := func(b []byte, n uint64) []byte {
		return binary.BigEndian.AppendUint64(append(b, 0xcf), (n+1)*0x9e3779b97f4a7c15)
	}
	for i := range uint64(blocks) {
		b = hash(b, stored+i)
	}
	b = append(str(b, "parent_block_hash"), 0xc0)
	b = append(str(b, "token_ids"), 0xdd, 0, 0, blocks*block>>8, 0)
	for i := range uint32(blocks * block) {
		b = binary.BigEndian.AppendUint32(append(b, 0xce), uint32(stored)<<4+i)
	}
	b = append(str(b, "block_size"), block)
	b = append(str(b, "lora_id"), 0xc0)
	b = str(str(b, "medium"), "GPU")
	b = append(str(b, "lora_name"), 0xc0)
	b = append(str(b, "group_idx"), 0)
	for i := range uint64(blocks) {
		b = str(str(append(b, 0x84), "type"), "BlockRemoved")
		b = hash(append(str(b, "block_hashes"), 0x91), removed+i)
		b = str(str(b, "medium"), "GPU")
		b = append(str(b, "group_idx"), 0)
	}
	return append(b, 0)
}

// BenchmarkBatches decodes payloads and applies them to the index on one core. An
// event is one stored or removed block. Each batch removes the oldest of 256 Ki
// blocks, so that the index does not fit into the processor's cache.
func BenchmarkBatches(b *testing.B) {
	for _, tt := range []struct {
		name string
		to   func(*kvindex.Index) feed
	}{
		{"decode", func(*kvindex.Index) feed { return discardFeed{} }},
		{"index", func(x *kvindex.Index) feed { return kvindex.NewFeed(x, x.Add(), "m") }},
	} {
		b.Run(tt.name, func(b *testing.B) {
			x := kvindex.New(kvindex.Options{})
			d := batches{to: tt.to(x)}
			var payloads [][]byte
			const n = 4096
			for i := range uint64(n) {
				payloads = append(payloads, benchBatch(i*64, (i+1)%n*64))
			}
			if err := d.decode(payloads[0]); err != nil || d.malformed != 0 || d.blocks != 128 {
				b.Fatal(err, d.malformed, d.blocks)
			}
			for _, p := range payloads {
				if err := d.decode(p); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			d.blocks = 0
			i := 0
			for b.Loop() {
				if err := d.decode(payloads[i%len(payloads)]); err != nil {
					b.Fatal(err)
				}
				i++
			}
			b.ReportMetric(float64(d.blocks)/b.Elapsed().Seconds(), "blocks/s")
		})
	}
}
