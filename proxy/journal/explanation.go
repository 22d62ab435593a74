package journal

import (
	"math"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// Explanation holds the reasons for the placement of a request: the answer of GET
// /v1/explain/{request_id}. Times are milliseconds since the request arrived.
type Explanation struct {
	RequestID string `json:"request_id"`
	DisaggID  uint64 `json:"disagg_id"`
	// Arrival is when the request arrived, in seconds since the Unix epoch.
	Arrival float64 `json:"arrival"`
	Model   string  `json:"model"`
	// RequestedModel is the name in the request, if it is a name of [[model]].
	RequestedModel string `json:"requested_model,omitempty"`
	Flow           string `json:"flow"`
	Policy         string `json:"policy"`
	// Coordination is the sidecar's policy that placed the request.
	Coordination string `json:"coordination,omitempty"`
	// Picker is the choice of the ext_proc picker, if the proxy has one.
	Picker     *ExplainedPicker `json:"picker,omitempty"`
	Outcome    string           `json:"outcome"`
	Status     int              `json:"status"`
	DurationMS float64          `json:"duration_ms"`
	// ErrorCode is the code of the error that the proxy itself answered.
	ErrorCode string `json:"error_code,omitempty"`
	// ScoreBetter is the better score of the candidates, "low" or "high", and ScoreUnit the unit of the
	// scores, "s", "tokens", "requests", "blocks" or "share", as far as the policy states them.
	ScoreBetter string               `json:"score_better,omitempty"`
	ScoreUnit   string               `json:"score_unit,omitempty"`
	Candidates  []ExplainedCandidate `json:"candidates"`
	// Scores are the scores of each leg, if policy.place is "scores".
	Scores    []ExplainedScores   `json:"scores,omitempty"`
	Legs      []ExplainedLeg      `json:"legs"`
	Fallbacks []ExplainedFallback `json:"fallbacks"`
	Notes     []string            `json:"notes,omitempty"` // notes of policies and filters
	// Continuations are the places at which the stream broke off.
	Continuations []ExplainedContinuation `json:"continuations,omitempty"`
	// Key and turn of the conversation. They are set if a policy needs conversations.
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

// ExplainedLeg is one leg, in the order of their starts. A time of a step that did not happen is
// null. Error is the reason of a failure, a label of pdproxy_leg_errors_total, and Cause the text of
// the error, if there is more to say.
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
	Cause       string   `json:"cause,omitempty"`

	Timing *ExplainedTiming `json:"engine_timing,omitempty"`
}

// ExplainedPicker is the choice of an ext_proc picker. Result is that of
// pdproxy_picker_requests_total. The endpoints are those that the picker named.
type ExplainedPicker struct {
	Result       string   `json:"result"`
	DurationMS   float64  `json:"duration_ms"`
	Destinations []string `json:"destinations,omitempty"`
	Prefill      []string `json:"prefill,omitempty"`
	Encoders     []string `json:"encoders,omitempty"`
	BodyChanged  bool     `json:"body_changed,omitempty"`
}

// ExplainedContinuation is a place at which a stream broke off, behind Tokens of the answer. Result
// is that of pdproxy_continuations_total. If it is "continued", the stream went on at the two
// engines, after a gap that the client saw between two events.
type ExplainedContinuation struct {
	AtMS    float64  `json:"at_ms"`
	Tokens  int      `json:"tokens"`
	Result  string   `json:"result"`
	GapMS   *float64 `json:"gap_ms,omitempty"`
	Prefill string   `json:"prefill,omitempty"`
	Decode  string   `json:"decode,omitempty"`
}

// ExplainedFallback is one counted deviation from the configuration.
type ExplainedFallback struct {
	What   string `json:"what"`
	Reason string `json:"reason"`
}

func (r *Record) explain() Explanation {
	e := Explanation{
		RequestID: r.RequestID, DisaggID: r.DisaggID, Arrival: unix(r.Start), Model: r.Model, RequestedModel: r.Requested, Flow: r.Flow.String(),
		Policy: r.Policy, Coordination: r.coordination, Outcome: r.Outcome.String(), Status: r.Status, DurationMS: millis(r.ended.Sub(r.Start)),
		ErrorCode:  r.ErrorCode.String(),
		Candidates: make([]ExplainedCandidate, 0, len(r.candidates)),
		Legs:       make([]ExplainedLeg, 0, len(r.rows)),
		Fallbacks:  make([]ExplainedFallback, 0, len(r.fallbacks)),
		Notes:      r.notes,

		Continuations: r.explainSeams(),

		Conversation: string(r.turn.Key.AppendText(nil)), Turn: r.turn.Number,
	}
	if p := r.pick; p != nil {
		e.Picker = &ExplainedPicker{
			Result: p.Result, DurationMS: millis(p.Took), Destinations: p.Destinations,
			Prefill: p.Prefill, Encoders: p.Encoders, BodyChanged: p.BodyChanged,
		}
	}
	if r.incomplete {
		e.Notes = append(slices.Clone(e.Notes), "the candidates of this request are no longer kept")
	}
	if e.Scores = r.explainScores(); len(e.Scores) < len(r.scorings) && !r.incomplete {
		e.Notes = append(slices.Clone(e.Notes), "the scores of the single scorers are no longer kept")
	}
	if r.scored {
		e.ScoreBetter, e.ScoreUnit = r.scale.Better(), r.scale.Unit()
	}
	for _, c := range r.candidates {
		shown := ExplainedCandidate{Engine: c.engine, Rank: int(c.facts.Rank), Score: r.score(c), Facts: map[string]any{
			"role": c.facts.Roles.String(), "requests": c.facts.Requests, "tokens": c.facts.Tokens, "trial": c.facts.Trial,
			"group": c.facts.Group, "pair": c.facts.Pair.String(), "home": c.facts.Home.String(), "queued": c.facts.Queued,
			"blocks_gpu": c.facts.BlocksGPU, "blocks_cpu": c.facts.BlocksCPU, "blocks_disk": c.facts.BlocksDisk,
			"block_tokens": c.facts.BlockTokens, "usage": c.facts.Usage, "token_us": c.facts.TokenMicros,
			"recent_tokens": c.facts.RecentTokens, "recent_requests": c.facts.RecentRequests, "busy": c.facts.Busy,
		}}
		if c.facts.Adapter != abi.AdapterUnknown {
			shown.Facts["adapter"] = c.facts.Adapter.String()
		}
		e.Candidates = append(e.Candidates, shown)
	}
	for _, l := range r.rows {
		first := l.firstByte
		if first.IsZero() {
			first = l.head // a leg whose answer is held whole has no events
		}
		e.Legs = append(e.Legs, ExplainedLeg{
			ID: l.id, Phase: l.Phase.String(), Engine: l.engine, Rank: l.rank, Attempt: l.attempt,
			StartMS: millis(l.Start.Sub(r.Start)), FirstByteMS: since(r.Start, first), EndMS: since(r.Start, l.ended),
			Status: l.status, Error: l.reason, Cause: l.cause, Timing: r.explainTiming(l),
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

// explainSeams returns the places at which the stream broke off.
func (r *Record) explainSeams() (list []ExplainedContinuation) {
	for _, s := range r.seams {
		c := ExplainedContinuation{AtMS: millis(s.at.Sub(r.Start)), Tokens: s.tokens, Result: s.result, Prefill: s.prefill, Decode: s.decode}
		if s.result == resultContinued {
			gap := millis(s.gap)
			c.GapMS = &gap
		}
		list = append(list, c)
	}
	return list
}

// score returns the score that the policy gave c; nil: none, or one that JSON cannot
// express.
func (r *Record) score(c candidate) *float64 {
	score := float64(c.facts.Score)
	if !r.scored || math.IsNaN(score) || math.IsInf(score, 0) {
		return nil
	}
	return &score
}

// ExplainedTiming is an engine's report of the times of a leg: the time in the queue, the
// time to the first token, the total time, and the time for the KV. If the proxy has set
// the engine's clock, it also has the begin and the end of the leg at the engine, in ms
// since the request arrived.
type ExplainedTiming struct {
	QueueMS      *float64 `json:"queue_ms,omitempty"`
	FirstTokenMS *float64 `json:"ttft_ms,omitempty"`
	TotalMS      *float64 `json:"e2e_ms,omitempty"`
	TransferMS   *float64 `json:"kv_transfer_ms,omitempty"`
	StartMS      *float64 `json:"start_ms,omitempty"`
	EndMS        *float64 `json:"end_ms,omitempty"`
}

// explainTiming returns the timing of a leg; nil if there is none.
func (r *Record) explainTiming(l *Leg) *ExplainedTiming {
	if l.timing.IsZero() {
		return nil
	}
	duration := func(name string) *float64 {
		if ms, ok := l.timing.Millis(name); ok {
			return &ms
		}
		return nil
	}
	moment := func(name string) *float64 {
		const day = 24 * 3600
		s, ok := l.timing.Moment(name)
		since := s - unix(r.Start)
		if !ok || math.Abs(since) > day { // that clock is not set
			return nil
		}
		ms := math.Round(since*1e6) / 1e3
		return &ms
	}
	return &ExplainedTiming{
		QueueMS: duration("queue"), FirstTokenMS: duration("ttft"), TotalMS: duration("e2e"), TransferMS: duration("kv_transfer"),
		StartMS: moment("start"), EndMS: moment("end"),
	}
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func since(start, t time.Time) *float64 {
	if t.IsZero() {
		return nil
	}
	ms := millis(t.Sub(start))
	return &ms
}

func unix(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMicro()) / 1e6
}
