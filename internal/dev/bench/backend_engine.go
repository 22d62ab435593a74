package main

import (
	"bytes"
	"container/list"
	"encoding/json"
	"fmt"
	"hash/maphash"
	"sync"
)

const (
	hitsPath     = "/bench/hits"
	requestsPath = "/bench/requests"
	// bootstrapTarget asks SGLang's bootstrap server for the topology of its prefill
	// engine.
	bootstrapTarget = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
	// promptBlock is the bytes of a prompt that a block of the prefix cache holds.
	promptBlock = 512
)

// engine is one address of a backend.
type engine struct {
	backend *backend
	prefill bool
	info    []byte // answer to /server_info

	topology []byte // answer to bootstrapTarget

	mu    sync.Mutex
	cache prefixCache // guarded by mu
	sums  hitCounts   // guarded by mu
}

// hitCounts are the blocks of all prompts that an engine has computed or found.
type hitCounts struct {
	Requests int64 `json:"requests"`
	Blocks   int64 `json:"blocks"`
	Hits     int64 `json:"hits"`
}

// newEngine returns an engine. boot is the bootstrap port that a prefill engine
// of SGLang reports (srt/entrypoints/http_server.py server_info).
func newEngine(b *backend, mode string, boot int) *engine {
	const length = 1 << 20
	info := fmt.Sprintf(`{"model_path":%q,"served_model_name":%q,"tp_size":1,"pp_size":1,"dp_size":1,"enable_dp_attention":false,`+
		`"page_size":16,"kv_cache_dtype":"auto","load_balance_method":"round_robin","disaggregation_mode":%q,"disaggregation_bootstrap_port":%d,`+
		`"disaggregation_transfer_backend":"mooncake","max_total_num_tokens":%d,"max_req_input_len":%d,"version":"0.5.23",`+
		`"internal_states":[{"max_total_num_tokens":%d,"page_size":16,"kv_cache_dtype":"auto"}]}`, benchModel, benchModel, mode, boot, length, length-6, length)
	// The fields of the topology are those of srt/disaggregation/common/conn.py PrefillServerInfo.
	topology := `{"attn_tp_size":1,"attn_cp_size":1,"dp_size":1,"pp_size":1,"page_size":16,"kv_cache_dtype":"auto","follow_bootstrap_room":false}`
	return &engine{backend: b, prefill: mode == "prefill", info: jsonAnswer(info), topology: jsonAnswer(topology), cache: prefixCache{room: b.cacheBlocks}}
}

// other answers the routes that generate nothing; nil if target is none. A
// router that asks for token ids gets one for four bytes.
func (e *engine) other(target string, body []byte) []byte {
	const tail = "/render"
	render := len(target) > len(tail) && target[len(target)-len(tail):] == tail
	if !render && target != "/tokenize" && target != "/v1/tokenize" {
		return nil
	}
	if e.backend.noTokens {
		return []byte(notFound)
	}
	ids := make([]byte, 0, len(body))
	prompt := promptOf(body)
	for i := 0; i+4 <= len(prompt); i += 4 {
		id := uint32(prompt[i]) | uint32(prompt[i+1])<<8 | uint32(prompt[i+2])<<16
		if i > 0 {
			ids = append(ids, ',')
		}
		ids = fmt.Append(ids, id%100_000)
	}
	switch {
	case render && target == requestPath+tail:
		return jsonAnswer(fmt.Sprintf(`[{"request_id":"r","token_ids":[%s],"model":%q,"stream":false}]`, ids, benchModel))
	case render:
		return jsonAnswer(fmt.Sprintf(`{"request_id":"r","token_ids":[%s],"model":%q,"stream":false}`, ids, benchModel))
	}
	return jsonAnswer(fmt.Sprintf(`{"count":%d,"max_model_len":1048576,"tokens":[%s],"token_strs":null}`, len(prompt)/4, ids))
}

// promptOf returns the prompt, or the content of the first message. The prompts of this program
// contain neither quotes nor escapes.
func promptOf(body []byte) []byte {
	for _, key := range []string{`"prompt"`, `"content"`} {
		if v := afterKey(body, key); len(v) > 0 {
			v = bytes.TrimLeft(v, `["`)
			end := bytes.IndexByte(v, '"')
			return v[:max(0, end)]
		}
	}
	return nil
}

// look finds and adds the prompt's blocks in the cache.
func (e *engine) look(body []byte) {
	if e.cache.room == 0 {
		return
	}
	prompt := promptOf(body)
	e.mu.Lock()
	defer e.mu.Unlock()
	blocks, hits := e.cache.add(prompt)
	e.sums.Requests++
	e.sums.Blocks += int64(blocks)
	e.sums.Hits += int64(hits)
}

func (e *engine) hits() []byte {
	e.mu.Lock()
	defer e.mu.Unlock()
	text, _ := json.Marshal(e.sums)
	return jsonAnswer(string(text))
}

// prefixCache has blocks of prompts. A block stands for itself and all before
// it, as in the engines; the least recently used leaves first.
type prefixCache struct {
	room   int
	seed   maphash.Seed
	blocks map[uint64]*list.Element
	recent *list.List // of uint64, the latest in front
}

func (c *prefixCache) add(prompt []byte) (blocks, hits int) {
	if c.blocks == nil {
		c.seed, c.blocks, c.recent = maphash.MakeSeed(), map[uint64]*list.Element{}, list.New()
	}
	var h maphash.Hash
	h.SetSeed(c.seed)
	leading := true
	var at []*list.Element
	for ; len(prompt) >= promptBlock; prompt = prompt[promptBlock:] {
		blocks++
		h.Write(prompt[:promptBlock])
		key := h.Sum64()
		el, ok := c.blocks[key]
		if leading = leading && ok; leading {
			hits++
		}
		if !ok {
			el = c.recent.PushFront(key)
			c.blocks[key] = el
		}
		at = append(at, el)
	}
	for i := len(at) - 1; i >= 0; i-- { // the end of a prompt leaves before its begin
		c.recent.MoveToFront(at[i])
	}
	for c.recent.Len() > c.room {
		delete(c.blocks, c.recent.Remove(c.recent.Back()).(uint64))
	}
	return blocks, hits
}

// recorder keeps the requests that engines got. A nil recorder keeps nothing.
type recorder struct {
	mu   sync.Mutex
	list []recorded
}

type recorded struct {
	Prefill bool   `json:"prefill"`
	Body    string `json:"body"`
}

func (r *recorder) add(e *engine, body []byte) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = append(r.list, recorded{e.prefill, string(body)})
}

// take returns the requests since the last call.
func (r *recorder) take() []byte {
	if r == nil {
		return jsonAnswer("[]")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	text, _ := json.Marshal(append([]recorded{}, r.list...))
	r.list = nil
	return jsonAnswer(string(text))
}
