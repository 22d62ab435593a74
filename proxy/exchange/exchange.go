package exchange

import (
	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/prompt"
	"github.com/pdproxy/pdproxy/proxy/recording"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
	"github.com/pdproxy/pdproxy/proxy/sidecar/extproc"
)

// exchange is one client request with all its attempts. The goroutine of the handler owns the
// exchange from open to close. close runs exactly once, on every path. Each goroutine that an
// attempt starts ends before close, or belongs to cleanup.Runner.
type exchange struct {
	run      *Runner
	client   downstream.Client
	req      openai.Request
	prompt   prompt.Prompt
	ask      coordinator.Ask
	route    sidecar.Route
	journal  journal.Journal
	env      attempt.Env
	gateway  attempt.Gateway         // sends the request instead of this process; nil: this process sends the legs
	plane    *sidecar.Plane          // of an ext_proc picker; nil: none
	shown    sidecar.Shown           // the answer, if plane is set
	changes  *extproc.HeaderMutation // of the picker, for the legs; nil: none
	admitted admission.Place         // among the running requests; zero: none
	held     *coordinator.Lease      // of the last placement; close releases it too, because a panic may have kept the attempt from it
	line     recording.Line          // of the recording
	account  account                 // of the client's tenant
	denied   *attempt.Error          // the failure for which the retry budget had no retry
	full     []*engine.Instance      // refused the request for lack of room
	waited   bool                    // the last placement has waited for an engine
}

// reset drops every reference to the request and keeps the memory.
func (x *exchange) reset() {
	clear(x.ask.Excluded)
	x.ask = coordinator.Ask{Excluded: x.ask.Excluded[:0]}
	x.run, x.gateway, x.held, x.denied = nil, nil, nil, nil
	x.full, x.waited = nil, false
	x.admitted = admission.Place{}
	x.plane, x.shown, x.changes = nil, sidecar.Shown{}, nil
	x.env.Reset()
	x.prompt.Reset()
	x.route.Reset()
	x.line = recording.Line{}
	x.account = account{}
	x.req.Reset()
}
