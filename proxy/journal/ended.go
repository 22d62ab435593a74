package journal

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// Limits of the lists of Recent.
const (
	maxLatest   = 12
	maxTroubled = 40
	maxAlike    = 5 // of Troubled that have the same trouble
)

// Recent holds the requests that ended since a position in a Ring.
type Recent struct {
	// Next is the position after the last record.
	Next uint64 `json:"next"`
	// Latest are the last requests, and Troubled the last requests that failed, that had a
	// failed leg or that deviated from the configuration. The newest comes first. Only the
	// first few rows of Troubled have the same trouble, so that a flood hides nothing else.
	Latest   []EndedRow `json:"latest"`
	Troubled []EndedRow `json:"troubled"`
	// Prompts are the prompts by the engine that computed them. Requests whose engine
	// reported no tokens are left out.
	Prompts map[string]PromptTokens `json:"prompts"`
}

// PromptTokens is a number of prompt tokens, and how many of them an engine had in its
// prefix cache, as the engine reported.
type PromptTokens struct {
	Tokens int64 `json:"tokens"`
	Cached int64 `json:"cached"`
}

// EndedRow is one request that has ended.
type EndedRow struct {
	RequestID    string  `json:"request_id"`
	End          float64 `json:"end"` // seconds since the Unix epoch
	Model        string  `json:"model"`
	Flow         string  `json:"flow"`
	Outcome      string  `json:"outcome"`
	Status       int     `json:"status"`
	DurationMS   float64 `json:"duration_ms"`
	Prefill      string  `json:"prefill"` // engine of the last placement; "" for none
	Decode       string  `json:"decode"`
	PromptTokens int64   `json:"prompt_tokens"`
	CachedTokens int64   `json:"cached_tokens"`
	OutputTokens int64   `json:"output_tokens"`
	// FirstByteMS is when the client got the first byte of its answer; nil: it got none.
	FirstByteMS *float64            `json:"first_byte_ms"`
	FailedLegs  []FailedLeg         `json:"failed_legs,omitempty"`
	Fallbacks   []ExplainedFallback `json:"fallbacks,omitempty"`
	// Continuations are the places at which the stream broke off.
	Continuations []ExplainedContinuation `json:"continuations,omitempty"`
}

// FailedLeg is a leg that an engine failed.
type FailedLeg struct {
	Phase  string `json:"phase"`
	Engine string `json:"engine"`
	Reason string `json:"reason"`
}

// Troubles counts rows with the same trouble. Its zero value is not usable.
type Troubles map[string]int

// Few counts a row and reports whether it is one of the first few with its trouble.
func (t Troubles) Few(e *EndedRow) bool {
	kind := fmt.Sprint(e.Outcome, e.FailedLegs, e.Fallbacks)
	t[kind]++
	return t[kind] <= maxAlike
}

// NoRecent returns a Recent without requests. JSON shows its lists as empty lists, not as null.
func NoRecent() Recent {
	return Recent{Prompts: make(map[string]PromptTokens), Latest: []EndedRow{}, Troubled: []EndedRow{}}
}

// Recent returns the requests that ended after the position that an earlier call returned as Next;
// 0 for all. A position that the ring has not reached counts as 0.
func (s *Ring) Recent(after uint64) Recent {
	s.mu.Lock()
	defer s.mu.Unlock()
	if after > s.puts {
		after = 0
	}
	if s.puts > RingSize {
		after = max(after, s.puts-RingSize)
	}
	list := NoRecent()
	list.Next = s.puts
	kinds := make(Troubles)
	for n := s.puts; n > after; n-- {
		r := s.at(n - 1)
		if len(list.Latest) < maxLatest {
			list.Latest = append(list.Latest, r.endedRow())
		}
		if len(list.Troubled) < maxTroubled && r.troubled() {
			if row := r.endedRow(); kinds.Few(&row) {
				list.Troubled = append(list.Troubled, row)
			}
		}
		if engine := r.computer(); engine != "" && r.Usage.Prompt > 0 {
			sum := list.Prompts[engine]
			sum.Tokens += r.Usage.Prompt
			sum.Cached += max(r.Usage.Cached, 0)
			list.Prompts[engine] = sum
		}
	}
	return list
}

// During holds the requests of a period, the newest first.
type During struct {
	// Troubled are those that Recent.Troubled could list. Each list has at most MaxDuring rows.
	Troubled []EndedRow `json:"troubled"`
	Others   []EndedRow `json:"others"`
	Total    int        `json:"total"` // requests of the period, also those that the lists leave out
	// Since is the time from which all requests are still held, in seconds since the Unix epoch.
	Since float64 `json:"since"`
}

// MaxDuring is the largest number of rows of a list of During.
const MaxDuring = 100

// During returns the requests that ran at some time of a period. Since is 0 if the ring has lost no
// request.
func (s *Ring) During(from, to time.Time) During {
	s.mu.Lock()
	defer s.mu.Unlock()
	list, oldest := During{Troubled: []EndedRow{}, Others: []EndedRow{}}, uint64(0) // no null in JSON
	if s.puts > RingSize {
		oldest = s.puts - RingSize
		list.Since = unix(s.at(oldest).ended)
	}
	for n := s.puts; n > oldest; n-- {
		r := s.at(n - 1)
		if r.ended.Before(from) || r.Start.After(to) {
			continue
		}
		list.Total++
		rows := &list.Others
		if r.troubled() {
			rows = &list.Troubled
		}
		if len(*rows) < MaxDuring {
			*rows = append(*rows, r.endedRow())
		}
	}
	return list
}

// computer returns the name of the engine that computed the prompt, "" for none.
func (r *Record) computer() string {
	if r.prefill != "" {
		return r.prefill
	}
	return r.decode
}

// troubled reports whether the request or one of its legs failed, or the proxy deviated from
// the configuration. A client that leaves is no trouble.
func (r *Record) troubled() bool {
	switch r.Outcome {
	case telemetry.OutcomeNone, telemetry.OutcomeOK, telemetry.OutcomeClientError, telemetry.OutcomeCancelled:
		return len(r.fallbacks) > 0 || slices.ContainsFunc(r.rows, func(l *Leg) bool { return l.failed })
	}
	return true
}

func (r *Record) endedRow() EndedRow {
	e := EndedRow{
		RequestID: r.RequestID, End: unix(r.ended), Model: r.Model, Flow: r.Flow.String(), Outcome: r.Outcome.String(), Status: r.Status,
		DurationMS: millis(r.ended.Sub(r.Start)), Prefill: r.prefill, Decode: r.decode,
		PromptTokens: max(r.Usage.Prompt, 0), CachedTokens: max(r.Usage.Cached, 0), OutputTokens: max(r.Usage.Completion, 0),
		FirstByteMS: since(r.Start, r.FirstByte), Continuations: r.explainSeams(),
	}
	for _, l := range r.rows {
		if l.failed {
			e.FailedLegs = append(e.FailedLegs, FailedLeg{Phase: l.Phase.String(), Engine: l.engine, Reason: l.reason})
		}
	}
	for _, f := range r.fallbacks {
		e.Fallbacks = append(e.Fallbacks, ExplainedFallback{What: f.What, Reason: f.Reason})
	}
	return e
}

// PerfRow is one exchange in GET /perf_metrics; times are seconds since the Unix epoch;
// 0: the event did not happen. Members with the same meaning have the names of
// TensorRT-LLM's own rows (tensorrt_llm/serve/perf_metrics.py).
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

func (r *Record) perfRow() PerfRow {
	p := PerfRow{
		RequestID: r.RequestID, CtxRequestID: strconv.FormatUint(r.DisaggID, 10), CtxServer: r.prefill, GenServer: r.decode,
		Arrival: unix(r.Start), FirstToken: unix(r.FirstByte), End: unix(r.ended), Outcome: r.Outcome.String(),
		PromptTokens: max(r.Usage.Prompt, 0), OutputTokens: max(r.Usage.Completion, 0), CachedTokens: max(r.Usage.Cached, 0),
	}
	for _, l := range r.rows { // the last leg of each phase counts
		if l.Phase == abi.Prefill {
			p.CtxDispatch, p.CtxDone, p.CtxTiming = unix(l.Start), unix(l.ended), r.explainTiming(l)
		} else {
			p.GenDispatch, p.GenTiming = unix(l.Start), r.explainTiming(l)
		}
	}
	return p
}
