// Package connector holds the proxy's half of each engine's KV-transfer
// protocol, one file per engine protocol. A connector is pure: it turns a client
// request, a placement, a disagg id and the other leg's answer into the bytes
// of a leg, and does no I/O. Nothing here keeps state; all values may be used by
// many exchanges at once.
//
// Bodies are spliced, never decoded: what a leg is sent is the client's bytes
// with a few members cut out or put in, and what one engine says for the other
// (block ids, 64-bit ids, opaque state) is carried over byte for byte.
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

// Attempt is what a connector may know of one attempt at a request. A retry is
// another Attempt with another ID and LegID.
type Attempt struct {
	Request *openai.Request // the client's body, scanned; PD fields are cut out by the connector
	ID      uint64          // the disagg id, in [abi.MinDisaggID, abi.MaxDisaggID)
	LegID   string          // 32 lower-case hex digits, unique per attempt, the same on both legs
	Prefill engine.Target   // zero when aggregated
	Decode  engine.Target   // also the target of an aggregated leg
	Trust   bool            // the client's own PD fields pass (server.trust_pd_fields)
	Merging bool            // decode's answer is completed from prefill's, see Merger
	// Turn is the raw Kept.Params of KV, of a prefix of the prompt, that prefill is to
	// pull instead of computing it; empty for none.
	Turn []byte
	// TRTLLM is what the operator asks of the trtllm connector.
	TRTLLM TRTLLM
	// Flow is the order of this attempt's legs: that of the connector, or what its
	// Order says.
	Flow abi.Flow
	// Conversation names the request's conversation for engines whose protocol has
	// a field for it; "" for none.
	Conversation string
}

// Leg is one call as bytes. Header holds only what the connector adds; the
// exchange puts the client's own lines, less PD fields, before them.
type Leg struct {
	Path   string
	Header []Field
	Body   []byte // appended to the buffer that the caller gave, unless Alias
	Alias  bool   // Body is the client's own body, not to be written to, kept or reused as a buffer
	// Msgpack says that the body is to be sent as AppendMsgpack writes it, with
	// HeaderMsgpack.
	Msgpack bool
	Unary   bool // the answer is one JSON object, whatever the client asked for
}

// Handoff is what prefill's answer means for decode. Its byte slices alias the
// answer.
type Handoff struct {
	// Done: prefill's answer is the whole answer (its first token ended the
	// text) and no decode leg is sent, or the one beside it is ended; Answer is
	// what the client gets, an SSE stream for a client that asked for one.
	Done   bool
	Answer []byte
	// Fallback is a reason to count when decode will work without the
	// transferred KV; "" is the normal case. no_kv_params: prefill gave nothing
	// to transfer by; no_kv_blocks: it gave an empty list of blocks;
	// incomplete_kv_params: it did not say where the blocks are; ForeignHost.
	Fallback string
	// Pinned says that prefill holds KV blocks for a decode that has not come.
	Pinned bool
	// Lease is how long it holds them from now on unless decode, once it has the
	// request, renews that. Who reads them later reads whatever is there then, and
	// nobody notices. 0: until they are read or freed.
	Lease time.Duration
	// Params is the raw JSON object that decode needs; its meaning is the
	// connector's own.
	Params []byte
	// Prompt is the raw prompt as prefill read it (token ids, or base64 of
	// them) where decode is to have that instead of the text; else empty.
	Prompt []byte
	// Usage is prefill's raw usage object where decode is to report it; else
	// empty.
	Usage []byte
	// Extra is what a Merger completes decode's answer from; else empty.
	Extra []byte
}

// Orphan says how far an attempt had come when it ended badly, so that the
// connector can say what the engines may still hold.
type Orphan struct {
	PrefillSent bool     // the prefill leg may have reached its engine
	PrefillDone bool     // prefill answered whole
	Refused     bool     // prefill answered with an error status: it holds nothing, as far as Dated can help it
	DecodeSent  bool     // the decode leg may have reached its engine
	DecodeEnded bool     // decode answered with an error status, or broke the connection: it waits for nothing
	DecodeTook  bool     // decode's first event or whole answer came: it has read the KV
	DecodeOver  bool     // decode's connection broke, or it answered with a status of 5xx: it will not read the KV
	Handoff     *Handoff // prefill's answer as judged; nil when there is none
}

// Until says when a clean-up call has done its work.
type Until uint8

// The ends of a clean-up call.
const (
	UntilAnswer  Until = iota // the answer is read whole
	UntilHead                 // the connection is closed as soon as the answer's head is there: the engine aborts
	UntilEvent                // the same as soon as the first event of its stream is there
	UntilRefused              // the answer is a status of 4xx: refusing the call is what frees
	UntilServed               // the answer is read whole, however long prefill takes; only an engine that asks for it is called again
)

// Cleanup is one call that makes an engine free what a dead exchange left. With
// an empty Leg.Path nothing can be sent and How is only counted.
type Cleanup struct {
	Phase     abi.Phase // whose engine is called
	AnyTarget bool      // any ready engine of that phase and group will do
	// Hosts are those at which the call has its engine look for another, which an
	// answer named: only engines get it for which they are that other's own.
	Hosts []string
	Leg   Leg
	Until Until
	// Restarted says that the call is made only if the decode engine of the attempt is
	// found to be another process than when the attempt began: while that process
	// lives the engines settle the transfer, and the call would do harm.
	Restarted bool
	// Hold is how long the engine keeps the memory if nothing frees it; 0: at most 30 s.
	Hold time.Duration
	How  string // label of pdproxy_kv_cleanups_total: abort_decode, abort_rid, engine_timeout, forget_turn, prefill_again, refused_decode, same_id
}

// Connector is one engine protocol. All methods are pure and safe for
// concurrent use. dst is an empty slice with capacity to append the body to; a
// leg's body may also alias the client's.
type Connector interface {
	engine.Protocol

	// Name is the connector's name in the configuration.
	Name() string
	// Flow is the order of the two legs.
	Flow() abi.Flow
	// Pairable reports, as an *openai.Error that names the field, why the
	// request's form cannot be carried as two legs.
	Pairable(r *openai.Request) error
	// AggregatesOn is the set of phases whose engines, besides those of role
	// both, answer a plain request rightly; used for requests that are not
	// Pairable.
	AggregatesOn() abi.Role
	// Serves reports whether the protocol carries this API at all; false is
	// answered with 501.
	Serves(api openai.API) bool

	// Aggregated shapes the one leg of an aggregated request.
	Aggregated(a *Attempt, dst []byte) (Leg, error)
	// Prefill shapes the prefill leg of a request that is Pairable.
	Prefill(a *Attempt, dst []byte) (Leg, error)
	// ReadPrefill judges prefill's answer with a 2xx status, for the decode target
	// of a: for another it is judged again. An error means that the engine broke the
	// protocol: the leg failed.
	ReadPrefill(a *Attempt, body []byte) (Handoff, error)
	// Decode shapes the decode leg; h is nil for concurrent legs.
	Decode(a *Attempt, h *Handoff, dst []byte) (Leg, error)
	// Public is decode's whole answer with a 2xx status less what it says of the
	// transfer; the answer itself where that is nothing.
	Public(a *Attempt, answer []byte) []byte
	// Reclaims reports that prefill's answer lets Cleanup free what prefill holds,
	// so that it is worth waiting for even when the client has left.
	Reclaims() bool
	// Cleanup lists the calls that free what o left on the engines. Once decode
	// took over, the client's body is gone: only ids and targets may be read.
	Cleanup(a *Attempt, o Orphan) []Cleanup
}

// Ordered is a connector whose legs may be sent in another order than Flow's,
// as the operator wants and as the placed engines can. Order gives the order of
// a's legs for a style of retry.schedule_style; a fallback other than "" is the
// reason, to be counted, why it is not the style's.
type Ordered interface {
	Order(a *Attempt, style string) (flow abi.Flow, fallback string)
}

// Dated is a connector whose engines, of some releases, fail on the prefill leg of
// some requests.
type Dated interface {
	// Unfit reports, as an *openai.Error that names the field, why prefill cannot be
	// sent a leg of r, which is Pairable; by its facts. sure is false where it may yet
	// turn out well: the leg is sent then if nobody answers the request whole.
	Unfit(r *openai.Request, prefill *engine.Facts) (sure bool, err error)
}

// Deferrer is a connector whose prefill may answer before decode has said where
// the KV is to be written, so that the transfer may begin late.
type Deferrer interface{ Defers() bool }

// Merger is a connector of concurrent legs that, for some requests, answers with
// what only prefill knows put into decode's answer. Its methods are pure and safe
// for concurrent use.
type Merger interface {
	// Merges reports whether r is such a request. Its client gets nothing before
	// prefill has answered.
	Merges(r *openai.Request) bool
	// Merge appends decode's whole answer with a 2xx status, or whole events of
	// its stream, completed from prefill's. An error means that an engine broke
	// the protocol.
	Merge(dst []byte, h *Handoff, answer []byte, events bool) ([]byte, error)
}

// Bound is a Connector whose prefill leg names the decode engine to which the KV
// then goes: no other can take the decode leg, before or after.
type Bound interface {
	Connector
	// BindsDecode does nothing; having it is what counts.
	BindsDecode()
}

// PinsDecode reports whether c is a Bound.
func PinsDecode(c Connector) bool {
	_, pins := c.(Bound)
	return pins
}

// ErrBadReply is what ReadPrefill's errors wrap: an engine that answered with
// success, but not what its protocol promises. Their text holds nothing of the
// answer.
var ErrBadReply = errors.New("bad prefill answer")

// ForeignHost is the fallback where prefill's answer would have decode call a host
// at which prefill is not known to be (engine.Instance.Owns): decode is not told
// of it, and computes the prompt itself.
const ForeignHost = "foreign_host"

func badReply(problem string) error { return fmt.Errorf("%w: %s", ErrBadReply, problem) }

// errNoTwoLegs says that a connector without a transfer was asked for a leg of
// a pair.
var errNoTwoLegs = errors.New("the connector transfers no KV: there are no two legs")

// All lists the connectors in the order in which documentation names them.
func All() []Connector {
	return []Connector{nixl{}, nixlPush{}, vllmStore{}, moriio{}, moriio{read: true}, mooncake{}, p2pNCCL{}, p2pTier{}, sglang{}, trtllm{}, none{}}
}

// ByName returns the connector of that name in the configuration.
func ByName(name string) (Connector, bool) {
	for _, c := range All() {
		if c.Name() == name {
			return c, true
		}
	}
	return nil, false
}
