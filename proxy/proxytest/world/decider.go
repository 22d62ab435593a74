package world

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
)

// Decider plans two legs if possible, and leaves the placement to the native rule.
type Decider struct {
	ids   atomic.Uint64
	needs abi.Needs
	Asked atomic.Value                                          // abi.RequestFacts of the last plan
	Hold  func(*abi.PlanFacts) (hold bool, limit time.Duration) // nil: no request is held
}

// Plan implements coordinator.Decider.
func (d *Decider) Plan(_ context.Context, f *abi.PlanFacts) (abi.PlanAnswer, string, bool) {
	d.Asked.Store(f.Request)
	if d.Hold != nil {
		if hold, limit := d.Hold(f); hold {
			return abi.PlanAnswer{Decision: abi.PlanHold, LimitMillis: uint32(limit.Milliseconds())}, "pairs", true
		}
	}
	switch {
	case f.PrefillTargets > 0:
		return abi.PlanAnswer{Decision: abi.PlanDisaggregate}, "pairs", true
	case f.BothTargets > 0:
		return abi.PlanAnswer{Decision: abi.PlanAggregate}, "pairs", true
	}
	return abi.PlanAnswer{Decision: abi.PlanReject}, "pairs", true
}

// Place implements coordinator.Decider.
func (*Decider) Place(context.Context, *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
	return abi.PlaceDecision{}, coordinator.ReasonAbsent, false
}

// Needs implements coordinator.Decider.
func (d *Decider) Needs() abi.Needs { return d.needs }

// Headers implements coordinator.Decider.
func (*Decider) Headers() []string { return []string{"x-tier", "x-region"} }

// Mint implements coordinator.Minter.
func (d *Decider) Mint(context.Context, *abi.MintFacts) (uint64, string, bool) {
	return abi.MinDisaggID + d.ids.Add(1), "counter", true
}

// fakePolicies is the list of policies for the admin address.
type fakePolicies struct{ Reloaded []string }

// List implements admin.Policies.
func (p *fakePolicies) List() []admin.PolicyRow {
	return []admin.PolicyRow{{Name: "auto", Phase: "plan", Runtime: "native", State: "active", Calls: 3, MeanUS: 0.5, P99US: 2}}
}

// Reload implements admin.Policies.
func (p *fakePolicies) Reload(name string) error {
	if name != "auto" {
		return fmt.Errorf("reload %q: %w", name, admin.ErrUnknownPolicy)
	}
	p.Reloaded = append(p.Reloaded, name)
	return nil
}

// logBuffer holds the log of the server.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// String returns the whole log.
func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
