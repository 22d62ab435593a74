package journal

import (
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/pdproxy/pdproxy/abi"
)

// trace ends the span of the request, with the children that the record holds: wait
// (until the first placement), prefill, transfer (estimate: from prefill's
// answer to decode's first event), decode_first_token and decode.
func (j *Journal) trace() {
	if j.span == nil {
		return
	}
	r := &j.rec
	j.span.Child("wait", r.Start, r.Placed)
	var prefillEnd time.Time
	for _, l := range r.rows[:r.legs] {
		attrs := []attribute.KeyValue{
			attribute.String("pdproxy.engine", l.engine), attribute.Int("pdproxy.rank", l.rank),
			attribute.Int("pdproxy.attempt", l.attempt), attribute.String("pdproxy.error", l.reason),
		}
		if l.Phase == abi.Prefill {
			j.span.Child("prefill", l.Start, l.ended, attrs...)
			prefillEnd = l.ended
			continue
		}
		if !prefillEnd.IsZero() {
			j.span.Child("transfer", prefillEnd, l.firstByte)
		}
		j.span.Child("decode_first_token", l.Start, l.firstByte, attrs...)
		j.span.Child("decode", l.Start, l.ended, attrs...)
	}
	j.span.End(r.End, r.Outcome,
		attribute.String("pdproxy.request_id", r.RequestID), attribute.String("pdproxy.flow", r.Flow.String()),
		attribute.String("gen_ai.request.model", r.Model), attribute.Int("http.response.status_code", r.Status),
		attribute.Int64("gen_ai.usage.input_tokens", max(0, r.Usage.Prompt)), attribute.Int64("gen_ai.usage.output_tokens", max(0, r.Usage.Completion)))
}
