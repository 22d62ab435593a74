package journal

import (
	"strconv"

	"github.com/pdproxy/pdproxy/abi"
)

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

func (r *record) perfRow() PerfRow {
	p := PerfRow{
		RequestID: r.RequestID, CtxRequestID: strconv.FormatUint(r.DisaggID, 10), CtxServer: r.prefill, GenServer: r.decode,
		Arrival: unix(r.Start), FirstToken: unix(r.FirstByte), End: unix(r.End), Outcome: r.Outcome.String(),
		PromptTokens: max(r.Usage.Prompt, 0), OutputTokens: max(r.Usage.Completion, 0), CachedTokens: max(r.Usage.Cached, 0),
	}
	for _, l := range r.rows[:r.legs] { // the last leg of each phase counts
		if l.Phase == abi.Prefill {
			p.CtxDispatch, p.CtxDone, p.CtxTiming = unix(l.Start), unix(l.ended), r.explainTiming(l)
		} else {
			p.GenDispatch, p.GenTiming = unix(l.Start), r.explainTiming(l)
		}
	}
	return p
}
