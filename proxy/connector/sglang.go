package connector

import (
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// sglang is SGLang's disaggregation with any transfer backend. Prefill and decode get the
// same request at the same time, with the address of prefill's bootstrap registry and the
// number of a room, which identifies the transfer. Decode's leg does not depend on
// prefill's answer. Prefill's answer shows that the KV was transferred.
//
// Sources, in SGLang: srt/managers/io_struct.py GenerateReqInput (the fields),
// srt/disaggregation/common/conn.py (rooms, ranks, and settings that must be equal on
// both engines), srt/disaggregation/prefill.py and decode.py.
type sglang struct{}

// sglangBootstrapPort is the default of --disaggregation-bootstrap-port.
const sglangBootstrapPort = 8998

func (sglang) Name() string   { return "sglang" }
func (sglang) Flow() abi.Flow { return abi.FlowConcurrent }

// AggregatesOn is empty: prefill and decode engines reject a request without a room.
func (sglang) AggregatesOn() abi.Role { return 0 }

// Serves accepts the routes whose schemas have the transfer's fields, and those whole routes that
// SGLang has. Source: srt/entrypoints/http_server.py.
func (sglang) Serves(api openai.API) bool {
	switch api {
	case openai.Completions, openai.Chat, openai.Generate, openai.Responses, openai.Messages,
		openai.Embeddings, openai.Tokenize, openai.Detokenize, openai.RerankV1, openai.ScoreV1,
		openai.Classify, openai.ClassifyV1, openai.CountTokens,
		openai.Transcriptions, openai.ImageGenerations, openai.ImageEdits: // images: multimodal_gen/runtime/entrypoints
		return true
	default:
		return false
	}
}

// Pairable rejects several samples of a prompt, which would share a room. It also
// rejects prompts that the engine may count differently than the legs do, and log
// probabilities of the prompt in a form that cannot be merged: only prefill knows them.
func (sglang) Pairable(r *openai.Request) error {
	if field := uncounted(r); field != "" {
		return notPairable(field, "'"+field+"' in this form cannot be split into prefill and decode, and no engine here serves the request whole.")
	}
	if !carriesBatch(r) {
		if err := oneSequence(r); err != nil {
			return err
		}
	}
	if field := storedState(r); field != "" {
		return notPairable(field, "'"+field+"' needs a response that an engine stores, which engines of a pair cannot, and no engine here serves the request whole.")
	}
	if field := promptLogprobs(r); field != "" {
		return notPairable(field, "'"+field+"' asks for log probabilities of the prompt, which decode does not have, and no engine here serves the request whole.")
	}
	return nil
}

// promptLogprobs returns the name of the member that requests log probabilities of the
// prompt in a form that cannot be merged, or "".
func promptLogprobs(r *openai.Request) string {
	switch r.API {
	case openai.Completions:
		if echo, _ := r.Get("echo"); string(echo) == "true" && isSet(r, "logprobs") {
			return "logprobs"
		}
	case openai.Generate: // merged, except for the forms that are not lists
		for _, key := range [...]string{"return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64"} {
			if v, _ := r.Get(key); string(v) == "true" {
				return key
			}
		}
	default: // chat has log probabilities only of its answer
	}
	return ""
}

// Aggregated is for engines of role both, which run without disaggregation.
func (sglang) Aggregated(a *Attempt, dst []byte) (Leg, error) {
	var (
		digits [20]byte
		rank   []byte
	)
	if a.Decode.Spec.Ranks > 1 && a.Request.API != openai.EngineRoute { // nothing is known about the members of an EngineRoute
		rank = strconv.AppendInt(digits[:0], int64(a.Decode.Rank), 10)
	}
	room := [editRoom]openai.Edit{{Key: "routed_dp_rank", Value: rank}, namedForMessages(a)}
	n := 2
	if rank == nil && room[1].Value == nil {
		n = 0
	}
	return spliced(a, dst, room[:n]), nil
}

// Prefill's answer is not a stream. Therefore a failure has an HTTP status, and the
// answer comes when the transfer has ended. If the body must stay unchanged, the answer
// is a stream if the client requested one.
func (sglang) Prefill(a *Attempt, dst []byte) (Leg, error) {
	m := a.meet(true)
	if byHeader(a, a.Prefill) && !(a.Merging && a.Request.Stream) { // a stream cannot be merged from
		leg := m.override(a)
		leg.Unary = !a.Request.Stream
		return leg, nil
	}
	leg := m.splice(a, dst, true)
	leg.Unary = true
	return leg, nil
}

// ReadPrefill finds out whether the engine aborted the request: an abort without an
// error status has the status of a success.
func (sglang) ReadPrefill(a *Attempt, body []byte) (Handoff, error) {
	if n := batch(a.Request); n > 0 {
		return readBatch(a, n, body)
	}
	if a.Request.Stream && len(body) > 0 && !isObject(body) {
		return Handoff{}, readStream(a.Request.API, body)
	}
	if a.Request.API == openai.Responses || a.Request.API == openai.Messages {
		return Handoff{}, readTyped(a.Request.API, body)
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

// isAbort reports whether a finish reason means that the engine aborted the request.
func isAbort(reason []byte) bool {
	text, _ := openai.String(reason)
	return text == "abort"
}

func (sglang) Decode(a *Attempt, _ *Handoff, dst []byte) (Leg, error) {
	m := a.meet(false)
	if byHeader(a, a.Decode) && !a.ReturnIDs {
		return m.override(a), nil
	}
	return m.splice(a, dst, false), nil
}

// Public returns the answer unchanged: it contains nothing of the transfer.
func (sglang) Public(_ *Attempt, answer []byte) []byte { return answer }

func (sglang) Reclaims() bool { return false }

// ComputesUnverified: a decode engine takes any data in its blocks for KV, also of a prefill that
// has rejected or aborted the request (SGLang issue 30233; srt/disaggregation/decode.py). The
// connectors of vLLM differ: their decode engine schedules a request only after the whole
// transfer, or else fails it or computes the prompt itself (v1/core/sched/scheduler.py,
// WAITING_FOR_REMOTE_KVS). TensorRT-LLM's generation fails too.
func (sglang) ComputesUnverified() {}

// Cleanup aborts, by id, the legs that may still run. A prefill engine that has
// answered holds nothing.
func (sglang) Cleanup(a *Attempt, o Orphan) []Cleanup {
	if a.Prefill.IsZero() { // aggregated: the engine aborts when the connection closes
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

// abortRID: the engine matches rid as a prefix. All ids of a route have the same length, so only
// this one matches.
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

// meeting has the address of the bootstrap server and the ranks that one leg of an
// attempt gets for the transfer.
type meeting struct {
	host     string
	port     int
	own      int // the rank of the called engine; -1 if it follows from the room, or if the engine chooses it
	prefills int // prefill's rank if the engines cannot derive it from the room; else -1
}

// meet returns the meeting for the leg of one phase.
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

// splice returns a leg with the client's request and m. Edits without a value change
// nothing.
func (m *meeting) splice(a *Attempt, dst []byte, prefill bool) Leg {
	var (
		host                           [80]byte
		port, room, ownRank, otherRank [20]byte
		rid                            [48]byte
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
	rooms, rids := strconv.AppendUint(room[:0], bootstrapRoom(a, 0), 10), openai.AppendQuoted(rid[:0], ridFor(a))
	if n := batch(a.Request); n > 0 {
		rooms, rids = roomList(a, n), ridList(a.LegID, n)
	}
	var header []Field
	key := "rid"
	switch a.Request.API {
	case openai.Responses:
		key = "request_id"
	case openai.Messages:
		rids, header = nil, ridHeader(a, prefill)
	default:
	}
	edits := [editRoom]openai.Edit{
		{Key: "bootstrap_host", Value: openai.AppendQuoted(host[:0], m.host)},
		{Key: "bootstrap_port", Value: strconv.AppendInt(port[:0], int64(m.port), 10)},
		{Key: "bootstrap_room", Value: rooms},
		{Key: key, Value: rids},
		{Key: "routed_dp_rank", Value: own},
		{Key: "disagg_prefill_dp_rank", Value: prefills},
		{Key: "stream", Value: stream},
		{Key: "stream_options", Remove: prefill},
		{Key: "prompt", Value: prompt},
		namedForMessages(a),
	}
	leg := spliced(a, dst, edits[:10])
	leg.Header = header
	return leg
}

// bootstrapHost is the host of prefill's registry, as decode reaches it. The engines
// put it before a colon and a port, so an IPv6 address gets brackets.
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

// bootstrapPort is the configured port, or else the one that the engine reports.
func bootstrapPort(prefill engine.Target) int {
	if port := prefill.Spec.BootstrapPort; port != 0 {
		return port
	}
	if port := prefill.Facts().BootstrapPort; port != 0 {
		return port
	}
	return sglangBootstrapPort
}

// bootstrapRoom maps the disagg id to the room of sequence i: a number below 2^63 whose
// remainder modulo the dp size is prefill's rank, because both engines compute the rank
// so. The rooms of a batch are 2^63/dp/maxBatch apart, made odd, so that they spread
// over ranks that are not placed here. Two ids share a room only if they differ by a
// multiple of that distance: 18 hours of id time with 64 ranks, 49 days with one. Ids
// in flight differ by less than six hours (disaggid.Fresh).
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
