package exchange

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// resolve replaces a name of [[model]] that the client requested by the model that serves
// the request. Everything after resolve, except the answers for unknown models and the
// records of the requested name, uses the name of that model.
func (x *exchange) resolve() error {
	if isRemote(x.req.Model) && len(x.env.Config.Remotes) > 0 {
		return coordinator.ErrUnknownModel // only fallbacks use a remote
	}
	table := x.run.Models()
	if table == nil {
		return nil
	}
	route := table.Route(x.req.Model)
	if route == nil {
		return nil
	}
	key := uint64(0)
	if route.Split() {
		key = x.run.Prompts.ConversationKey(x.env.Source())
	}
	x.env.Models = route.Choose(key)
	x.journal.Requested(route.Name())
	x.run.Metrics.ModelChosen(route.Name(), x.env.Models[0])
	return x.rename(x.env.Models[0])
}

// rename writes the name of a model into the request and scans the new body: the
// connectors, the hooks and the clean-up calls then need no rule for names.
func (x *exchange) rename(model string) error {
	if model == x.req.Model {
		return nil
	}
	target := x.req.RenamedTarget(model)
	if x.req.NamesModel() {
		err := x.client.RewriteBody(len(x.client.Body())+2*len(model)+openai.QuotedRoom, func(dst []byte) []byte {
			return x.req.AppendRenamed(dst, model)
		})
		if err != nil {
			return err
		}
		if err := openai.ReadRequest(x.req.API, x.client.Header().Get("Content-Type"), x.client.Body(), &x.req); err != nil {
			return err
		}
	}
	x.req.Target, x.req.Model, x.req.HasModel = target, model, true
	return nil
}

// requested returns the name of the model that the client requested.
func (x *exchange) requested() string {
	if name := x.journal.RequestedModel(); name != "" {
		return name
	}
	return x.req.Model
}

// fallback returns the model after that of the request, "" if there is none. It leaves out
// remotes for requests that they cannot serve, and for those that a gateway sends.
func (x *exchange) fallback() string {
	at := slices.Index(x.env.Models, x.req.Model)
	if at < 0 {
		return ""
	}
	for _, model := range x.env.Models[at+1:] {
		if !isRemote(model) || x.gateway == nil && connector.Remote().Serves(x.req.API) {
			return model
		}
	}
	return ""
}

func isRemote(model string) bool { return strings.HasPrefix(model, config.RemotePrefix) }

// placeAny requests the next placement on engines of the request's model. While no engine
// of that model can take the request, placeAny changes to the next fallback. It does not try
// a remote whose circuit is open, or again for this request. If none of the models has an
// engine, the request waits for the first model as a request without fallbacks does.
func (x *exchange) placeAny() (*coordinator.Placement, error) {
	x.waited = false
	if len(x.env.Models) < 2 {
		return x.placeOrWait()
	}
	for next := x.fallback(); next != ""; next = x.fallback() {
		reason := "no_engine"
		p, err := x.place()
		switch {
		case err == nil && !x.mayFail(p):
			return p, nil
		case err == nil:
			p.Lease.Release()
			reason = "failed"
		case !lacksEngine(err):
			return nil, err
		}
		x.journal.Fallback("model", reason)
		if err := x.serveWith(next); err != nil {
			return nil, err
		}
	}
	p, err := x.placeRunning()
	if err == nil && isRemote(x.req.Model) && x.mayFail(p) {
		p.Lease.Release()
		p, err = nil, coordinator.ErrUnknownModel
	}
	if errors.Is(err, coordinator.ErrUnknownModel) { // the configuration knows the name
		err = &coordinator.NoTargetError{Model: x.requested()}
	}
	if !lacksEngine(err) || x.env.Config.Limits.NoEngineTimeout == 0 {
		return p, err
	}
	if err := x.serveWith(x.env.Models[0]); err != nil {
		return nil, err
	}
	return x.placeOrWait()
}

// mayFail reports whether the coordinator had only targets for p that have failed in this
// request, or whose circuit is open. The trial of a half-open circuit is no such target.
func (x *exchange) mayFail(p *coordinator.Placement) bool {
	now := time.Now()
	for _, t := range [...]engine.Target{p.Prefill, p.Decode} {
		if !t.IsZero() && (slices.Contains(x.ask.Excluded, t) || t.Breaker.Circuit(now) == circuit.Open && !isTrial(p, t)) {
			return true
		}
	}
	return false
}

func isTrial(p *coordinator.Placement, t engine.Target) bool {
	row := slices.Index(p.Targets, t)
	return row >= 0 && p.Facts.Candidates[row].Trial
}

// stayWith makes a request that continues a stored response one for the model of its holder
// if a split has chosen another one.
func (x *exchange) stayWith(holder *engine.Instance) error {
	route := x.run.Models().Route(x.journal.RequestedModel())
	if route == nil || slices.Contains(holder.Models(), x.req.Model) {
		return nil
	}
	for _, model := range route.Models() {
		if slices.Contains(holder.Models(), model) {
			x.env.Models = route.ChoiceOf(model)
			return x.serveWith(model)
		}
	}
	return nil
}

// serveWith makes the request one for another of its models. No leg of it may run.
func (x *exchange) serveWith(model string) error {
	if err := x.rename(model); err != nil {
		return err
	}
	x.journal.Stage(telemetry.StageNone) // in the gauges of the old model
	x.meter()
	x.journal.Stage(telemetry.StageRuns)
	x.env.OtherModel()
	x.ask.Aggregate, x.ask.Same, x.ask.Lookup = 0, coordinator.Pair{}, coordinator.Lookup{}
	x.ask.Request = abi.RequestFacts{}
	return x.describe()
}
