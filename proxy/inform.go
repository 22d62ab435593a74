package proxy

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

// What filters learn of an exchange goes to the board in its context, when there
// is one.

func (x *exchange) informOpen() {
	if x.info == nil {
		return
	}
	id := x.rec.RequestID
	x.info.Update(func(f *abi.StreamFacts) { f.RequestID = id })
}

func (x *exchange) informRequest() {
	if x.info == nil {
		return
	}
	r := &x.req
	x.info.Update(func(f *abi.StreamFacts) { f.Model, f.Stream, f.PromptTokens = r.Model, r.Stream, r.PromptTokens })
}

func (x *exchange) informPlaced(p *coordinator.Placement) {
	if x.info == nil {
		return
	}
	since := time.Since(x.rec.Start)
	x.info.Update(func(f *abi.StreamFacts) {
		f.Flow, f.DisaggID = p.Flow, p.ID
		f.Prefill, f.Decode = streamTarget(p.Prefill), streamTarget(p.Decode)
		f.Attempts++
		if f.Placed == 0 {
			f.Placed = since
		}
	})
}

func (x *exchange) informPrefill() {
	if x.info == nil {
		return
	}
	since := time.Since(x.rec.Start)
	x.info.Update(func(f *abi.StreamFacts) { f.PrefillDone = since })
}

// informFirstByte is called before anything of the answer is written.
func (x *exchange) informFirstByte(now time.Time) {
	if x.info == nil {
		return
	}
	since := now.Sub(x.rec.Start)
	x.info.Update(func(f *abi.StreamFacts) { f.FirstByte = since })
}

func (x *exchange) informEnd() {
	if x.info == nil {
		return
	}
	u := x.usage
	since := x.rec.End.Sub(x.rec.Start)
	x.info.Update(func(f *abi.StreamFacts) {
		f.End = since
		if u != (openai.Usage{}) {
			f.InputTokens, f.OutputTokens, f.CachedTokens = max(0, u.Prompt), max(0, u.Completion), max(0, u.Cached)
		}
	})
	x.rec.notes = append(x.rec.notes, x.info.Notes()...)
}

func streamTarget(t engine.Target) abi.StreamTarget {
	if t.IsZero() {
		return abi.StreamTarget{}
	}
	return abi.StreamTarget{Engine: t.Name(), Address: address(t.Spec.URL), Rank: int32(t.Rank)}
}

// address is the host:port of an engine's URL.
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
