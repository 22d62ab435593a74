package journal

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/accesslog"
)

// logAccess writes the line of the request to the access log.
func (j *Journal) logAccess() {
	if !j.books.access.Enabled() {
		return
	}
	r := &j.rec
	e := accesslog.Entry{
		Time: r.Start.UTC().Round(time.Microsecond), RequestID: r.RequestID, Client: j.client, Model: r.Model, RequestedModel: r.Requested, Stream: r.Stream,
		Flow: r.Flow.String(), Policy: r.Policy, Prefill: r.prefill, Decode: r.decode,
		Outcome: r.Outcome.String(), Status: r.Status, Legs: r.legs,
		PromptTokens: max(0, r.Usage.Prompt), CachedTokens: max(0, r.Usage.Cached), OutputTokens: max(0, r.Usage.Completion),
		FirstByteMS: since(r.Start, r.FirstByte), DurationMS: millis(r.End.Sub(r.Start)),
	}
	for _, f := range r.fallbacks {
		e.Fallbacks = append(e.Fallbacks, f.What+":"+f.Reason)
	}
	j.books.access.Write(&e)
}
