package journal

import (
	"runtime/debug"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/accesslog"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// Whole notes the model and the finish reasons in a whole answer. Whole, StreamBegan and Finished
// are for the span: call them only if Span is set.
func (j *Journal) Whole(api openai.API, answer []byte) {
	j.answered, j.reasons = openai.ModelOf(answer), openai.FinishReasons(api, answer)
}

// StreamBegan notes the model that the start of a stream names.
func (j *Journal) StreamBegan(api openai.API, head []byte) { j.answered = api.StreamModel(head) }

// Finished notes the finish reasons of a stream, whose scanner must note them.
func (j *Journal) Finished(events *openai.EventScanner) { j.reasons = events.FinishReasons() }

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

// trace ends the span of the request, with the children that the record holds: wait
// (until the first placement), prefill, transfer (estimate: from prefill's
// answer to decode's first event), decode_first_token, decode, and the operation in the
// terms of OpenTelemetry's conventions for generative AI.
func (j *Journal) trace(e *telemetry.Exchange) {
	j.Span.Child("wait", j.Start, j.placed)
	var prefillEnd time.Time
	for _, l := range j.rows {
		attrs := []attribute.KeyValue{
			attribute.String("pdproxy.engine", l.engine), attribute.Int("pdproxy.rank", l.rank),
			attribute.Int("pdproxy.attempt", l.attempt), attribute.String("pdproxy.error", l.reason),
		}
		if l.Phase == abi.Prefill {
			j.Span.Child("prefill", l.Start, l.ended, attrs...)
			prefillEnd = l.ended
			continue
		}
		if !prefillEnd.IsZero() {
			j.Span.Child("transfer", prefillEnd, l.firstByte)
		}
		j.Span.Child("decode_first_token", l.Start, l.firstByte, attrs...)
		j.Span.Child("decode", l.Start, l.ended, attrs...)
	}
	e.Operation, e.AnsweredModel, e.FinishReasons = operationOf(j.api), j.answered, j.reasons
	began := j.placed
	if began.IsZero() {
		began = j.Start
	}
	more := e.Answered()
	if j.Usage.Cached > 0 {
		more = append(more, attribute.Int64("gen_ai.usage.cache_read.input_tokens", j.Usage.Cached))
	}
	j.Span.Operation(e, began, j.ended, more...)
	j.Span.End(j.ended, j.Outcome, append(e.Answered(),
		attribute.String("pdproxy.request_id", j.RequestID), attribute.String("pdproxy.flow", j.Flow.String()),
		attribute.String("gen_ai.request.model", j.Model), attribute.Int("http.response.status_code", j.Status),
		attribute.Int64("gen_ai.usage.input_tokens", max(0, j.Usage.Prompt)), attribute.Int64("gen_ai.usage.output_tokens", max(0, j.Usage.Completion)))...)
}

// logAccess writes the line of the request to the access log.
func (j *Journal) logAccess(h *HTTP) {
	e := accesslog.Entry{
		Time: j.Start.UTC().Round(time.Microsecond), RequestID: j.RequestID, ClientAddress: h.Address, Client: j.Client,
		Method: h.Method, Path: h.Path, Protocol: h.Protocol, RequestedModel: j.Asked, Model: j.Model, Class: h.Class,
		Stream: j.Stream, Flow: j.Flow.String(), Policy: j.Policy, Prefill: j.prefill, Decode: j.decode,
		Outcome: j.Outcome.String(), Status: j.Status, ErrorCode: j.ErrorCode.String(), Legs: len(j.rows), Retries: j.retries, BytesIn: h.Received, BytesOut: h.Sent,
		PromptTokens: max(0, j.Usage.Prompt), CachedTokens: max(0, j.Usage.Cached), OutputTokens: max(0, j.Usage.Completion),
		FirstByteMS: since(j.Start, j.FirstByte), DurationMS: millis(j.ended.Sub(j.Start)),
	}
	for _, f := range j.fallbacks {
		e.Fallbacks = append(e.Fallbacks, f.What+":"+f.Reason)
	}
	for _, s := range j.seams {
		e.Continuations = append(e.Continuations, s.result)
	}
	j.books.access.Write(&e)
}

// Warn logs a message of the request. args are as those of slog and hold nothing of a
// body.
func (j *Journal) Warn(message string, args ...any) { j.books.log.Warn(message, j.attrs(args...)...) }

// Panic logs a panic with its stack. The deferred function that recovered from it calls.
func (j *Journal) Panic(v any) {
	j.books.log.Error("panic in an exchange", j.attrs("panic", v, "stack", string(debug.Stack()))...)
}

func (j *Journal) attrs(more ...any) []any {
	return append([]any{"request_id", j.RequestID}, more...)
}

func (j *Journal) logLegs() {
	for _, l := range j.rows {
		j.books.log.Debug("leg", j.attrs("leg_id", l.id, "phase", l.Phase.String(), "engine", l.engine, "rank", l.rank,
			"attempt", l.attempt, "status", l.status, "error", l.reason, "cause", l.cause, "ms", l.ended.Sub(l.Start).Milliseconds())...)
	}
	j.books.log.Debug("exchange", j.attrs("flow", j.Flow.String(), "outcome", j.Outcome.String(),
		"status", j.Status, "ms", j.ended.Sub(j.Start).Milliseconds())...)
}
