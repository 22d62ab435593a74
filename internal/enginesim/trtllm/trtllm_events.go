package trtllm

import (
	"crypto/sha256"
	"encoding/binary"
	"io"
	"net/http"
	"slices"
	"sync"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// TRTEventBuffer is kv_cache_config.event_buffer_max_size. TRTEventTokens is
// the largest number of tokens in waiting events.
const (
	TRTEventBuffer = 1 << 14
	TRTEventTokens = 1 << 22
)

// trtPriority is the default retention priority of a block.
const trtPriority = 35

// trtHashAlgo names the hash of TRTNaming.
const trtHashAlgo = "v1_block_key"

// trtEvents holds the events of a worker's caches until POST /kv_cache_events
// takes them. They are for one reader: another reader does not get them again.
// It is safe for concurrent use.
type trtEvents struct {
	wire, window, blocks int
	fault                *core.KVFault

	Mu     sync.Mutex
	next   []int64 // the next event_id of each rank
	Queue  []trtEvent
	Tokens int        // in queue
	held   []trtEvent // sent after the next batch
}

// trtEvent is one waiting event.
type trtEvent struct {
	rank int
	id   int64
	core.KVEvent
}

// newTRTEvents returns the events of an engine. The first event of a rank gives
// its number of blocks.
func newTRTEvents(e *core.Engine) *trtEvents {
	q := &trtEvents{
		wire: e.Cfg.TRTLLM.Wire, window: e.MaxModelLen(), blocks: e.Cfg.KVBlocks, fault: e.KVFault,
		next: make([]int64, e.Cfg.Ranks),
	}
	for rank := range e.Cfg.Ranks {
		q.add(q.number(rank, []core.KVEvent{{Kind: core.KVCreated}}))
	}
	return q
}

// number assigns ids to events.
func (q *trtEvents) number(rank int, events []core.KVEvent) []trtEvent {
	list := make([]trtEvent, 0, len(events))
	for _, e := range events {
		list = append(list, trtEvent{rank, q.next[rank], e})
		q.next[rank]++
	}
	return list
}

// add queues events and drops the oldest ones if there is no room.
func (q *trtEvents) add(list []trtEvent) {
	for _, e := range list {
		q.Queue = append(q.Queue, e)
		q.Tokens += len(e.Tokens)
	}
	over := 0
	for len(q.Queue)-over > TRTEventBuffer || q.Tokens > TRTEventTokens {
		q.Tokens -= len(q.Queue[over].Tokens)
		over++
	}
	q.Queue = slices.Delete(q.Queue, 0, over)
}

// Publish implements kvSink.
func (q *trtEvents) Publish(rank int, events []core.KVEvent) {
	fault := q.fault.Draw()
	q.Mu.Lock()
	defer q.Mu.Unlock()
	batch := q.number(rank, events)
	switch {
	case fault == core.KVEventsDrop, fault == core.KVEventsLose:
		return
	case fault == core.KVEventsReorder && q.held == nil:
		q.held = batch
		return
	}
	q.add(append(batch, q.held...))
	q.held = nil
}

// render returns an event in the worker's form.
func (q *trtEvents) render(e trtEvent) core.Object {
	o := core.Obj("event_id", e.id, "window_size", q.window)
	if len(q.next) > 1 {
		o = o.With("attention_dp_rank", e.rank)
	}
	if e.Kind == core.KVCreated {
		return o.With("data", core.Obj("type", "created", "num_blocks_per_cache_level", []int{q.blocks, 0}))
	}
	if q.wire >= core.TRTLLMWireG2 {
		o = o.With("hash_algo", trtHashAlgo)
	}
	return o.With("data", trtEventData(e.KVEvent))
}

// trtEventData is the data of an event (KVCacheEventSerializer in
// tensorrt_llm/_utils.py).
func trtEventData(e core.KVEvent) core.Object {
	hashes := make([]uint64, 0, len(e.Names))
	for _, name := range e.Names {
		hashes = append(hashes, TRTHash(name))
	}
	if e.Kind == core.KVRemoved {
		return core.Obj("type", "removed", "block_hashes", hashes)
	}
	blocks := make([]any, 0, len(hashes))
	for i, hash := range hashes {
		tokens := make([]any, 0, e.Size)
		for _, t := range e.Tokens[i*e.Size : (i+1)*e.Size] {
			tokens = append(tokens, core.Obj("type", "unique_token", "token_id", int(t), "token_extra_id", 0))
		}
		blocks = append(blocks, core.Obj("type", "stored_block", "block_hash", hash, "tokens", tokens,
			"cache_level", 0, "priority", trtPriority))
	}
	var parent any
	if !e.Root {
		parent = TRTHash(e.Parent)
	}
	return core.Obj("type", "stored", "parent_hash", parent, "blocks", blocks)
}

// drain answers POST /kv_cache_events with all events since the previous call.
func (q *trtEvents) drain(w http.ResponseWriter, _ *http.Request) {
	if q.fault.Stopped() {
		core.WriteJSON(w, http.StatusOK, []any{})
		return
	}
	q.Mu.Lock()
	taken := q.Queue
	q.Queue, q.Tokens = nil, 0
	q.Mu.Unlock()
	list := make([]any, 0, len(taken))
	for _, e := range taken {
		list = append(list, q.render(e))
	}
	if q.fault.Garbles() {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `[{"event_id":`)
		return
	}
	core.WriteJSON(w, http.StatusOK, list)
}

// TRTNaming is the block hash "v1_block_key" of TensorRT-LLM
// (cpp/tensorrt_llm/batch_manager/blockKey.cpp): 64 bits, at the beginning of
// the name.
type TRTNaming struct{}

func (TRTNaming) Root(string) core.BlockName { return core.BlockName{} }

func (TRTNaming) Next(parent core.BlockName, first bool, salt string, tokens []core.Token, _ core.BlockHash) (name core.BlockName) {
	h := uint64(len(tokens)) ^ TRTHash(parent)*0xbf58476d1ce4e5b9
	if first && salt != "" {
		sum := sha256.Sum256([]byte(salt))
		h = trtMix64(binary.LittleEndian.Uint64(sum[:]), h)
	}
	for _, t := range tokens {
		h = trtMix32(uint32(t), h)
	}
	binary.BigEndian.PutUint64(name[:], h)
	return name
}

func TRTHash(name core.BlockName) uint64 { return binary.BigEndian.Uint64(name[:]) }

// trtMix32 and trtMix64 add a value to a hash.
func trtMix32(v uint32, h uint64) uint64 {
	for range 2 {
		v = (v>>16 ^ v) * 0x45d9f3b
	}
	v = v>>16 ^ v
	v += 0x9e3779b9
	return h ^ (uint64(v) + h<<6 + h>>2)
}

func trtMix64(v, h uint64) uint64 {
	v = (v ^ v>>30) * 0xbf58476d1ce4e5b9
	v = (v ^ v>>27) * 0x94d049bb133111eb
	v ^= v >> 31
	return h ^ (v + 0x9e3779b9 + h<<6 + h>>2)
}
