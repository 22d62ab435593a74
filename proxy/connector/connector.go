// Package connector holds the proxy's side of each engine's KV-transfer protocol, one
// file per protocol. A connector is pure: it builds the bytes of a leg from a client
// request, a placement, a disagg id and the answer of the other leg. It does no I/O. The
// package has no state. All values are safe for concurrent use.
//
// Connectors splice bodies and do not decode them: a leg's body consists of the client's
// bytes with a few members removed or inserted. Values in the answer of one engine that
// are meant for the other engine (block ids, 64-bit ids, opaque state) are copied byte
// for byte.
//
// The decisions behind this package are in docs/design/connectors.md.
package connector

import (
	"errors"
	"fmt"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Field is one header line of a leg.
type Field = upstream.Field

// Attempt has the facts of one attempt at a request that a connector needs. A retry is
// another Attempt with another ID and LegID.
type Attempt struct {
	Request *openai.Request // the client's body, scanned; the connector cuts out its PD fields
	ID      uint64          // the disagg id, in [abi.MinDisaggID, abi.MaxDisaggID)
	LegID   string          // 32 lower-case hex digits, unique per attempt, the same on both legs
	Prefill engine.Target   // zero if aggregated
	Decode  engine.Target   // also the target of an aggregated leg
	Trust   bool            // the client's own PD fields are kept (server.trust_pd_fields)
	Merging bool            // decode's answer is completed from prefill's: see Merger
	// RetainedKV is the raw Retained.Params of KV for a prefix of the prompt. Prefill
	// pulls that KV instead of computing it. Empty if there is none.
	RetainedKV []byte
	// TRTLLM holds the operator's settings for the trtllm connector.
	TRTLLM TRTLLM
	// Flow is the order of this attempt's legs: the connector's own, or that of Order.
	Flow abi.Flow
	// Priority is the raw JSON of the field "priority" of the next leg; nil: the leg has the
	// client's field.
	Priority []byte
	// Conversation is the name of the request's conversation, for engines whose
	// protocol has a field for it; "" if unknown. Only a Configurer gets it.
	Conversation string
	// ReturnIDs asks the engine of the next leg for the token ids of its events.
	ReturnIDs bool
	// PromptIDs is the raw list of the token ids that are the prompt, in the place of its text;
	// nil: the text is. Only vLLM's engines read it.
	PromptIDs []byte
}

// Leg is one call as bytes. Header holds only the connector's lines. The exchange puts
// the client's own lines, without PD fields, before them.
type Leg struct {
	Path   string
	Header []Field
	Body   []byte // appended to the caller's buffer, unless Alias
	Alias  bool   // Body is the client's own body: it must not be written to, kept or reused as a buffer
	Unary  bool   // the answer is one JSON object, even if the client requested a stream
}

// Handoff is the meaning of prefill's answer for decode. Its byte slices alias the
// answer.
type Handoff struct {
	// Done: prefill's answer is the whole answer, because its first token ended the text.
	// The proxy sends no decode leg and ends a concurrent decode leg. Answer is the
	// client's answer, an SSE stream if the client requested a stream.
	Done   bool
	Answer []byte
	// Fallback is the reason why decode works without transferred KV, as the label of a
	// counter; normally "". no_kv_params: prefill's answer has no transfer parameters.
	// no_kv_blocks: its list of blocks is empty. incomplete_kv_params: the address of the
	// blocks is missing. Also ForeignHost.
	Fallback string
	// Pinned: prefill holds KV blocks for a decode leg that has not begun.
	Pinned bool
	// Lease is how long prefill holds the blocks from now on. A decode engine that reads
	// the blocks later reads other data, and no engine detects that. 0: prefill holds
	// them until they are read or freed.
	Lease time.Duration
	// RefusalFrees: a decode engine that refuses its leg makes prefill free the blocks. Another
	// decode engine would then read other data, and no engine detects that.
	RefusalFrees bool
	// Renews: decode renews the lease once it has the request.
	Renews bool
	// Params is the raw JSON object that decode needs. Only the connector interprets it.
	Params []byte
	// Prompt is the raw list of the prompt's token ids if decode gets it instead of the
	// text; else empty.
	Prompt []byte
	// Usage is prefill's raw usage object if decode reports it; else empty.
	Usage []byte
	// Extra is the data from which a Merger completes decode's answer; else empty.
	Extra []byte
}

// Orphan is the progress of a failed attempt. From it the connector derives which
// resources the engines may still hold.
type Orphan struct {
	PrefillSent  bool     // the prefill leg may have reached its engine
	PrefillDone  bool     // prefill's whole answer has arrived
	Refused      bool     // prefill answered with an error status: it holds no blocks, except in the cases that Dated prevents
	DecodeSent   bool     // the decode leg may have reached its engine
	DecodeIdle   bool     // decode answered with an error status, or broke the connection: it does not wait for KV
	KVRead       bool     // decode's first event or whole answer has arrived: it has read the KV
	DecodeFailed bool     // decode's connection broke, or it answered with a 5xx status: it will not read the KV
	Handoff      *Handoff // prefill's answer as read by ReadPrefill; nil if there is none
}

// Until is the condition under which a clean-up call is complete.
type Until uint8

// The ends of a clean-up call.
const (
	UntilAnswer  Until = iota // the whole answer is read
	UntilHead                 // the head of the answer is there; closing the connection then makes the engine abort
	UntilEvent                // the first content of the stream is there; closing the connection then makes the engine abort
	UntilRefused              // the answer has a status that blames the request (upstream.RequestAtFault): the engine frees by rejecting the call
	UntilServed               // the proxy has read the whole answer, without a time limit for prefill; the proxy repeats the call only if the engine's answer requests this
)

// Cleanup is one call that makes an engine free the resources of a failed attempt. If
// Leg.Path is empty, no call is possible and the proxy only counts How.
type Cleanup struct {
	Phase     abi.Phase // phase of the engine that is called
	AnyTarget bool      // any ready engine of that phase and group may be called
	// Hosts are the hosts of another engine, as an answer named them, that the called
	// engine will connect to. Only an engine for which these hosts belong to that other
	// engine may be called.
	Hosts []string
	Leg   Leg
	Until Until
	// Restarted: the proxy makes the call only if the attempt's decode engine has
	// restarted since the attempt began. While the old process runs, the engines finish
	// or cancel the transfer without a call, and the call would do harm.
	Restarted bool
	// Hold is how long the engine keeps the memory if no call frees it; 0: at most 30
	// s.
	Hold time.Duration
	How  string // label of pdproxy_kv_cleanups_total: abort_decode, abort_rid, engine_timeout, forget_turn, prefill_again, refused_decode
}

// Connector is one engine protocol. All methods are pure and safe for concurrent use.
// dst is an empty slice; a leg's body is appended to it, or aliases the client's body.
type Connector interface {
	engine.Protocol

	// Name is the connector's name in the configuration.
	Name() string
	// Flow is the order of the two legs.
	Flow() abi.Flow
	// Pairable returns an *openai.Error that names a field if the request's form cannot
	// be sent as two legs.
	Pairable(r *openai.Request) error
	// AggregatesOn is the set of phases whose engines answer a plain request correctly,
	// besides engines of role both. It is used for requests that are not Pairable.
	AggregatesOn() abi.Role
	// Serves reports whether the protocol supports this API. If not, the proxy answers
	// 501.
	Serves(api openai.API) bool

	// Aggregated builds the one leg of an aggregated request.
	Aggregated(a *Attempt, dst []byte) (Leg, error)
	// Prefill builds the prefill leg of a request that is Pairable.
	Prefill(a *Attempt, dst []byte) (Leg, error)
	// ReadPrefill interprets prefill's answer with a 2xx status, for the decode target
	// of a. It is called again if the target changes. An error means that the engine
	// broke the protocol: the leg failed.
	ReadPrefill(a *Attempt, body []byte) (Handoff, error)
	// Decode builds the decode leg; h is nil for concurrent legs.
	Decode(a *Attempt, h *Handoff, dst []byte) (Leg, error)
	// Public returns decode's whole answer, which had a 2xx status, without its
	// transfer data. If there is no such data it returns answer itself.
	Public(a *Attempt, answer []byte) []byte
	// Reclaims reports whether Cleanup needs prefill's answer to free prefill's KV. In
	// that case the proxy waits for the answer even if the client has left.
	Reclaims() bool
	// Cleanup lists the calls that free the resources that o left on the engines. After
	// decode has begun to answer, the client's body is no longer available: Cleanup then
	// reads only ids and targets.
	Cleanup(a *Attempt, o Orphan) []Cleanup
}

// Ordered is a connector whose legs may be sent in another order than that of Flow, if
// the operator wants it and the placed engines support it. Order returns the order of
// a's legs for a style of trtllm.schedule_style. A fallback other than "" is the reason,
// for a counter, why that order is not the style's.
type Ordered interface {
	Order(a *Attempt, style string) (flow abi.Flow, fallback string)
}

// Dated is a connector with engine releases that fail on a leg of some requests.
type Dated interface {
	// Unfit returns an *openai.Error if the engine t, by its facts, cannot serve the leg of r in
	// this phase, and the reason for a counter. r is Pairable. sure is false if the leg may
	// succeed: the proxy sends the leg if no engine serves the request whole.
	Unfit(r *openai.Request, phase abi.Phase, t engine.Target) (reason string, sure bool, err error)
}

// Deferrer is a connector whose prefill may answer before decode has registered the
// blocks for the KV. The transfer may then begin after prefill's answer.
type Deferrer interface{ Defers() bool }

// Merger is a connector of concurrent legs that, for some requests, copies data of
// prefill's answer into decode's answer. Its methods are pure and safe for concurrent
// use.
type Merger interface {
	// Merges reports whether r is such a request. Its client gets no byte before
	// prefill has answered.
	Merges(r *openai.Request) bool
	// Merge appends decode's whole answer, which had a 2xx status, or whole events of
	// its stream, completed from prefill's answer. An error means that an engine broke
	// the protocol.
	Merge(dst []byte, h *Handoff, answer []byte, events bool) ([]byte, error)
}

// Waiter is a connector of concurrent legs whose decode engine holds its blocks without end if prefill
// does not write to them. While prefill computes, its Cleanup therefore has a call with UntilServed.
type Waiter interface {
	Connector
	// WaitsWithoutEnd marks the connector and does nothing.
	WaitsWithoutEnd()
}

// WaitsWithoutEnd reports whether c is a Waiter.
func WaitsWithoutEnd(c Connector) bool {
	_, waits := c.(Waiter)
	return waits
}

// Tokened is a connector whose engines take the token ids of a prompt in text, and then do not
// tokenize the text.
type Tokened interface {
	// TakesIDs reports whether the engine t takes [Attempt.PromptIDs] in a leg of r.
	TakesIDs(r *openai.Request, t engine.Target) bool
	// AnswersIDs reports whether the whole answer to a leg of r with [Attempt.ReturnIDs] has the
	// token ids of the prompt.
	AnswersIDs(r *openai.Request) bool
}

// Unverified is a connector of concurrent legs whose decode engine may answer with KV that prefill
// never computed. If prefill answers with an error, the answer of decode is wrong, even if it has
// begun.
type Unverified interface {
	Connector
	// ComputesUnverified marks the connector and does nothing.
	ComputesUnverified()
}

// ComputesUnverified reports whether c is an Unverified.
func ComputesUnverified(c Connector) bool {
	_, unverified := c.(Unverified)
	return unverified
}

// Recounter is a connector whose decode engine counts the transferred KV as cached tokens. The
// number of prefill's answer is that of the request.
type Recounter interface {
	Connector
	// CountsTransferred marks the connector and does nothing.
	CountsTransferred()
}

// ErrBadReply is wrapped by errors of ReadPrefill: an engine answered with success, but
// against its protocol. The error texts contain nothing of the answer.
var ErrBadReply = errors.New("bad prefill answer")

// ForeignHost is the fallback if prefill's answer names a host at which prefill is not
// known to be (engine.Instance.Owns). Decode does not get the host, and computes the
// prompt itself.
const ForeignHost = "foreign_host"

func badReply(problem string) error { return fmt.Errorf("%w: %s", ErrBadReply, problem) }

// errNoTwoLegs is the error of a connector without a transfer for a leg of a pair.
var errNoTwoLegs = errors.New("the connector transfers no KV: there are no two legs")

// Remote returns the connector of [[remote]].
func Remote() Connector { return remote{} }

// Configurer is implemented by connectors with settings of the operator, and by those that send the
// name of the conversation.
type Configurer interface {
	// Configure sets the settings in an attempt, which keeps them for all its legs.
	Configure(a *Attempt)
}

// All lists the connectors of engines in the order of the documentation.
func All() []Connector { return Configured(TRTLLM{}) }

// Configured is All with the operator's settings for the trtllm connector.
func Configured(t TRTLLM) []Connector {
	return []Connector{nixl{}, nixlPush{}, vllmStore{}, moriio{}, moriio{read: true}, mooncake{}, p2pTier{}, sglang{}, trtllm{settings: t}, none{}}
}

// ByName returns the connector of that name in the configuration.
func ByName(name string) (Connector, bool) {
	if name == (remote{}).Name() {
		return remote{}, true
	}
	for _, c := range All() {
		if c.Name() == name {
			return c, true
		}
	}
	return nil, false
}
