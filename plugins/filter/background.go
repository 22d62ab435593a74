package filter

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
)

// complaint is the text that a guest printed about contexts of streams.
type complaint uint8

// A plugin that has only ticks and queues cannot make a context for a stream.
// Modules of the Go SDKs export every callback anyway, and panic with one of
// these texts when such a context is requested.
const (
	noComplaint complaint = iota
	noContext             // neither an HTTP nor a TCP context (proxywasm/internal/abi_callback_lifecycle.go)
	noHTTP                // a TCP context only (proxywasm/internal/abi_callback_l7.go)
)

// complaintIn finds a complaint in a line printed by a guest.
func complaintIn(line string) complaint {
	switch {
	case strings.Contains(line, "invalid context id on proxy_on_context_create"):
		return noContext
	case strings.Contains(line, "invalid context on proxy_on_request_headers"):
		return noHTTP
	}
	return noComplaint
}

// probed is the id of the context that probe creates.
const probed = rootContext + 1

// suspectBackground starts a probe of whether the plugin works only in the
// background, after it failed on a stream that could have been its first. The
// complaint may contain bytes of a client, so it does not decide: it only
// starts the probe, once in the life of a version. It must be called before the
// VM is lost, so that other streams of that VM wait for the result.
func (p *Plugin) suspectBackground(about complaint) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.answered != nil || p.stopped {
		return
	}
	answered := make(chan struct{})
	p.answered = answered
	p.tasks.Go(func() {
		defer close(answered)
		if p.probe(about) {
			p.deps.Log.Warn("plugin has no context for a stream: it works in the background only")
			p.background.Store(true)
		}
	})
}

// inBackground waits for the result of the probe and reports whether the plugin
// works only in the background. It returns false while there is no result.
func (p *Plugin) inBackground(ctx context.Context) bool {
	p.mu.Lock()
	answered := p.answered
	p.mu.Unlock()
	if answered == nil {
		return false
	}
	limit := time.NewTimer(host.StartBudget)
	defer limit.Stop()
	select {
	case <-answered:
	case <-limit.C:
	case <-ctx.Done():
	}
	return p.background.Load()
}

// probe requests the context of a stream from a new VM, which has received no byte of a
// client. It reports whether the guest fails with the same complaint. The VM serves no
// traffic.
func (p *Plugin) probe(about complaint) bool {
	ctx, cancel := context.WithTimeout(p.ctx, host.StartBudget)
	v, err := p.newVM(ctx, true)
	cancel()
	if err != nil {
		return false
	}
	defer v.kill()
	if v.enter(false) != nil {
		return false
	}
	defer v.exit()
	v.complaint = noComplaint
	err = v.limited(func(ctx context.Context) error {
		err := v.guest.ContextCreate(ctx, probed, rootContext)
		if err == nil && about == noHTTP {
			_, err = v.guest.RequestHeaders(ctx, probed, 0, true)
		}
		return err
	})
	v.complained(err)
	return err != nil && v.complaint == about
}

// complained notes a complaint in the text that the guest printed in a failed call.
func (v *vm) complained(err error) {
	if err == nil || v.p.served.Load() {
		return
	}
	if failure := new(host.Error); errors.As(err, &failure) {
		v.complaint = max(v.complaint, complaintIn(failure.Printed))
	}
}

// report logs a failure of a guest and returns its reason for the metrics.
func (p *Plugin) report(err error) (reason string) {
	var failure *host.Error
	if !errors.As(err, &failure) {
		p.deps.Log.Error("plugin does not recover", "fail_open", p.spec.FailOpen)
		return ""
	}
	attrs := append([]any{"error", failure, "fail_open", p.spec.FailOpen}, failure.Details(p.deps.Log)...)
	p.deps.Log.Error("plugin failed", attrs...)
	return failure.Failure.String()
}
