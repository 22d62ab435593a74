package exchange

import (
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/models"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// resolve replaces a name that has a route in the table by the model that serves the request; table
// may be nil. Everything after resolve, except the answers for unknown models and the
// records of the requested name, uses the name of that model.
func (x *exchange) resolve(table *models.Table) error {
	if isRemote(x.req.Model) && len(x.env.Config.Remotes) > 0 {
		return coordinator.ErrUnknownModel // only fallbacks use a remote
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
	x.journal.Requested = x.req.Model
	if route.Name() != models.AnyName { // any other name is only a text of the client
		x.journal.Route = route.Name()
	}
	x.run.Metrics.ModelChosen(route.Name(), x.env.Models[0])
	return x.rename(x.env.Models[0])
}

// takeModel makes the request one for the model that the gateway names in epp.model_header. A name
// in the body that has a route keeps it, as in llm-d (llm-d-router, pkg/epp/requestcontrol,
// director.go). Everything after takeModel, such as the models of the tenant, sees only the new name.
func (x *exchange) takeModel(name string) error {
	if name == "" || x.run.Models().Route(x.req.Model) != nil {
		return nil
	}
	if err := config.CheckModelName(name); err != nil {
		header := x.env.Config.EPP.ModelHeader
		return openai.NewFieldError(openai.CodeBadHeader, header, "the header "+header+" names no model: "+err.Error())
	}
	return x.rename(name)
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
	if name := x.journal.Requested; name != "" {
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

// stayWith makes a request that continues a stored response one for the model of its engine
// if a split has chosen another one.
func (x *exchange) stayWith(i *engine.Instance) error {
	route := x.run.Models().Route(x.journal.Requested)
	if route == nil || slices.Contains(i.Models(), x.req.Model) {
		return nil
	}
	for _, model := range route.Models() {
		if slices.Contains(i.Models(), model) {
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
	x.placing.ask.Aggregate, x.placing.ask.Same, x.placing.ask.Lookup = 0, coordinator.Pair{}, coordinator.Lookup{}
	x.placing.ask.Request = abi.RequestFacts{}
	return x.describe()
}

// meter sets the instruments of the request's model.
func (x *exchange) meter() {
	if model := x.knownModel(); model != "" {
		x.journal.Meter = x.run.Metrics.Model(model)
	}
}

// knownModel returns the model that the client named, or the only one if it named none. It
// returns "" for a model that no engine has served: the name is then only a text of the
// client.
func (x *exchange) knownModel() string {
	s := x.run.Registry.Snapshot()
	if x.req.Model != "" {
		if s.Knows(x.req.Model) {
			return x.req.Model
		}
		return ""
	}
	if p, _ := s.Only(); p != nil {
		return p.Model
	}
	return only(s)
}

// chooseModel chooses the model of a request that names none and that any engine may serve: that of a
// random engine that is ready and that the gateway may use. Each engine has the same chance.
func (x *exchange) chooseModel() error {
	snapshot := x.run.Registry.Snapshot()
	if _, pools := snapshot.Only(); pools < 2 {
		return nil
	}
	within, ready := x.gateway.Within().Whole, 0
	for _, i := range snapshot.Instances {
		if i.State() != engine.Ready || i.Role&abi.RoleDecode == 0 || len(i.Models()) == 0 || within != nil && !slices.Contains(within, i) {
			continue
		}
		if ready++; rand.IntN(ready) == 0 {
			x.placing.ask.Model = i.Models()[0]
		}
	}
	if ready == 0 {
		return &coordinator.NoTargetError{}
	}
	return nil
}

// only returns the model if the registry has known exactly one, else "".
func only(s *engine.Snapshot) string {
	if known := s.Known(); len(known) == 1 {
		return known[0]
	}
	return ""
}
