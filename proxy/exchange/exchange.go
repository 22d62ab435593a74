// Package exchange runs one request of a client from its first byte to its last: it admits,
// reads and describes the request, then places and attempts it until one attempt ends it.
// Read serve.go from top to bottom.
//
// The decisions behind this package are in docs/design/request.md.
package exchange

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/models"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/prompt"
	"github.com/pdproxy/pdproxy/proxy/recording"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
	"github.com/pdproxy/pdproxy/proxy/sidecar/extproc"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// Options are the parts that a Runner uses beside those of attempts. The comment of a field states if the field may be nil.
// The Runner calls the functions once per request, when the request arrives.
type Options struct {
	Config  func() *config.Config
	Keys    func() *admission.Keys       // returns nil if every client may send requests
	Proxies func() *admission.Proxies    // returns the trusted proxies in front of this one
	Sidecar func() *sidecar.Sidecar      // returns nil on a proxy that is no sidecar
	Picker  func() *sidecar.PickerClient // returns nil without an ext_proc picker
	Models  func() *models.Table         // returns nil without [[model]] and rewrites
	// Objectives returns the InferenceObjectives of epp.pool by name.
	Objectives func() map[string]admission.Objective
	Queue      *admission.Queue
	Waiting    *admission.WaitingRoom
	Bodies     *downstream.Bodies
	Books      *journal.Books
	Recorder   *recording.Recorder // nil: nothing is recorded
	Budgets    tenant.Budgets
	Metrics    *telemetry.Metrics
}

// Runner runs requests. It is safe for concurrent use.
type Runner struct {
	Options
	*attempt.Services
	hooks     atomic.Pointer[attempt.Hooks] // nil: none
	exchanges sync.Pool                     // of *exchange, whose memory is reused
	storing   storing                       // the engines that store responses
}

// New returns a Runner. It starts nothing.
func New(services *attempt.Services, o Options) *Runner {
	return &Runner{Services: services, Options: o}
}

// SetHooks sets the hooks of requests that come later. nil means no hooks.
func (run *Runner) SetHooks(h attempt.Hooks) {
	if h == nil {
		run.hooks.Store(nil)
		return
	}
	run.hooks.Store(&h)
}

// exchange is one client request with all its attempts. The goroutine of the handler owns the
// exchange from open to close. close runs exactly once, on every path. Each goroutine that an
// attempt starts ends before close, or belongs to cleanup.Runner.
type exchange struct {
	client  downstream.Client // this and the next five keep their memory for another request
	req     openai.Request
	prompt  prompt.Prompt
	placing placing
	journal journal.Journal
	env     attempt.Env
	current
}

// current has the fields of an exchange that keep nothing for another request.
type current struct {
	run      *Runner
	gateway  attempt.Gateway         // sends the request instead of this process; nil: this process sends the legs
	picker   *sidecar.PickerClient   // of an ext_proc picker; nil: none
	observed sidecar.ObservedWriter  // the answer, if picker is set
	changes  *extproc.HeaderMutation // of the picker, for the legs; nil: none
	admitted admission.Place         // among the running requests; zero: none
	line     recording.Line          // of the recording
	account  account                 // of the client's tenant
	stream   *openStream             // that may be continued, or has broken off; nil: none

	endContext context.CancelCauseFunc // of a request that may be ended for another one; nil: of others
}

// open begins the exchange.
func (run *Runner) open(w http.ResponseWriter, r *http.Request) *exchange {
	x, _ := run.exchanges.Get().(*exchange)
	if x == nil {
		x = new(exchange)
	}
	cfg := run.Config()
	x.run = run
	if x.picker = run.Picker(); x.picker != nil {
		x.observed.ResponseWriter = w
		w = &x.observed
	}
	x.placing.x = x
	x.client.Open(run.Bodies, cfg, w, r)
	x.journal.Open(run.Books, r.Context(), r.Header, downstream.RequestID(r))
	w.Header().Set("X-Request-Id", x.journal.RequestID)
	run.Budget.Request(x.journal.Start)
	x.req.Memory = &x.client
	e := &x.env
	e.Services, e.Context, e.Config = run.Services, r.Context(), cfg
	if h := run.hooks.Load(); h != nil {
		e.Hooks = *h
	}
	e.Client, e.Request, e.Ask, e.Prompt, e.Route, e.Journal = &x.client, &x.req, &x.placing.ask, &x.prompt, &x.placing.route, &x.journal
	return x
}

// close ends every exchange. Each attempt has ended its legs and released its lease before. close
// completes the record, writes the trace line, calls the finish hook and frees the memory.
func (x *exchange) close() {
	x.env.End() // an attempt that a panic has left
	if x.endContext != nil {
		x.endContext(nil)
	}
	if x.stream != nil {
		x.stream.close(&x.placing.ask)
	}
	if x.account.open {
		x.settleTenant()
	}
	x.journal.Received, x.journal.Sent = x.client.Transferred()
	if t := x.account.tenant; t != nil {
		x.journal.Account = t.Name
	}
	var h journal.HTTP
	if x.run.Books.LogsAccess() {
		h = x.http()
	}
	x.journal.End(h)
	if x.run.Recorder != nil && !x.env.WarmUp && x.journal.Outcome == telemetry.OutcomeOK {
		x.run.Recorder.Write(&x.line, x.journal.Usage, x.placing.ask.Request.PromptTokens, x.journal.Intervals.Count())
	}
	if x.env.Hooks != nil {
		f := x.journal.Finish(x.placing.ask.Request)
		f.Request.Remaining = x.placing.ask.Remaining(time.Now())
		x.env.Hooks.Finish(&f)
	}
	x.journal.Close()
	if x.picker != nil {
		x.closeObserved()
	}
	x.env.ReleaseBody()
	x.client.Close()
	run := x.run
	x.reset()
	run.exchanges.Put(x)
}

// http returns the facts of the client's request and of its answer for the access log.
func (x *exchange) http() journal.HTTP {
	r := x.client.Request()
	h := journal.HTTP{Address: x.run.Proxies().Address(r), Method: r.Method, Path: r.URL.EscapedPath(), Protocol: r.Proto}
	h.Received, h.Sent = x.client.Transferred()
	if x.env.Class != nil {
		h.Class = x.env.Class.Name
	}
	return h
}

// reset releases what a panic has left, drops every reference to the request and keeps the memory.
func (x *exchange) reset() {
	p := &x.placing
	if p.lease != nil {
		p.lease.Release()
	}
	clear(p.ask.Excluded)
	if p.route.Restricted || x.picker != nil {
		p.route.Reset()
	}
	*p = placing{ask: coordinator.PlacementRequest{Excluded: p.ask.Excluded[:0]}, route: p.route}
	x.env.Reset()
	if x.prompt.Used {
		x.prompt.Reset()
	}
	x.req.Reset()
	x.current = current{}
}
