package journal

import (
	"cmp"
	"net"
	"net/url"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// These methods publish facts of the request for the filters of its stream. They are
// called only if a filter needs the facts.

func (j *Journal) publishID() {
	id := j.RequestID
	j.Filters.Update(func(f *abi.StreamFacts) { f.RequestID = id })
}

// Tenant publishes the tenant of the client's key or token. Call it only if Filters is set.
func (j *Journal) Tenant(name string) {
	j.Filters.Update(func(f *abi.StreamFacts) { f.Tenant = name })
}

func (j *Journal) publishRequest(r *openai.Request) {
	j.Filters.Update(func(f *abi.StreamFacts) { f.Model, f.Stream, f.PromptTokens = r.Model, r.Stream, r.PromptTokens })
}

func (j *Journal) publishPlacement(p *coordinator.Placement) {
	since := time.Since(j.Start)
	j.Filters.Update(func(f *abi.StreamFacts) {
		f.Flow, f.DisaggID = p.Flow, p.ID
		f.Prefill, f.Decode = streamTarget(p.Prefill), streamTarget(p.Decode)
		f.Attempts++
		if f.Placed == 0 {
			f.Placed = since
		}
	})
}

// PrefillDone notes that prefill has answered. Call it only if Filters is set.
func (j *Journal) PrefillDone() {
	since := time.Since(j.Start)
	j.Filters.Update(func(f *abi.StreamFacts) { f.PrefillDone = since })
}

// publishFirstByte must be called before anything of the answer is written.
func (j *Journal) publishFirstByte(since time.Duration) {
	j.Filters.Update(func(f *abi.StreamFacts) { f.FirstByte = since })
}

func (j *Journal) publishEnd() {
	u := j.Usage
	since := j.ended.Sub(j.Start)
	j.Filters.Update(func(f *abi.StreamFacts) {
		f.End = since
		if u != (openai.Usage{}) {
			f.InputTokens, f.OutputTokens, f.CachedTokens = max(0, u.Prompt), max(0, u.Completion), max(0, u.Cached)
		}
	})
	j.notes = append(j.notes, j.Filters.Notes()...)
}

func streamTarget(t engine.Target) abi.StreamTarget {
	if t.IsZero() {
		return abi.StreamTarget{}
	}
	return abi.StreamTarget{Engine: t.Name(), Address: address(t.Spec.URL), Rank: int32(t.Rank)}
}

// address returns the host:port of an engine's URL.
func address(engineURL string) string {
	u, err := url.Parse(engineURL)
	if err != nil {
		return ""
	}
	port := "80"
	if u.Scheme == "https" {
		port = "443"
	}
	return net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), port))
}
