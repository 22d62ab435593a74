package enginesim

import (
	"crypto/sha256"
	"encoding/binary"
	"io"
	"net/http"
	"slices"
	"sync"
)

// trtEventBuffer is kv_cache_config.event_buffer_max_size. trtEventTokens is
// the largest number of tokens in waiting events.
const (
	trtEventBuffer = 1 << 14
	trtEventTokens = 1 << 22
)

// trtPriority is the default retention priority of a block.
const trtPriority = 35

// trtHashAlgo names the hash of trtNaming.
const trtHashAlgo = "v1_block_key"

// trtEvents holds the events of a worker's caches until POST /kv_cache_events
// takes them. They are for one reader: another reader does not get them again.
// It is safe for concurrent use.
type trtEvents struct {
	wire, window, blocks int
	fault                *kvFault

	mu     sync.Mutex
	next   []int64 // the next event_id of each rank
	queue  []trtEvent
	tokens int        // in queue
	held   []trtEvent // sent after the next batch
}

// trtEvent is one waiting event.
type trtEvent struct {
	rank int
	id   int64
	kvEvent
}

// newTRTEvents returns the events of an engine. The first event of a rank gives
// its number of blocks.
func newTRTEvents(e *Engine) *trtEvents {
	q := &trtEvents{
		wire: e.cfg.TRTLLM.Wire, window: e.maxModelLen(), blocks: e.cfg.KVBlocks, fault: e.kvFault,
		next: make([]int64, e.cfg.Ranks),
	}
	for rank := range e.cfg.Ranks {
		q.add(q.number(rank, []kvEvent{{kind: kvCreated}}))
	}
	return q
}

// number assigns ids to events.
func (q *trtEvents) number(rank int, events []kvEvent) []trtEvent {
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
		q.queue = append(q.queue, e)
		q.tokens += len(e.tokens)
	}
	over := 0
	for len(q.queue)-over > trtEventBuffer || q.tokens > trtEventTokens {
		q.tokens -= len(q.queue[over].tokens)
		over++
	}
	q.queue = slices.Delete(q.queue, 0, over)
}

// publish implements kvSink.
func (q *trtEvents) publish(rank int, events []kvEvent) {
	fault := q.fault.draw()
	q.mu.Lock()
	defer q.mu.Unlock()
	batch := q.number(rank, events)
	switch {
	case fault == KVEventsDrop, fault == KVEventsLose:
		return
	case fault == KVEventsReorder && q.held == nil:
		q.held = batch
		return
	}
	q.add(append(batch, q.held...))
	q.held = nil
}

// render returns an event in the worker's form.
func (q *trtEvents) render(e trtEvent) object {
	o := obj("event_id", e.id, "window_size", q.window)
	if len(q.next) > 1 {
		o = o.with("attention_dp_rank", e.rank)
	}
	if e.kind == kvCreated {
		return o.with("data", obj("type", "created", "num_blocks_per_cache_level", []int{q.blocks, 0}))
	}
	if q.wire >= TRTLLMWireG2 {
		o = o.with("hash_algo", trtHashAlgo)
	}
	return o.with("data", trtEventData(e.kvEvent))
}

// trtEventData is the data of an event (KVCacheEventSerializer in
// tensorrt_llm/_utils.py).
func trtEventData(e kvEvent) object {
	hashes := make([]uint64, 0, len(e.names))
	for _, name := range e.names {
		hashes = append(hashes, trtHash(name))
	}
	if e.kind == kvRemoved {
		return obj("type", "removed", "block_hashes", hashes)
	}
	blocks := make([]any, 0, len(hashes))
	for i, hash := range hashes {
		tokens := make([]any, 0, e.size)
		for _, t := range e.tokens[i*e.size : (i+1)*e.size] {
			tokens = append(tokens, obj("type", "unique_token", "token_id", int(t), "token_extra_id", 0))
		}
		blocks = append(blocks, obj("type", "stored_block", "block_hash", hash, "tokens", tokens,
			"cache_level", 0, "priority", trtPriority))
	}
	var parent any
	if !e.root {
		parent = trtHash(e.parent)
	}
	return obj("type", "stored", "parent_hash", parent, "blocks", blocks)
}

// drain answers POST /kv_cache_events with all events since the previous call.
func (q *trtEvents) drain(w http.ResponseWriter, _ *http.Request) {
	if q.fault.stopped() {
		writeJSON(w, http.StatusOK, []any{})
		return
	}
	q.mu.Lock()
	taken := q.queue
	q.queue, q.tokens = nil, 0
	q.mu.Unlock()
	list := make([]any, 0, len(taken))
	for _, e := range taken {
		list = append(list, q.render(e))
	}
	if q.fault.garbles() {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `[{"event_id":`)
		return
	}
	writeJSON(w, http.StatusOK, list)
}

// trtNaming is the block hash "v1_block_key" of TensorRT-LLM
// (cpp/tensorrt_llm/batch_manager/blockKey.cpp): 64 bits, at the beginning of
// the name.
type trtNaming struct{}

func (trtNaming) root(string) blockName { return blockName{} }

func (trtNaming) next(parent blockName, first bool, salt string, tokens []token, _ blockHash) (name blockName) {
	h := uint64(len(tokens)) ^ trtHash(parent)*0xbf58476d1ce4e5b9
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

func trtHash(name blockName) uint64 { return binary.BigEndian.Uint64(name[:]) }

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
