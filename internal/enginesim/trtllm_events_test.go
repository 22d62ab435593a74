package enginesim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/trtllm"
)

// trtEventJSON is an event of POST /kv_cache_events.
type trtEventJSON struct {
	ID     int64  `json:"event_id"`
	Window int    `json:"window_size"`
	Rank   *int   `json:"attention_dp_rank"`
	Algo   string `json:"hash_algo"`
	Data   struct {
		Type   string   `json:"type"`
		Levels []int    `json:"num_blocks_per_cache_level"`
		Parent *uint64  `json:"parent_hash"`
		Hashes []uint64 `json:"block_hashes"`
		Blocks []struct {
			Type     string `json:"type"`
			Hash     uint64 `json:"block_hash"`
			Level    int    `json:"cache_level"`
			Priority int    `json:"priority"`
			Tokens   []struct {
				Type  string     `json:"type"`
				ID    core.Token `json:"token_id"`
				Extra int        `json:"token_extra_id"`
			} `json:"tokens"`
		} `json:"blocks"`
	} `json:"data"`
}

func drainEvents(t *testing.T, e *Engine) []trtEventJSON {
	t.Helper()
	a := post(t, e.URL()+"/kv_cache_events", "")
	var list []trtEventJSON
	if err := json.Unmarshal(a.body, &list); err != nil || a.status != http.StatusOK || list == nil {
		t.Fatalf("kv_cache_events %d %s: %v", a.status, a.body, err)
	}
	return list
}

// TestTRTLLMEvents checks the events of creation, of storage with the tokens of
// each block, the last of which is not full, and of removal. Events that were
// read do not appear again.
func TestTRTLLMEvents(t *testing.T) {
	e := startEngine(t, Config{Connector: ConnectorTRTLLM, KVBlocks: 8, BlockSize: 4})
	first := drainEvents(t, e)
	if len(first) != 1 || first[0].ID != 0 || first[0].Window != 32 || first[0].Data.Type != "created" ||
		!slices.Equal(first[0].Data.Levels, []int{8, 0}) || first[0].Rank != nil {
		t.Fatalf("created %+v", first)
	}
	prompt := words(1, 9)
	want := ids(t, post(t, e.URL()+"/_internal/tokenize", completion(prompt, "")).field(t, "tokens"))
	ask := func(prompt, extra string) answer {
		t.Helper()
		return post(t, e.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":2,"ignore_eos":true`+extra))
	}
	ask(prompt, "").text(t)
	// 9 tokens of the prompt and the first of the answer: blocks of 4, 4 and 2.
	var tokens []core.Token
	var hashes []uint64
	for i, event := range drainEvents(t, e) {
		if event.ID != int64(i)+1 || event.Algo != "v1_block_key" || event.Data.Type != "stored" {
			t.Fatalf("event %d %+v", i, event)
		}
		if parent := event.Data.Parent; (parent == nil) != (len(hashes) == 0) || parent != nil && *parent != hashes[len(hashes)-1] {
			t.Errorf("event %d: parent %v after %d", i, parent, hashes)
		}
		for _, b := range event.Data.Blocks {
			hashes = append(hashes, b.Hash)
			for _, u := range b.Tokens {
				if u.Type != "unique_token" || u.Extra != 0 {
					t.Errorf("token %+v", u)
				}
				tokens = append(tokens, u.ID)
			}
			if b.Type != "stored_block" || b.Level != 0 || b.Priority != 35 {
				t.Errorf("block %+v", b)
			}
		}
	}
	if len(hashes) != 3 || len(tokens) != 10 || !slices.Equal(tokens[:9], want) {
		t.Fatalf("%d blocks of %d tokens: got %d, want %d…", len(hashes), len(tokens), tokens, want)
	}
	if again := drainEvents(t, e); len(again) != 0 {
		t.Errorf("events were returned twice: %+v", again)
	}
	if a := ask(prompt, ""); a.field(t, "usage", "prompt_tokens_details", "cached_tokens") != json.Number("8") {
		t.Errorf("usage %s", a.body)
	}
	if list := drainEvents(t, e); len(list) != 0 {
		t.Errorf("events of a hit: %+v", list)
	}
	ask(words(2, 30), "").text(t)
	list := drainEvents(t, e)
	if gone := list[0].Data; gone.Type != "removed" || !slices.Contains(gone.Hashes, hashes[0]) || !slices.Contains(gone.Hashes, hashes[2]) {
		t.Errorf("removed %+v", list)
	}
}

// TestTRTLLMEventRanks: each rank has its own numbers. An engine with one rank
// names none. A context's tail is stored when it is pinned.
func TestTRTLLMEventRanks(t *testing.T) {
	e := startEngine(t, Config{Connector: ConnectorTRTLLM, Ranks: 2, BlockSize: 4})
	for range 4 {
		a := post(t, e.URL()+core.RouteCompletions, completion(words(1, 6), `"max_tokens":1`))
		a.text(t)
	}
	next, stored := map[int]int64{}, map[int]int{}
	for _, event := range drainEvents(t, e) {
		if event.Rank == nil || event.ID != next[*event.Rank] {
			t.Fatalf("event %+v", event)
		}
		next[*event.Rank]++
		stored[*event.Rank] += len(event.Data.Blocks)
	}
	if len(next) != 2 || stored[0] != 2 || stored[1] != 2 {
		t.Errorf("numbers %v, blocks %v", next, stored)
	}
	ctx, gen := trtPair(t, TRTLLMConfig{})
	post(t, ctx.URL()+core.RouteCompletions, completion(words(1, 20), `"max_tokens":1,"disaggregated_params":{"request_type":"context_only"}`)).text(t)
	var sizes []int
	for _, event := range drainEvents(t, ctx) {
		for _, b := range event.Data.Blocks {
			sizes = append(sizes, len(b.Tokens))
		}
	}
	if !slices.Equal(sizes, []int{16, 4}) {
		t.Errorf("a context's blocks have %d tokens", sizes)
	}
	if list := drainEvents(t, gen); len(list) != 1 {
		t.Errorf("events of an idle worker: %+v", list)
	}
	ctx.Ranks[0].UnpinAll()
}

// TestTRTLLMEventFaults: lost events leave a gap in the numbers, and a garbled
// answer loses its events.
func TestTRTLLMEventFaults(t *testing.T) {
	for _, tt := range []struct {
		kind string
		want []int64
	}{
		{core.KVEventsDrop, []int64{0, 1, 3}}, {core.KVEventsLose, []int64{0, 1, 3}}, {core.KVEventsReorder, []int64{0, 1, 3, 2}},
		{KVEventsStop, []int64{0, 1, 2, 3}}, {core.KVEventsGarbage, nil},
	} {
		t.Run(tt.kind, func(t *testing.T) {
			e := startEngine(t, Config{Connector: ConnectorTRTLLM, BlockSize: 4})
			for i := range 3 {
				batches := 0
				if i == 1 {
					batches = 1
				}
				if err := e.SetKVEventFault(tt.kind, batches); err != nil {
					t.Fatal(err)
				}
				// 8 prompt tokens: two whole blocks in one event, and no tail.
				post(t, e.URL()+core.RouteCompletions, completion(words(i, 8), `"max_tokens":1`)).text(t)
			}
			switch tt.kind {
			case KVEventsStop:
				e.SetKVEventFault(tt.kind, 1)
				if list := drainEvents(t, e); len(list) != 0 {
					t.Errorf("stopped: %+v", list)
				}
				e.SetKVEventFault("", 0)
			case core.KVEventsGarbage:
				e.SetKVEventFault(tt.kind, 1)
				if a := post(t, e.URL()+"/kv_cache_events", ""); a.status != http.StatusOK || json.Valid(a.body) {
					t.Errorf("garbage: %d %s", a.status, a.body)
				}
			}
			var numbers []int64
			for _, event := range drainEvents(t, e) {
				numbers = append(numbers, event.ID)
			}
			if !slices.Equal(numbers, tt.want) {
				t.Errorf("numbers %d, want %d", numbers, tt.want)
			}
		})
	}
}

// TestTRTLLMEventQueue: without a reader the oldest events are dropped, by
// number and by tokens. Workers before hash_algo omit that field.
func TestTRTLLMEventQueue(t *testing.T) {
	e := startEngine(t, Config{Connector: ConnectorTRTLLM, TRTLLM: TRTLLMConfig{Wire: TRTLLMWireG1}})
	q := e.Proto.(*trtllm.TRTLLM).Events
	for range trtllm.TRTEventBuffer {
		q.Publish(0, []core.KVEvent{{Kind: core.KVRemoved, Names: []core.BlockName{{1}}}})
	}
	if list := drainEvents(t, e); len(list) != trtllm.TRTEventBuffer || list[0].ID != 1 || list[0].Algo != "" {
		t.Errorf("%d events from %+v", len(list), list[0])
	}
	big := core.KVEvent{Kind: core.KVStored, Names: []core.BlockName{{2}}, Root: true, Tokens: make([]core.Token, trtllm.TRTEventTokens/2+1), Size: trtllm.TRTEventTokens/2 + 1}
	q.Publish(0, []core.KVEvent{big, big})
	if len(q.Queue) != 1 || q.Tokens != big.Size {
		t.Errorf("%d events of %d tokens", len(q.Queue), q.Tokens)
	}
	q.Mu.Lock()
	q.Queue, q.Tokens = nil, 0
	q.Mu.Unlock()
	if a := post(t, e.URL()+"/_internal/tokenize", `{"prompt":"x"}`); a.status != http.StatusNotFound {
		t.Errorf("an old worker tokenizes: %s", fmt.Sprint(a.status))
	}
}
