package connector

import (
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// sglang is SGLang's disaggregation, whatever the transfer backend: prefill and
// decode get the same request at once, with the address of prefill's bootstrap
// registry and a room in which they meet. Nothing that prefill answers shapes
// decode; its answer says that the KV has arrived.
//
// Sources, in SGLang: srt/managers/io_struct.py GenerateReqInput (the fields),
// srt/disaggregation/common/conn.py (rooms, ranks, what must be equal on both
// sides), srt/disaggregation/prefill.py and decode.py.
type sglang struct{}

// sglangBootstrapPort is the default of --disaggregation-bootstrap-port.
const sglangBootstrapPort = 8998

func (sglang) Name() string   { return "sglang" }
func (sglang) Flow() abi.Flow { return abi.FlowConcurrent }

// AggregatesOn adds none to the engines of role both: prefill and decode engines
// refuse a request without a room.
func (sglang) AggregatesOn() abi.Role { return 0 }

// Serves is the three routes whose schemas have the fields of the transfer, and
// those that one engine answers.
func (sglang) Serves(api openai.API) bool {
	switch api {
	case openai.Completions, openai.Chat, openai.Generate,
		openai.Embeddings, openai.Tokenize, openai.Detokenize:
		return true
	default:
		return false
	}
}

// Pairable refuses, besides several samples of a prompt, which share a room,
// prompts of which the engine may see another number than the legs do, and log
// probabilities of the prompt in a form that cannot be merged: only prefill
// knows them.
func (sglang) Pairable(r *openai.Request) error {
	if field := uncounted(r); field != "" {
		return notPairable(field, "'"+field+"' in this form cannot be split into prefill and decode, and no engine here serves the request whole.")
	}
	if !carriesBatch(r) {
		if err := oneSequence(r); err != nil {
			return err
		}
	}
	if field := promptLogprobs(r); field != "" {
		return notPairable(field, "'"+field+"' asks for log probabilities of the prompt, which decode does not have, and no engine here serves the request whole.")
	}
	return nil
}

// promptLogprobs names the member that asks for log probabilities of the prompt
// in such a form, "" for none.
func promptLogprobs(r *openai.Request) string {
	switch r.API {
	case openai.Completions:
		if echo, _ := r.Get("echo"); string(echo) == "true" && isSet(r, "logprobs") {
			return "logprobs"
		}
	case openai.Generate: // merged, but for the forms that are no lists
		for _, key := range [...]string{"return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64"} {
			if v, _ := r.Get(key); string(v) == "true" {
				return key
			}
		}
	default: // chat has log probabilities of its answer only
	}
	return ""
}

// Aggregated is for engines of role both, which run without disaggregation.
func (sglang) Aggregated(a *Attempt, dst []byte) (Leg, error) {
	if a.Decode.Spec.Ranks <= 1 {
		return plain(a, dst), nil
	}
	var rank [20]byte
	room := [editRoom]openai.Edit{
		{Key: "routed_dp_rank", Value: strconv.AppendInt(rank[:0], int64(a.Decode.Rank), 10)},
	}
	return spliced(a, dst, cutPD(room[:1], a)), nil
}

// Prefill is not streamed, so that a failure has its own status and the answer
// comes when the transfer has ended; unless the body is to stay as it is.
func (sglang) Prefill(a *Attempt, dst []byte) (Leg, error) {
	m := a.meet(true)
	if byHeader(a, a.Prefill) && !(a.Merging && a.Request.Stream) { // a stream is not merged from
		leg := m.override(a)
		leg.Unary = !a.Request.Stream
		return leg, nil
	}
	leg := m.splice(a, dst, true)
	leg.Unary = true
	return leg, nil
}

// ReadPrefill looks whether the engine gave up: an abort without a status of
// its own comes as a success.
func (sglang) ReadPrefill(a *Attempt, body []byte) (Handoff, error) {
	if n := batch(a.Request); n > 0 {
		return readBatch(a, n, body)
	}
	if a.Request.Stream && len(body) > 0 && !isObject(body) {
		return Handoff{}, readStream(body)
	}
	for _, path := range [...][]string{
		{"choices", "0", "finish_reason"},
		{"meta_info", "finish_reason", "type"},
	} {
		reason, ok, err := openai.Lookup(body, path...)
		switch {
		case err != nil:
			return Handoff{}, badReply(err.Error())
		case ok && !openai.IsNull(reason) && reason[0] != '"':
			return Handoff{}, badReply("the finish reason is no text")
		case ok && isAbort(reason):
			return Handoff{}, badReply("the engine aborted the request")
		case ok:
			return sglangHandoff(a, body), nil
		}
	}
	return Handoff{}, badReply("no finish reason")
}

// isAbort reports whether a finish reason says that the engine gave up.
func isAbort(reason []byte) bool {
	text, _ := openai.String(reason)
	return text == "abort"
}

func (sglang) Decode(a *Attempt, _ *Handoff, dst []byte) (Leg, error) {
	m := a.meet(false)
	if byHeader(a, a.Decode) {
		return m.override(a), nil
	}
	return m.splice(a, dst, false), nil
}

// Reclaims: the abort by rid frees what either engine holds, answered or not.
func (sglang) Public(_ *Attempt, answer []byte) []byte { return answer }

func (sglang) Reclaims() bool { return false }

// Cleanup aborts by id what each engine that got a leg still has of the
// attempt. Prefill that has answered has nothing.
func (sglang) Cleanup(a *Attempt, o Orphan) []Cleanup {
	if a.Prefill.IsZero() { // aggregated: the closed connection is the abort
		return nil
	}
	var calls []Cleanup
	if o.PrefillSent && !o.PrefillDone {
		calls = abortAll(calls, a, abi.Prefill)
	}
	if o.DecodeSent {
		calls = abortAll(calls, a, abi.Decode)
	}
	return calls
}

// abortRID is matched as a prefix by the engine, which the fixed width of ids
// makes harmless.
func abortRID(rid string, phase abi.Phase) Cleanup {
	return Cleanup{
		Phase: phase,
		Leg: Leg{
			Path:   "/abort_request",
			Header: []Field{{Name: "Content-Type", Value: "application/json"}},
			Body:   append(openai.AppendQuoted([]byte(`{"rid":`), rid), `,"abort_all":false}`...),
			Unary:  true,
		},
		Until: UntilAnswer,
		How:   "abort_rid",
	}
}

// meeting is where the legs of an attempt meet, as one of the two is told.
type meeting struct {
	host     string
	port     int
	own      int // the rank of the engine itself; -1 where it follows from the room, or is the engine's to choose
	prefills int // prefill's rank, where neither engine can tell it from the room; else -1
}

// meet is what the leg of one phase is told.
func (a *Attempt) meet(prefill bool) meeting {
	p, d := a.Prefill, a.Decode
	m := meeting{host: bootstrapHost(p), port: bootstrapPort(p), own: -1, prefills: -1}
	if p.Spec.Ranks > 1 && !p.Facts().FollowsRoom {
		m.prefills = p.Rank
	}
	switch {
	case prefill:
		m.own = m.prefills
	case d.Spec.Ranks > 1:
		m.own = d.Rank
	}
	return m
}

// splice is the client's request with m in it. Edits without a value change
// nothing.
func (m *meeting) splice(a *Attempt, dst []byte, prefill bool) Leg {
	var (
		host                           [80]byte
		port, room, ownRank, otherRank [20]byte
		rid                            [40]byte
		own, prefills, stream, prompt  []byte
	)
	if m.prefills >= 0 {
		prefills = strconv.AppendInt(otherRank[:0], int64(m.prefills), 10)
	}
	if m.own >= 0 {
		own = strconv.AppendInt(ownRank[:0], int64(m.own), 10)
	}
	if prefill {
		stream = literal("false")
	}
	if a.Request.API == openai.Completions {
		prompt, _ = lone(a.Request)
	}
	rooms, rids := strconv.AppendUint(room[:0], bootstrapRoom(a, 0), 10), openai.AppendQuoted(rid[:0], a.LegID)
	if n := batch(a.Request); n > 0 {
		rooms, rids = roomList(a, n), ridList(a.LegID, n)
	}
	edits := [editRoom]openai.Edit{
		{Key: "bootstrap_host", Value: openai.AppendQuoted(host[:0], m.host)},
		{Key: "bootstrap_port", Value: strconv.AppendInt(port[:0], int64(m.port), 10)},
		{Key: "bootstrap_room", Value: rooms},
		{Key: "rid", Value: rids},
		{Key: "routed_dp_rank", Value: own},
		{Key: "disagg_prefill_dp_rank", Value: prefills},
		{Key: "stream", Value: stream},
		{Key: "stream_options", Remove: prefill},
		{Key: "prompt", Value: prompt},
	}
	return spliced(a, dst, cutPD(edits[:9], a))
}

// bootstrapHost is prefill's registry as decode reaches it. The engines put it
// before a colon and a port, so that an IPv6 address has brackets.
func bootstrapHost(prefill engine.Target) string {
	host := prefill.Spec.BootstrapHost
	if host == "" {
		host = prefill.Host
	}
	if strings.Contains(host, ":") && host[0] != '[' {
		return "[" + host + "]"
	}
	return host
}

// bootstrapPort is the configured port, else what the engine says.
func bootstrapPort(prefill engine.Target) int {
	if port := prefill.Spec.BootstrapPort; port != 0 {
		return port
	}
	if port := prefill.Facts().BootstrapPort; port != 0 {
		return port
	}
	return sglangBootstrapPort
}

// bootstrapRoom maps the disagg id to the room of sequence i: below 2^63, with
// prefill's rank as its remainder, since both engines take room mod dp size for
// it. The rooms of a batch lie 2^63/dp/maxBatch apart, and an odd number, so that
// they spread over ranks that are not placed here. Two ids share a room only when
// they differ by a multiple of that distance: 18 hours of their time with 64 ranks,
// 49 days with one. Those in flight lie within six (disaggid.Fresh).
func bootstrapRoom(a *Attempt, i int) uint64 {
	const rooms = 1 << 63
	dp := max(1, uint64(a.Prefill.Spec.Ranks))
	if n := a.Prefill.Facts().DPSize; dp > 1 && n > 0 {
		dp = uint64(n)
	}
	space := rooms / dp
	apart := space/maxBatch | 1
	return (a.ID+uint64(i)*apart)%space*dp + uint64(a.Prefill.Rank)%dp
}
