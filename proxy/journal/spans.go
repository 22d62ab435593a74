package journal

import (
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// operationOf returns gen_ai.operation.name for a request to an API; "" if the API does not
// run a model.
func operationOf(api openai.API) string {
	switch api {
	case openai.Chat, openai.Responses, openai.Messages:
		return "chat"
	case openai.Completions, openai.Generate, openai.VLLMGenerate:
		return "text_completion"
	case openai.Embeddings:
		return "embeddings"
	}
	return ""
}

// Traced reports whether the request has a span.
func (j *Journal) Traced() bool { return j.span != nil }

// Whole notes the model and the finish reasons in a whole answer. Whole, StreamBegan and Finished
// are for the span: without a span they do nothing.
func (j *Journal) Whole(api openai.API, answer []byte) {
	if j.span != nil {
		j.answered, j.reasons = openai.ModelOf(answer), openai.FinishReasons(api, answer)
	}
}

// StreamBegan notes the model that the start of a stream names.
func (j *Journal) StreamBegan(api openai.API, head []byte) {
	if j.span != nil {
		j.answered = api.StreamModel(head)
	}
}

// Finished notes the finish reasons of a stream, whose scanner notes them if Traced returns true.
func (j *Journal) Finished(events *openai.EventScanner) {
	if j.span != nil {
		j.reasons = events.FinishReasons()
	}
}

// ended returns the ended request for OpenTelemetry.
func (j *Journal) ended() telemetry.Operation {
	r := &j.rec
	o := telemetry.Operation{
		Name: j.operation, Model: j.model.Name(), Outcome: r.Outcome, Stream: r.Stream,
		Duration: r.End.Sub(r.Start), Input: r.Usage.Prompt, Output: r.Usage.Completion,
		AnsweredModel: j.answered, FinishReasons: j.reasons,
	}
	if !r.FirstByte.IsZero() {
		o.FirstByte = r.FirstByte.Sub(r.Start)
	}
	return o
}

// trace ends the span of the request, with the children that the record holds: wait
// (until the first placement), prefill, transfer (estimate: from prefill's
// answer to decode's first event), decode_first_token, decode, and the operation in the
// terms of OpenTelemetry's conventions for generative AI.
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
	op := j.ended()
	began := r.Placed
	if began.IsZero() {
		began = r.Start
	}
	more := op.Answered()
	if r.Usage.Cached > 0 {
		more = append(more, attribute.Int64("gen_ai.usage.cache_read.input_tokens", r.Usage.Cached))
	}
	j.span.Operation(&op, began, r.End, more...)
	j.span.End(r.End, r.Outcome, append(op.Answered(),
		attribute.String("pdproxy.request_id", r.RequestID), attribute.String("pdproxy.flow", r.Flow.String()),
		attribute.String("gen_ai.request.model", r.Model), attribute.Int("http.response.status_code", r.Status),
		attribute.Int64("gen_ai.usage.input_tokens", max(0, r.Usage.Prompt)), attribute.Int64("gen_ai.usage.output_tokens", max(0, r.Usage.Completion)))...)
}
