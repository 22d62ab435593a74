package attempt

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/prompt"
	"github.com/pdproxy/pdproxy/proxy/retained"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Env holds one request and everything that its attempts need. All attempts of a request
// share one Env. The goroutine of the request owns it; a concurrent prefill leg only reads it.
// The caller fills in the exported fields of a zero Env. Reset clears the fields and keeps the
// memory for another request.
type Env struct {
	*Services
	Context context.Context
	Config  *config.Config // the configuration when the request arrived
	Client  *downstream.Client
	Request *openai.Request
	Fields  []upstream.Field // the client's header lines, which every leg carries
	Models  []string         // that may serve the request, the best first; nil: only that of Request
	Ask     *coordinator.PlacementRequest
	Prompt  *prompt.Prompt
	Route   *sidecar.Route
	Journal *journal.Journal
	Hooks   Hooks                 // nil: no leg or finish hook
	Class   *config.PriorityClass // nil: the configuration has no classes
	Key     string                // name of the client's API key; "" without keys
	Tenant  string                // of the client; "" without tenants
	WarmUp  bool                  // no client sent the request
	Gateway Gateway               // sends the request instead of this process; nil: this process sends the legs
	Kept    *Kept                 // of the stream that answers; nil: nothing is kept
	Sent    *atomic.Int64         // events of the answer that have been sent, for other goroutines; nil: none reads it
	// PromptIDs is that of connector.Attempt.
	PromptIDs []byte
	// Answering is called before an answer that is no stream is sent, when its usage is
	// known; nil: none.
	Answering func()

	tries   [abi.Encode + 1]int // legs sent, by phase
	reached bool                // a leg may have reached an engine
	encoded bool                // no encode leg is needed any more
	pulled  bool                // an attempt has looked for the retained KV of the previous turn
	waiting *attempt            // waits for another placement; nil: none
	before  [abi.Encode + 1]int // tries before the stream broke off
	broken  *Broken             // by the running attempt; nil: not
	legs    legs
}

// Tries returns how many legs of a phase have been sent for the request, or since Resume.
func (env *Env) Tries(phase abi.Phase) int { return env.tries[phase] - env.before[phase] }

// Resume begins to count the tries anew, for the legs that continue a stream.
func (env *Env) Resume() { env.before = env.tries }

// Reached reports whether a leg may have reached an engine.
func (env *Env) Reached() bool { return env.reached }

// SkipEncode marks that the request needs no encode leg.
func (env *Env) SkipEncode() { env.encoded = true }

// OtherModel resets the state of earlier legs, and drops the token ids of the prompt, because the
// request now goes to engines of another model.
func (env *Env) OtherModel() {
	env.encoded, env.pulled = false, false
	if env.Prompt.Used {
		env.Prompt.DropTokenIDs()
	}
}

// End ends an attempt that waits for another placement but gets none. It does nothing if there is
// none.
func (env *Env) End() {
	a := env.waiting
	if a == nil {
		return
	}
	env.waiting = nil
	if a.failed == nil { // only a panic leaves such an attempt
		a.failed = ErrPanicked
	}
	a.end(a.failed)
}

// Source returns where the prompt of the request comes from.
func (env *Env) Source() prompt.Source {
	return prompt.Source{Request: env.Request, Header: env.Client.Header(), RequestID: env.Journal.RequestID, Memory: env.Client}
}

// ReleaseBody frees the body of the request and all data made of the body. The request cannot
// be retried afterwards.
func (env *Env) ReleaseBody() {
	env.Request.Object.Reset() // it refers to the bytes
	if env.Prompt.Used {
		env.Prompt.DropTokenIDs()
	}
	env.PromptIDs = nil
	env.Client.ReleaseBody()
}

// trusts reports whether the client coordinates the transfers of KV itself.
func (env *Env) trusts() bool {
	return env.Config.Server.TrustPDFields || env.Route.Restricted && env.Route.CallerCoordinates()
}

// note records that the answer to the client begins.
func (env *Env) note(status int) {
	env.Journal.Status = status
	if env.Config.Server.ExposePlacement {
		env.Journal.Expose(env.Client.AnswerHeader())
	}
}

// Answer sends an answer with its whole body. The error is downstream.ErrWrite.
func (env *Env) Answer(status int, body []byte) error {
	env.note(status)
	return env.Client.WriteBody(status, body)
}

// AnswerReply sends the engine's own answer to a failed leg. e.Reply must not be nil.
func (env *Env) AnswerReply(e *Error) {
	h := env.Client.AnswerHeader()
	for name, values := range e.Reply.header {
		if len(h[name]) == 0 { // otherwise the line is the proxy's own
			h[name] = values
		}
	}
	_ = env.Answer(e.Status, e.Reply.body) // the client may have left
}

// Reset clears the request and keeps the allocated memory.
func (env *Env) Reset() {
	clear(env.Fields)
	for _, one := range env.legs.list[:env.legs.used] { // all legs have ended
		*one = leg{fields: one.fields}
	}
	*env = Env{Fields: env.Fields[:0], legs: legs{list: env.legs.list}}
}

// Hooks are the leg hook and the finish hook of the policies. An implementation must not block
// longer than its own time limit, must not keep the facts after it returns, and must be safe
// for concurrent use.
type Hooks interface {
	// Leg decides about a leg before the leg is sent, and again if the leg fails before the
	// client's first byte. For abi.LegEdited, Leg appends the edits to edits, in the encoding
	// that abi.NextEdit reads, and returns them as list. If there is no usable decision, reason
	// is one of coordinator's Reason constants; the caller counts each reason except
	// ReasonAbsent. Otherwise reason is "".
	Leg(ctx context.Context, f *abi.LegFacts, edits []byte) (d abi.LegDecision, list []byte, reason string)
	// Finish receives the facts of each exchange that has ended. The client's answer ends after
	// Finish has returned.
	Finish(f *abi.FinishFacts)
}

// HookAnswer is the decision of the leg hook about a failed leg. The zero value means that the
// built-in rule applies.
type HookAnswer struct {
	failed   *Error // the failure that the hook has decided about; nil: none
	Decision abi.LegDecision
	Same     coordinator.Pair // the targets of a retry on the same targets; zero: no such retry
}

// Options are the services that all attempts of a process share. All fields are needed.
type Options struct {
	Registry    *engine.Registry
	Coordinator coordinator.Coordinator
	Connector   func(name string) connector.Connector // of a name that the configuration has
	Memory      *buffer.Budget                        // counts the answers that are held
	Cleanups    *cleanup.Runner
	Retained    retained.Store
	Prompts     *prompt.Matcher
	Log         *slog.Logger
}

// Services holds the state that all attempts of a process share. It is safe for concurrent use.
type Services struct {
	Options
	Budget Budget // of retries

	process string        // 16 hex digits, random: the first half of leg ids
	ids     atomic.Uint64 // of legs
	encodes atomic.Uint64 // requests for encoders
	warned  sync.Map      // ids of the prefill engines that warnForeign has warned of
}

// NewServices returns the Services of a process.
func NewServices(o Options) *Services {
	return &Services{Options: o, process: downstream.RandomHex(8)}
}

// LegID returns a new id for one attempt: 32 lower-case hex digits. The width is fixed
// because SGLang aborts by prefix. Ids are unique over processes and restarts.
func (s *Services) LegID() string {
	var id [32]byte
	var n [8]byte
	copy(id[:], s.process)
	binary.BigEndian.PutUint64(n[:], s.ids.Add(1))
	hex.Encode(id[16:], n[:])
	return string(id[:])
}

// warnForeign logs, once for each prefill engine, that its answer names a foreign host.
func (s *Services) warnForeign(prefill engine.Target) {
	if _, warned := s.warned.LoadOrStore(prefill.ID, true); !warned {
		s.Log.Warn("the answer of prefill names a host that is not known to be prefill's; decode does not connect to that host and computes the prompts itself (engine.kv_hosts lists further hosts of an engine)",
			"engine", prefill.Name())
	}
}
