package proxy

import (
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// explainSize is how many ended exchanges can be explained and are seen in
// /perf_metrics.
const explainSize = 4096

// explainStore keeps the records of the last exchanges in a ring whose memory
// is reused. Safe for concurrent use.
type explainStore struct {
	mu   sync.Mutex
	ring [explainSize]record // guarded by mu
	next int                 // guarded by mu
}

// put copies the record of an ended exchange.
func (s *explainStore) put(r *record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ring[s.next].copyFrom(r)
	s.next = (s.next + 1) % explainSize
}

// copyFrom takes r's content into memory of its own.
func (r *record) copyFrom(o *record) {
	rows, candidates, fallbacks := r.rows, r.candidates[:0], r.fallbacks[:0]
	*r = record{
		RequestID: o.RequestID, DisaggID: o.DisaggID, Model: o.Model, Stream: o.Stream, Flow: o.Flow,
		Policy: o.Policy, Start: o.Start, Placing: o.Placing, Placed: o.Placed, FirstByte: o.FirstByte,
		End: o.End, Status: o.Status, Outcome: o.Outcome, Usage: o.Usage, coordination: o.coordination, turn: o.turn, prefill: o.prefill, decode: o.decode,
		candidates: append(candidates, o.candidates...), rows: rows, legs: o.legs,
		fallbacks: append(fallbacks, o.fallbacks...), scored: o.scored, notes: o.notes,
	}
	for len(r.rows) < o.legs {
		r.rows = append(r.rows, new(legRow))
	}
	for i, row := range o.rows[:o.legs] {
		*r.rows[i] = *row
		r.rows[i].keepTiming()
		r.rows[i].target.Instance, r.rows[i].a = nil, nil // an ended exchange keeps no engine alive
	}
}

// Explanation is why a request went where it went: the answer of
// GET /v1/explain/{request_id}. Times are milliseconds since the request came.
type Explanation struct {
	RequestID string `json:"request_id"`
	DisaggID  uint64 `json:"disagg_id"`
	// Arrival is when the request came, in seconds since the Unix epoch.
	Arrival float64 `json:"arrival"`
	Model   string  `json:"model"`
	Flow    string  `json:"flow"`
	Policy  string  `json:"policy"`
	// Coordination is the sidecar's policy that placed the request.
	Coordination string               `json:"coordination,omitempty"`
	Outcome      string               `json:"outcome"`
	Status       int                  `json:"status"`
	DurationMS   float64              `json:"duration_ms"`
	Candidates   []ExplainedCandidate `json:"candidates"`
	Legs         []ExplainedLeg       `json:"legs"`
	Fallbacks    []ExplainedFallback  `json:"fallbacks"`
	Notes        []string             `json:"notes,omitempty"` // what policies and filters left
	// Key and turn of the conversation, where a policy needs conversations.
	Conversation string `json:"conversation,omitempty"`
	Turn         int32  `json:"turn,omitempty"`
}

// ExplainedCandidate is one target that the policy could choose. Score is null
// where the policy gave none.
type ExplainedCandidate struct {
	Engine string         `json:"engine"`
	Rank   int            `json:"rank"`
	Score  *float64       `json:"score"`
	Facts  map[string]any `json:"facts"`
}

// ExplainedLeg is one leg, in the order of their starts. A time that never came
// is null.
type ExplainedLeg struct {
	ID          string   `json:"id"`
	Phase       string   `json:"phase"`
	Engine      string   `json:"engine"`
	Rank        int      `json:"rank"`
	Attempt     int      `json:"attempt"`
	StartMS     float64  `json:"start_ms"`
	FirstByteMS *float64 `json:"first_byte_ms"`
	EndMS       *float64 `json:"end_ms"`
	Status      int      `json:"status"`
	Error       string   `json:"error"`

	Timing *ExplainedTiming `json:"engine_timing,omitempty"`
}

// ExplainedFallback is one counted deviation from what was configured.
type ExplainedFallback struct {
	What   string `json:"what"`
	Reason string `json:"reason"`
}

// get explains the exchange of that request id, the last one if it was used more
// than once. It looks at all of them: an index would cost every exchange more
// than the few that are asked for.
func (s *explainStore) get(id string) (Explanation, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.ring {
		if r := &s.ring[(s.next+explainSize-1-i)%explainSize]; r.RequestID == id && id != "" {
			return r.explain(), true
		}
	}
	return Explanation{}, false
}

func (r *record) explain() Explanation {
	e := Explanation{
		RequestID: r.RequestID, DisaggID: r.DisaggID, Arrival: unix(r.Start), Model: r.Model, Flow: r.Flow.String(),
		Policy: r.Policy, Coordination: r.coordination, Outcome: r.Outcome.String(), Status: r.Status, DurationMS: millis(r.End.Sub(r.Start)),
		Candidates: make([]ExplainedCandidate, 0, len(r.candidates)),
		Legs:       make([]ExplainedLeg, 0, r.legs),
		Fallbacks:  make([]ExplainedFallback, 0, len(r.fallbacks)),
		Notes:      r.notes,

		Conversation: string(r.turn.Key.AppendText(nil)), Turn: r.turn.Number,
	}
	for _, c := range r.candidates {
		e.Candidates = append(e.Candidates, ExplainedCandidate{Engine: c.engine, Rank: c.rank, Score: r.score(c), Facts: map[string]any{
			"role": c.facts.Roles.String(), "requests": c.facts.Requests, "tokens": c.facts.Tokens, "trial": c.facts.Trial,
			"group": c.facts.Group, "pair": c.facts.Pair.String(), "home": c.facts.Home.String(), "queued": c.facts.Queued,
			"blocks_gpu": c.facts.BlocksGPU, "blocks_cpu": c.facts.BlocksCPU, "blocks_disk": c.facts.BlocksDisk,
			"block_tokens": c.facts.BlockTokens, "usage": c.facts.Usage, "token_us": c.facts.TokenMicros,
			"recent_tokens": c.facts.RecentTokens, "recent_requests": c.facts.RecentRequests, "busy": c.facts.Busy,
		}})
	}
	for _, l := range r.rows[:r.legs] {
		first := l.FirstByte
		if first.IsZero() {
			first = l.Head // a leg whose answer is held whole has no events
		}
		e.Legs = append(e.Legs, ExplainedLeg{
			ID: l.ID, Phase: l.Phase.String(), Engine: l.Engine, Rank: l.Rank, Attempt: l.Attempt,
			StartMS: millis(l.Start.Sub(r.Start)), FirstByteMS: since(r.Start, first), EndMS: since(r.Start, l.End),
			Status: l.Status, Error: l.Error, Timing: r.explainTiming(l),
		})
	}
	slices.SortStableFunc(e.Legs, func(a, b ExplainedLeg) int {
		switch {
		case a.StartMS < b.StartMS:
			return -1
		case a.StartMS > b.StartMS:
			return 1
		}
		return 0
	})
	for _, f := range r.fallbacks {
		e.Fallbacks = append(e.Fallbacks, ExplainedFallback{What: f.What, Reason: f.Reason})
	}
	return e
}

// score is what the policy gave c; nil: nothing, or no number that JSON has.
func (r *record) score(c candidate) *float64 {
	score := float64(c.facts.Score)
	if !r.scored || math.IsNaN(score) || math.IsInf(score, 0) {
		return nil
	}
	return &score
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func since(start, t time.Time) *float64 {
	if t.IsZero() {
		return nil
	}
	ms := millis(t.Sub(start))
	return &ms
}

// PerfRow is one exchange in GET /perf_metrics; times are seconds since the
// Unix epoch, 0 where there was none. The names of TensorRT-LLM's own rows are
// kept where they mean the same (tensorrt_llm/serve/perf_metrics.py).
type PerfRow struct {
	RequestID    string  `json:"request_id"`
	CtxRequestID string  `json:"ctx_request_id"`
	CtxServer    string  `json:"ctx_server"`
	GenServer    string  `json:"gen_server"`
	Arrival      float64 `json:"disagg_server_arrival_time"`
	CtxDispatch  float64 `json:"ctx_dispatch_time"`
	CtxDone      float64 `json:"ctx_done_time"`
	GenDispatch  float64 `json:"gen_dispatch_time"`
	FirstToken   float64 `json:"disagg_server_first_token_time"`
	End          float64 `json:"disagg_server_end_time"`
	Outcome      string  `json:"outcome"`
	PromptTokens int64   `json:"prompt_tokens"`
	OutputTokens int64   `json:"output_tokens"`
	CachedTokens int64   `json:"cached_tokens"`

	CtxTiming *ExplainedTiming `json:"ctx_timing,omitempty"`
	GenTiming *ExplainedTiming `json:"gen_timing,omitempty"`
}

// perfRows returns the ended exchanges, oldest first.
func (s *explainStore) perfRows() []PerfRow {
	s.mu.Lock()
	defer s.mu.Unlock()
	rows := []PerfRow{}
	for i := range s.ring {
		if r := &s.ring[(s.next+i)%explainSize]; r.RequestID != "" {
			rows = append(rows, r.perfRow())
		}
	}
	return rows
}

func (r *record) perfRow() PerfRow {
	p := PerfRow{
		RequestID: r.RequestID, CtxRequestID: strconv.FormatUint(r.DisaggID, 10), CtxServer: r.prefill, GenServer: r.decode,
		Arrival: unix(r.Start), FirstToken: unix(r.FirstByte), End: unix(r.End), Outcome: r.Outcome.String(),
		PromptTokens: max(r.Usage.Prompt, 0), OutputTokens: max(r.Usage.Completion, 0), CachedTokens: max(r.Usage.Cached, 0),
	}
	for _, l := range r.rows[:r.legs] { // the last leg of each phase counts
		if l.Phase == abi.Prefill {
			p.CtxDispatch, p.CtxDone, p.CtxTiming = unix(l.Start), unix(l.End), r.explainTiming(l)
		} else {
			p.GenDispatch, p.GenTiming = unix(l.Start), r.explainTiming(l)
		}
	}
	return p
}

func unix(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMicro()) / 1e6
}
