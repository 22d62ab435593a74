package trial

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
)

// Frame is one recorded call of a hook, or one request for a filter. Exactly
// one of the facts is set.
type Frame struct {
	frameHead
	hook   abi.Hook
	plan   *abi.PlanFacts
	place  *abi.PlaceFacts
	mint   *abi.MintFacts
	leg    *abi.LegFacts
	finish *abi.FinishFacts
	retain *abi.RetainFacts
	score  *scoreLeg // with place
	evict  *abi.EvictFacts
	http   *httpFrame // of a filter, hook is none
	names  []string   // of the rows of a place or score frame, "engine/rank"
}

// frameHead holds the fields that every frame may have.
type frameHead struct {
	Name     string          `json:"name"`
	Hook     string          `json:"hook"`
	Policy   string          `json:"policy"` // within the module; "": the hook's only one
	Sequence uint64          `json:"sequence"`
	Random   uint64          `json:"random"`
	UnixMS   int64           `json:"unix_ms"`
	Seed     uint32          `json:"seed"`
	Expect   json.RawMessage `json:"expect"`
}

func (h *frameHead) header() abi.Header {
	return abi.Header{Sequence: h.Sequence, Random: h.Random, UnixMilli: h.UnixMS, Seed: h.Seed}
}

type requestJSON struct {
	PromptTokens int64  `json:"prompt_tokens"`
	MaxTokens    int64  `json:"max_tokens"`
	N            int64  `json:"n"`
	Stream       bool   `json:"stream"`
	PairBroken   bool   `json:"pair_broken"`
	Shared       uint32 `json:"shared"`
	Model        string `json:"model"`
	Conversation string `json:"conversation"`
	Prompt       string `json:"prompt"`
	Turn         int32  `json:"turn"`
	abi.Identity        // client, tenant and class
	abi.Traits          // salt, remaining, adapter, tools, images and audio

	Headers map[string]string `json:"headers"` // absent names: the request lacks the header
}

// plainRequest returns a request without optional fields.
func plainRequest() requestJSON { return requestJSON{MaxTokens: -1, N: 1} }

func (r *requestJSON) facts() abi.RequestFacts {
	f := abi.RequestFacts{
		PromptTokens: r.PromptTokens, MaxTokens: r.MaxTokens, N: r.N, Stream: r.Stream, PairBroken: r.PairBroken, Shared: r.Shared,
		Model: r.Model, Conversation: r.Conversation, Prompt: r.Prompt, Turn: r.Turn, Identity: r.Identity, Traits: r.Traits,
	}
	for _, name := range slices.Sorted(maps.Keys(r.Headers)) {
		value := r.Headers[name]
		h := abi.RequestHeader{Name: strings.ToLower(name), Present: true, Cut: len(value) > abi.MaxHeaderValue}
		h.Value = value[:min(len(value), abi.MaxHeaderValue)]
		f.Headers = append(f.Headers, h)
	}
	return f
}

// request returns the facts of the request; nil: mint, retain and evict frames have none.
func (f *Frame) request() *abi.RequestFacts {
	switch {
	case f.plan != nil:
		return &f.plan.Request
	case f.place != nil:
		return &f.place.Request
	case f.leg != nil:
		return &f.leg.Request
	case f.finish != nil:
		return &f.finish.Request
	}
	return nil
}

// undeclared returns an error if the frame has a header that the policy would not get.
func (f *Frame) undeclared(names []string) error {
	r := f.request()
	if r == nil {
		return nil
	}
	for _, h := range r.Headers {
		if !slices.Contains(names, h.Name) {
			return fmt.Errorf("request.headers: the policy does not get %q; it gets the headers that the module declares, if it needs headers: %s", h.Name, strings.Join(names, ", "))
		}
	}
	return nil
}

type planJSON struct {
	frameHead
	Request        requestJSON `json:"request"`
	PrefillTargets int32       `json:"prefill_targets"`
	DecodeTargets  int32       `json:"decode_targets"`
	BothTargets    int32       `json:"both_targets"`

	PrefillCached  int64   `json:"prefill_cached"`
	BothCached     int64   `json:"both_cached"`
	PrefillQueued  int64   `json:"prefill_queued"`
	BothQueued     int64   `json:"both_queued"`
	PrefillMicros  float32 `json:"prefill_us"`
	BothMicros     float32 `json:"both_us"`
	TransferMicros float32 `json:"transfer_us"`
	HandoverMicros float32 `json:"handover_us"`
}

type placeJSON struct {
	frameHead
	Request    requestJSON     `json:"request"`
	Flow       string          `json:"flow"`
	Fixed      int32           `json:"fixed"`
	Candidates []candidateJSON `json:"candidates"`
	Pairs      []pairJSON      `json:"pairs"`
}

// candidateJSON is a candidate as explain shows it. The score in it is that of
// the recorded decision, and is not read.
type candidateJSON struct {
	Engine   string        `json:"engine"`
	Instance uint32        `json:"instance"` // 0: by engine, in the order of their names' first rows
	Rank     int32         `json:"rank"`
	Score    *float64      `json:"score"`
	Facts    candidateFact `json:"facts"`
}

type candidateFact struct {
	Role       string `json:"role"`
	Group      uint32 `json:"group"`
	Requests   int32  `json:"requests"`
	Tokens     int64  `json:"tokens"`
	Queued     int64  `json:"queued"`
	Trial      bool   `json:"trial"`
	Home       string `json:"home"`
	Pair       string `json:"pair"`
	BlocksGPU  uint32 `json:"blocks_gpu"`
	BlocksCPU  uint32 `json:"blocks_cpu"`
	BlocksDisk uint32 `json:"blocks_disk"`

	BlockTokens uint32  `json:"block_tokens"`
	Usage       float32 `json:"usage"`
	TokenMicros float32 `json:"token_us"`

	RecentTokens   float32 `json:"recent_tokens"`
	RecentRequests float32 `json:"recent_requests"`
	Busy           float32 `json:"busy"`
	Adapter        string  `json:"adapter"`
	detailJSON
}

// detailJSON holds the facts of abi.Detail.
type detailJSON struct {
	Labels  map[string]string `json:"labels"`
	Weight  *float32          `json:"weight"`  // nil: 1
	Running *int32            `json:"running"` // nil: not known
	Waiting *int32            `json:"waiting"`
}

func (j *detailJSON) detail() (abi.Detail, error) {
	d := abi.Detail{Weight: 1, Running: -1, Waiting: -1}
	if j.Weight != nil {
		d.Weight = *j.Weight
	}
	if j.Running != nil {
		d.Running = *j.Running
	}
	if j.Waiting != nil {
		d.Waiting = *j.Waiting
	}
	return d, d.SetLabels(j.Labels)
}

type pairJSON struct {
	Prefill int32  `json:"prefill"`
	Decode  int32  `json:"decode"`
	State   string `json:"state"`

	TransferMicros float32 `json:"transfer_us"`
}

type mintJSON struct {
	frameHead
	Node    uint8  `json:"node"`
	Worker  uint8  `json:"worker"`
	Counter uint16 `json:"counter"`
}

type retainJSON struct {
	frameHead
	ToolCall     bool     `json:"tool_call"`
	Most         uint32   `json:"most_ms"`
	Tokens       int64    `json:"tokens"`
	Usage        float32  `json:"usage"`
	Conversation gapsJSON `json:"conversation"`
	Tools        gapsJSON `json:"tools"`
	All          gapsJSON `json:"all"`
}

type gapsJSON struct {
	Turns float32 `json:"turns"`
	Back  float32 `json:"back"`
	P50   float32 `json:"p50_ms"`
	P75   float32 `json:"p75_ms"`
	P90   float32 `json:"p90_ms"`
	P95   float32 `json:"p95_ms"`
	P99   float32 `json:"p99_ms"`
}

type evictJSON struct {
	frameHead
	Saturated    bool          `json:"saturated"`
	Priority     int32         `json:"priority"`
	Class        string        `json:"class"`
	Tenant       string        `json:"tenant"`
	PromptTokens int64         `json:"prompt_tokens"`
	Remaining    int64         `json:"remaining_ms"`
	Running      []runningJSON `json:"running"`
}

type runningJSON struct {
	Priority     int32  `json:"priority"`
	Class        string `json:"class"`
	Tenant       string `json:"tenant"`
	Phase        string `json:"phase"`
	Prefill      uint32 `json:"prefill"`
	Decode       uint32 `json:"decode"`
	Age          int64  `json:"age_us"`
	PromptTokens int64  `json:"prompt_tokens"`
	Sent         int64  `json:"sent"`
}

type legJSON struct {
	frameHead
	Request  requestJSON `json:"request"`
	Event    string      `json:"event"`
	Phase    string      `json:"phase"`
	Flow     string      `json:"flow"`
	Attempt  uint32      `json:"attempt"`
	Left     uint32      `json:"left"`
	Engine   string      `json:"engine"`
	Instance uint32      `json:"instance"`
	Rank     int32       `json:"rank"`
	Partner  uint32      `json:"partner"`
	PartRank int32       `json:"partner_rank"`
	DisaggID uint64      `json:"disagg_id"`
	Status   uint32      `json:"status"`
	Elapsed  int64       `json:"elapsed_us"`
	Reason   string      `json:"reason"`
}

type finishJSON struct {
	frameHead
	Request      requestJSON `json:"request"`
	Outcome      string      `json:"outcome"`
	Flow         string      `json:"flow"`
	Failed       string      `json:"failed"`
	Status       uint32      `json:"status"`
	Prefill      uint32      `json:"prefill"`
	PrefillRank  int32       `json:"prefill_rank"`
	Decode       uint32      `json:"decode"`
	DecodeRank   int32       `json:"decode_rank"`
	DisaggID     uint64      `json:"disagg_id"`
	Attempts     uint32      `json:"attempts"`
	Placed       int64       `json:"placed_us"`
	FirstByte    int64       `json:"first_byte_us"`
	Total        int64       `json:"total_us"`
	PromptTokens int64       `json:"prompt_tokens"`
	CachedTokens int64       `json:"cached_tokens"`
	OutputTokens int64       `json:"output_tokens"`
	Reason       string      `json:"reason"`
}
