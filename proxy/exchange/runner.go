// Package exchange runs one request of a client from its first byte to its last: it admits,
// reads and describes the request, then places and attempts it until one attempt ends it.
// Read serve.go from top to bottom.
//
// The decisions behind this package are in docs/design/request.md.
package exchange

import (
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/models"
	"github.com/pdproxy/pdproxy/proxy/recording"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// Options are the parts that a Runner uses beside those of attempts. The comment of a field states if the field may be nil.
// The Runner calls the functions once per request, when the request arrives.
type Options struct {
	Config   func() *config.Config
	Keys     func() *admission.Keys       // returns nil if every client may send requests
	ClientOf func(*http.Request) string   // returns the name of a client for limits
	Sidecar  func() *sidecar.Sidecar      // returns nil on a proxy that is no sidecar
	Picker   func() *sidecar.PickerClient // returns nil without an ext_proc picker
	Models   func() *models.Table         // returns nil without [[model]]
	Queue    *admission.Queue
	Waiting  *admission.WaitingRoom
	Bodies   *downstream.Bodies
	Books    *journal.Books
	Recorder *recording.Recorder // nil: nothing is recorded
	Budgets  tenant.Budgets
	Metrics  *telemetry.Metrics
}

// Runner runs requests. It is safe for concurrent use.
type Runner struct {
	Options
	*attempt.Services
	hooks     atomic.Pointer[attempt.Hooks] // nil: none
	exchanges sync.Pool                     // of *exchange, whose memory is reused
	holders   holders                       // of stored responses
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

// hooksNow returns the hooks for a new request, or nil.
func (run *Runner) hooksNow() attempt.Hooks {
	if h := run.hooks.Load(); h != nil {
		return *h
	}
	return nil
}
