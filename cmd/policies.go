package cmd

import (
	"context"
	"fmt"
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// nativePolicies is the decider of this build: the built-in policies, compiled
// in. Those that run are replaced as a whole on reload.
type nativePolicies struct {
	current atomic.Pointer[nativeSet]
}

// nativeSet is the policies of one configuration and what they have done.
type nativeSet struct {
	names  policies.Names
	native *policies.Native
	plan   calls
	place  calls
	mint   calls
}

// calls counts the calls of one policy by their time: bucket i holds those
// below 2^i ns.
type calls struct {
	sum     atomic.Int64 // ns
	buckets [32]atomic.Uint64
}

func newNativePolicies(c config.Policy) (*nativePolicies, error) {
	names := policies.Names{Plan: c.Plan, Place: c.Place, Mint: c.Mint}
	native, err := policies.NewNative(names)
	if err != nil {
		return nil, err
	}
	p := &nativePolicies{}
	p.current.Store(&nativeSet{names: names, native: native})
	return p, nil
}

// swap takes over the policies of next.
func (p *nativePolicies) swap(next *nativePolicies) {
	if now := p.current.Load(); now.names != next.current.Load().names {
		p.current.Store(next.current.Load())
	}
}

// Plan implements coordinator.Decider.
func (p *nativePolicies) Plan(ctx context.Context, f *abi.PlanFacts) (abi.PlanAnswer, string, bool) {
	s := p.current.Load()
	defer s.plan.count(time.Now())
	return s.native.Plan(ctx, f)
}

// Place implements coordinator.Decider.
func (p *nativePolicies) Place(ctx context.Context, f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
	s := p.current.Load()
	defer s.place.count(time.Now())
	return s.native.Place(ctx, f)
}

// Mint implements coordinator.Decider.
func (p *nativePolicies) Mint(ctx context.Context, f *abi.MintFacts) (uint64, string, bool) {
	s := p.current.Load()
	defer s.mint.count(time.Now())
	return s.native.Mint(ctx, f)
}

func (c *calls) count(start time.Time) {
	ns := int64(time.Since(start))
	c.sum.Add(ns)
	c.buckets[min(bits.Len64(uint64(ns)), len(c.buckets)-1)].Add(1)
}

// row shows the policy to operators; the p99 is the upper border of its bucket.
func (c *calls) row(name, phase string) proxy.PolicyRow {
	r := proxy.PolicyRow{Name: name, Phase: phase, Runtime: "native", State: "active"}
	var counts [32]uint64
	for i := range c.buckets {
		counts[i] = c.buckets[i].Load()
		r.Calls += counts[i]
	}
	if r.Calls == 0 {
		return r
	}
	r.MeanUS = float64(c.sum.Load()) / float64(r.Calls) / 1000
	var below uint64
	for i, n := range counts {
		if below += n; below*100 >= r.Calls*99 {
			r.P99US = float64(uint64(1)<<i) / 1000
			break
		}
	}
	return r
}

// List implements proxy.Policies.
func (p *nativePolicies) List() []proxy.PolicyRow {
	s := p.current.Load()
	return []proxy.PolicyRow{
		s.plan.row(s.names.Plan, "plan"), s.place.row(s.names.Place, "place"), s.mint.row(s.names.Mint, "mint"),
	}
}

// Reload implements proxy.Policies. A compiled-in policy has one version only.
func (p *nativePolicies) Reload(name string) error {
	n := p.current.Load().names
	if name != n.Plan && name != n.Place && name != n.Mint {
		return fmt.Errorf("no policy %q is loaded", name)
	}
	return fmt.Errorf("policy %q is compiled in and has no file to load again", name)
}
