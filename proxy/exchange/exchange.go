package exchange

import (
	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/downstream"
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
	placing  placing
	journal  journal.Journal
	env      attempt.Env
	gateway  attempt.Gateway         // sends the request instead of this process; nil: this process sends the legs
	picker   *sidecar.PickerClient   // of an ext_proc picker; nil: none
	observed sidecar.ObservedWriter  // the answer, if picker is set
	changes  *extproc.HeaderMutation // of the picker, for the legs; nil: none
	admitted admission.Place         // among the running requests; zero: none
	line     recording.Line          // of the recording
	account  account                 // of the client's tenant
}

// reset drops every reference to the request and keeps the memory.
func (x *exchange) reset() {
	x.run, x.gateway = nil, nil
	x.placing.close()
	x.admitted = admission.Place{}
	x.picker, x.observed, x.changes = nil, sidecar.ObservedWriter{}, nil
	x.env.Reset()
	x.prompt.Reset()
	x.line = recording.Line{}
	x.account = account{}
	x.req.Reset()
}
