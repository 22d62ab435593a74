package attempt

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Gateway is another program that sends the request to the engines itself, and shows this
// process the answer. The goroutine of the exchange calls the methods, in this order.
type Gateway interface {
	// Within returns the instances that a placement may use.
	Within() coordinator.Within
	// Forward tells the gateway where the request goes. f is valid until Forward returns.
	// After an error the gateway may have sent the request.
	Forward(f *Forwarding) error
	// Head waits for the head of the answer, until ctx ends. The caller then begins the client's
	// answer, and the gateway passes its header lines on. If ctx ends before the head, the gateway sends
	// the caller's answer instead.
	Head(ctx context.Context) (GatewayHead, error)
	// Next returns the next bytes of the answer's body, which are valid until the next
	// call, and io.EOF after the last ones. The client gets them before Next returns.
	Next(ctx context.Context) ([]byte, error)
	// Used tells the gateway what the answer has cost, after the call of Next that has returned
	// its last bytes. If the proxy ends the request before, Used has the cost until then: it comes before
	// Stop, or before the caller's answer if the head has not come.
	Used(Used)
	// Stop ends the answer, which has begun, before its end: with a last event if the gateway shows
	// bodies and event is not empty. Otherwise the client gets e if it has no byte of the answer, else a
	// cut of its connection.
	Stop(e *openai.Error, event []byte)
}

// Used is the cost of an answer.
type Used struct {
	Engine string // that has answered; "": an unknown one
	// Prompt and Completion are tokens: those that the engine reports, or else estimates. Cached is
	// the number of prompt tokens that were in a cache. -1: not known.
	Prompt, Completion, Cached int64
}

// Forwarding is what the gateway sends.
type Forwarding struct {
	Decode   engine.Target   // gets the request
	Prefill  engine.Target   // computes the prompt for Decode; zero: no other engine does
	Encoders []engine.Target // encode the request's images and sounds
	Spare    []engine.Target // engines that could take the place of Decode, best first
	Path     string          // on Decode
	Query    string          // of the client's request; "": none, or Path has it
	Header   []upstream.Field
	Body     []byte

	Model, Tenant, Class string // of the request; "": none
}

// GatewayHead is the head of an answer that the gateway shows.
type GatewayHead struct {
	Status int
	Events bool // the body is a stream of events
	// RetryAfter is the value of that header line.
	RetryAfter string
	// Other: another endpoint than that of Forwarding.Decode has answered, because the gateway
	// could not use the first one. Engines are the known engines of that endpoint.
	Other   bool
	Engines []*engine.Instance
	// Hidden: the gateway does not show the body, or nobody reads it.
	Hidden bool
}

// observe carries out the placement by the gateway: the gateway sends the request, and observe reads
// the answer only for the records, the load and the health of the engine. An error means that the
// gateway has not shown the end of an answer; nothing may be retried then.
func (a *attempt) observe() error {
	env, p, g := a.env, a.p, a.env.Gateway
	spare := a.spare()
	env.Journal.Placed(p, env.Ask.Request.PromptTokens)
	f, err := a.forwarding(spare)
	if err != nil {
		return err
	}
	l := env.beginLeg(abi.Decode, p.Decode, 1, a.c.LegID)
	if err := g.Forward(f); err != nil {
		return a.legEnded(env.Context, l, err)
	}
	a.decodeSent = true
	a.releaseRequest()
	head, err := g.Head(env.Context)
	if err != nil {
		if env.evicted() {
			g.Used(a.usedBeforeHead())
		}
		return a.legEnded(env.Context, l, err)
	}
	env.Journal.LegAnswered(&l.Leg, head.Status)
	head.Hidden = head.Hidden || env.Request.Opaque // nothing is known about its answer either
	o := &observation{a: a, l: l, g: g, head: head, start: env.Request.StreamHead()}
	o.events.Reasons = env.Journal.Span != nil
	if head.Other {
		o.leaveEngine()
		return nil
	}
	return o.begin()
}

// usedBeforeHead returns the cost of a request whose answer has not begun. The engine may have computed a
// part of the prompt.
func (a *attempt) usedBeforeHead() Used {
	u := Used{Engine: a.p.Decode.Spec.Name, Prompt: a.env.Ask.Request.PromptTokens, Completion: -1, Cached: -1}
	if a.env.Request.Stream {
		u.Completion = 0
	}
	return u
}

// spare returns the other candidates for the phase of Decode, those with the fewest tokens
// first. With a prefill engine they are in its group, because the gateway sends the same name of
// the prefill engine to each of them.
func (a *attempt) spare() []engine.Target {
	n := a.env.Config.EPP.Fallbacks
	if n == 0 {
		return nil
	}
	type row struct {
		engine.Target
		tokens int64
	}
	role := abi.RoleDecode
	if a.p.Flow == abi.FlowAggregated {
		role = abi.RoleBoth
	}
	prefill := slices.Index(a.p.Targets, a.p.Prefill)
	var rows []row
	for i, c := range a.p.Facts.Candidates {
		if prefill >= 0 && c.Group != a.p.Facts.Candidates[prefill].Group {
			continue
		}
		if t := a.p.Targets[i]; c.Roles&role == role && t.Instance != a.p.Decode.Instance && t.Instance != a.p.Prefill.Instance {
			rows = append(rows, row{t, c.Tokens})
		}
	}
	slices.SortStableFunc(rows, func(a, b row) int { return cmp.Compare(a.tokens, b.tokens) })
	var list []engine.Target
	for _, r := range rows {
		if len(list) < n && !slices.ContainsFunc(list, func(t engine.Target) bool { return t.Instance == r.Instance }) {
			list = append(list, r.Target)
		}
	}
	return list
}

// forwarding returns the request as its engine gets it. With a prefill engine that is a
// sidecar, which makes the two legs.
func (a *attempt) forwarding(spare []engine.Target) (*Forwarding, error) {
	env := a.env
	f := &Forwarding{
		Decode: a.p.Decode, Prefill: a.p.Prefill, Spare: spare, Path: env.Request.Path(), Header: env.Fields,
		Model: cmp.Or(env.Request.Model, env.Ask.Model), Tenant: env.Tenant,
	}
	if env.Class != nil {
		f.Class = env.Class.Name
	}
	if pool := a.encoderPool(); pool != nil && len(a.conn.(connector.Encoder).Encode(&a.c)) > 0 {
		f.Encoders = env.encoders(pool, a.p.Decode.Spec.Connector)
	}
	if env.Request.Target == "" {
		f.Query = env.Client.URL().RawQuery
	}
	if env.Request.Opaque {
		a.passOn(f)
		return f, nil
	}
	body, err := a.answerBody()
	if err != nil {
		return nil, err
	}
	shaped, err := a.conn.Aggregated(&a.c, body)
	if err != nil {
		return nil, err
	}
	if f.Body = shaped.Body; !shaped.Alias {
		a.legBody.Set(shaped.Body)
	}
	if a.p.Prefill.IsZero() && a.p.Decode.Spec.Endpoint == "" {
		f.Path = a.p.Decode.Prefix + shaped.Path
	}
	defer func() { env.Fields = f.Header }() // Reset clears them
	for _, h := range shaped.Header {
		if !strings.EqualFold(h.Name, "X-Request-Id") { // the gateway's own stays
			f.Header = append(f.Header, h)
		}
	}
	if a.p.Decode.APIKey != "" {
		f.Header = withKey(f.Header, a.p.Decode.Instance)
	}
	return f, nil
}

// passOn completes f for a request whose body the proxy does not know.
func (a *attempt) passOn(f *Forwarding) {
	f.Body = a.env.Client.Body()
	if f.Decode.Spec.Endpoint == "" {
		f.Path = f.Decode.Prefix + f.Path
	}
	if f.Decode.APIKey != "" {
		f.Header = withKey(f.Header, f.Decode.Instance)
		a.env.Fields = f.Header
	}
}
