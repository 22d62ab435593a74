package proxy

import (
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/pdproxy/pdproxy/abi"
)

// trace ends the exchange's span with the children that its record holds: wait
// (until the first placement), prefill, transfer (estimate: from prefill's
// answer to decode's first event), decode_first_token and decode.
func (x *exchange) trace(now time.Time) {
	if x.span == nil {
		return
	}
	r := &x.rec
	x.span.Child("wait", r.Start, r.Placed)
	var prefillEnd time.Time
	for _, l := range r.rows[:r.legs] {
		attrs := []attribute.KeyValue{
			attribute.String("pdproxy.engine", l.Engine), attribute.Int("pdproxy.rank", l.Rank),
			attribute.Int("pdproxy.attempt", l.Attempt), attribute.String("pdproxy.error", l.Error),
		}
		if l.Phase == abi.Prefill {
			x.span.Child("prefill", l.Start, l.End, attrs...)
			prefillEnd = l.End
			continue
		}
		if !prefillEnd.IsZero() {
			x.span.Child("transfer", prefillEnd, l.FirstByte)
		}
		x.span.Child("decode_first_token", l.Start, l.FirstByte, attrs...)
		x.span.Child("decode", l.Start, l.End, attrs...)
	}
	x.span.End(now, x.outcome,
		attribute.String("pdproxy.request_id", r.RequestID), attribute.String("pdproxy.flow", r.Flow.String()),
		attribute.String("gen_ai.request.model", r.Model), attribute.Int("http.response.status_code", r.Status),
		attribute.Int64("gen_ai.usage.input_tokens", max(0, r.Usage.Prompt)), attribute.Int64("gen_ai.usage.output_tokens", max(0, r.Usage.Completion)))
}
