// Package doctor examines the engines of a configuration: it probes each once, as the proxy does,
// and compares their statements with the configuration and with each other. It sends only GET
// requests and handshakes that change nothing in an engine.
//
// The decisions behind this package are in docs/design/engines.md.
package doctor

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/builtin"
	"github.com/pdproxy/pdproxy/policies/scorers"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

const (
	// atOnce bounds the engines that are examined at the same time.
	atOnce = 256
	// limit bounds the examination of one engine, beside the time-out of each request.
	limit = 30 * time.Second
	// requestTimeout is the least time-out of a request that is no probe. health.timeout bounds a
	// probe, and may be short.
	requestTimeout = 2 * time.Second
	// maxPairs bounds the pairs in a report.
	maxPairs = 4096
)

// Report is the result of an examination.
type Report struct {
	Status   string    `json:"status"` // that of the worst finding: ok, warnings or errors
	Engines  []*Engine `json:"engines"`
	Pairs    []Pair    `json:"pairs"`   // at most maxPairs, those that do not fit first
	Fit      int       `json:"fit"`     // number of pairs that fit, listed or not
	Misfits  int       `json:"misfits"` // number of those that do not
	Findings []Finding `json:"findings"`
}

// The values of Report.Status.
const (
	OK       = "ok"
	Warnings = "warnings"
	Errors   = "errors"
)

// Engine is one engine as examined. Texts that the engine chose may contain any character.
type Engine struct {
	Name        string   `json:"name"`
	URL         string   `json:"url"`
	Source      string   `json:"source"`
	Role        string   `json:"role"`
	Connector   string   `json:"connector"`
	Reachable   bool     `json:"reachable"` // it answers HTTP
	Ready       bool     `json:"ready"`     // its probe succeeded
	Error       string   `json:"error,omitempty"`
	Kind        string   `json:"kind,omitempty"`    // vllm, sglang or tensorrt_llm
	Version     string   `json:"version,omitempty"` // of the engine
	Models      []string `json:"models"`
	Mode        string   `json:"mode,omitempty"`     // sglang: prefill, decode or null
	Transfer    string   `json:"transfer,omitempty"` // KV connector or transfer backend that the engine shows
	Ranks       int      `json:"ranks"`              // as configured
	DPSize      int      `json:"dp_size,omitempty"`  // as the engine reports
	BlockTokens int      `json:"block_tokens,omitempty"`
	KVCacheType string   `json:"kv_cache_type,omitempty"`
	Caching     string   `json:"prefix_caching,omitempty"` // on or off
	Events      string   `json:"kv_events"`                // off, announced, configured or poll
	Publishers  []At     `json:"publishers,omitempty"`     // by rank
	Load        string   `json:"load,omitempty"`           // the route with the load
	Asleep      bool     `json:"asleep"`
	DevMode     bool     `json:"dev_mode"` // vllm: the routes of VLLM_SERVER_DEV_MODE exist
	APIs        []string `json:"apis"`     // paths of the routes that exist

	i        *engine.Instance
	timeout  time.Duration // of a request that is no probe
	hash     string
	fits     int // pairs of which it is a member
	failure  error
	loadless error
	foreign  error   // an announced host that the proxy does not use
	unheard  []error // connections to publishers that failed
	unplayed []error // and to their replays
	unpushed []error // connections to publishers of loads that failed
}

// At is where a rank publishes.
type At struct {
	Events string `json:"events,omitempty"`
	Replay string `json:"replay,omitempty"`
	Loads  string `json:"loads,omitempty"`
}

// Pair is a prefill and a decode engine of one model.
type Pair struct {
	Prefill string `json:"prefill"`
	Decode  string `json:"decode"`
	Fits    bool   `json:"fits"`
	Reason  string `json:"reason,omitempty"` // why it does not fit
}

// Examine probes the engines of r once and returns the report. ctx ends it early.
func Examine(ctx context.Context, cfg *config.Config, r *engine.Registry) *Report {
	report := &Report{Status: OK, Engines: []*Engine{}, Pairs: []Pair{}, Findings: []Finding{}}
	for _, i := range r.Snapshot().Instances {
		if i.State() != engine.Draining && !i.IsRemote() {
			e := newEngine(i)
			e.timeout = max(requestTimeout, time.Duration(cfg.Health.Timeout))
			report.Engines = append(report.Engines, e)
		}
	}
	var running sync.WaitGroup
	places := make(chan struct{}, atOnce)
	for _, e := range report.Engines {
		places <- struct{}{}
		running.Go(func() { // ends with limit
			defer func() { <-places }()
			ctx, cancel := context.WithTimeout(ctx, limit)
			defer cancel()
			e.examine(ctx, r)
		})
	}
	running.Wait()
	r.Settle()
	slices.SortFunc(report.Engines, func(a, b *Engine) int { return cmp.Compare(a.Name, b.Name) })
	report.judge(cfg, r)
	return report
}

// Add adds a finding and sets the status.
func (r *Report) Add(f Finding) {
	r.Findings = append(r.Findings, f)
	switch {
	case f.Severity == Error:
		r.Status = Errors
	case f.Severity == Warning && r.Status == OK:
		r.Status = Warnings
	}
}

// judge adds the findings about each engine, and about engines together.
func (r *Report) judge(cfg *config.Config, registry *engine.Registry) {
	uses, known := placeNeeds(cfg)
	for _, e := range r.Engines {
		r.reach(e)
		if e.Ready {
			r.identity(e)
			r.protocol(e)
			r.events(e, uses, known)
			r.extras(e, cfg.Sleep.Wake)
		}
	}
	r.pairs(registry)
	r.models(cfg)
	r.twins()
}

// placeNeeds returns whether the place policy uses the blocks that engines hold. The needs of a
// policy of a plugin are not known here.
func placeNeeds(cfg *config.Config) (uses, known bool) {
	if cfg.ByScores() {
		return scorersNeedBlocks(cfg), true
	}
	for _, p := range builtin.New().Places() {
		if p.Name == cfg.Policy.Place {
			return p.Needs&abi.NeedBlocks != 0, true
		}
	}
	return false, false
}

// scorersNeedBlocks reports whether a built-in scorer of a set uses the blocks that engines hold.
func scorersNeedBlocks(cfg *config.Config) bool {
	for _, set := range append(slices.Clone(cfg.Scores), config.UsualScores()) {
		for _, s := range set.Scorers {
			if scorer, _, err := scorers.Check(s.Name, s.Params); err == nil && scorer.Needs&abi.NeedBlocks != 0 {
				return true
			}
		}
	}
	return false
}
