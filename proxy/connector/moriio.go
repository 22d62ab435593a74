package connector

import (
	"errors"
	"net"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

var (
	errTPSizes   = errors.New("neither tensor-parallel size is a multiple of the other")
	errNoHandoff = errors.New("decode needs the parameters of prefill's answer")
)

// moriio is vLLM's MoRIIOConnector. In WRITE mode, the default, both legs run at once: decode sends
// prefill the blocks that it has allocated, and prefill writes into them layer by layer. In READ
// mode (read) prefill answers first, and decode reads the blocks. The engines find each other by
// the addresses in the request id of both legs. A transfer id identifies the two legs.
//
// A decode engine treats every request as one with transferred KV, so decode cannot
// fall back to computing the prompt.
//
// Sources, in vLLM: distributed/kv_transfer/kv_connector/v1/moriio/ (moriio_common.py
// add_new_req for the fields, moriio_connector.py request_finished for prefill's answer
// and for when blocks are freed, moriio_engine.py for the notifications).
type moriio struct {
	nixl // same routes, facts and unpairable forms as every vLLM engine
	read bool
}

func (m moriio) Name() string {
	if m.read {
		return "vllm-moriio-read"
	}
	return "vllm-moriio"
}

func (m moriio) Flow() abi.Flow {
	if m.read {
		return abi.FlowPrefillFirst
	}
	return abi.FlowConcurrent
}

// AggregatesOn includes prefill engines in READ mode. In WRITE mode, releases before 0.32
// crash on a request without transfer parameters (KeyError in build_connector_meta). A
// decode engine of either mode answers such a request from uninitialized memory, or waits
// without end (get_num_new_matched_tokens).
func (m moriio) AggregatesOn() abi.Role {
	if m.read {
		return abi.RolePrefill
	}
	return 0
}

// BothPairs: an engine is either a producer or a consumer, so one of role both has no
// KV transfer.
func (moriio) BothPairs() bool { return false }

// Compatible requires one tensor-parallel size to be a multiple of the other. Source:
// get_moriio_remote_tp_rank.
func (moriio) Compatible(p, d *engine.Facts) error {
	if p.TPSize == 0 || d.TPSize == 0 || p.TPSize%d.TPSize == 0 || d.TPSize%p.TPSize == 0 {
		return nil
	}
	return errTPSizes
}

// Prefill requests one token, as NIXL's leg does. The leg must end by the limit of
// tokens: otherwise prefill keeps no block (request_finished).
func (m moriio) Prefill(a *Attempt, dst []byte) (Leg, error) {
	return vllmPrefill(a, moriioRequestID(a), dst, m.transfer(a, a.Decode, true))
}

// moriioRequestID returns the request id of both legs, which contains the addresses of
// both engines. The form follows the patterns of get_peer_zmq_from_request_id.
func moriioRequestID(a *Attempt) string {
	var room [256]byte
	id := a.Prefill.Facts().KVAddress.Append(append(room[:0], "___prefill_addr_"...))
	id = a.Decode.Facts().KVAddress.Append(append(id, "___decode_addr_"...))
	return string(append(append(id, '_'), a.LegID...))
}

// transferID is the id of the transfer in both legs of an attempt.
func transferID(a *Attempt) string { return "tx-" + a.LegID }

// transfer returns the parameters of a leg whose peer is other, as far as they are known
// before prefill answers. Current engines read the peer's address from the request id.
// Engines before vLLM pull request 39565 read the address from these parameters. All
// engines read the address from these parameters when they free the blocks of a leg that
// was never scheduled. Only older engines read remote_port, and they require it.
func (moriio) transfer(a *Attempt, other engine.Target, prefill bool) []byte {
	f := other.Facts()
	b := make([]byte, 0, 512)
	b = openai.AppendQuoted(append(b, `{"transfer_id":`...), transferID(a))
	b = strconv.AppendBool(append(b, `,"do_remote_decode":`...), prefill)
	b = strconv.AppendBool(append(b, `,"do_remote_prefill":`...), !prefill)
	b = append(b, `,"remote_engine_id":null,"remote_block_ids":null,"remote_host":`...)
	b = openai.AppendQuoted(b, f.KVAddress.Host)
	b = strconv.AppendInt(append(b, `,"remote_port":`...), int64(f.KVAddress.Handshake), 10)
	b = strconv.AppendInt(append(b, `,"remote_handshake_port":`...), int64(f.KVAddress.Handshake), 10)
	b = strconv.AppendInt(append(b, `,"remote_notify_port":`...), int64(f.KVAddress.Notify), 10)
	b = strconv.AppendInt(append(b, `,"remote_dp_size":`...), int64(other.Spec.Ranks), 10)
	b = strconv.AppendInt(append(b, `,"remote_tp_size":`...), int64(f.TPSize), 10)
	if !prefill && other.Spec.Ranks > 1 {
		// Decode sends this rank of prefill the addresses of its blocks. is_request_leader makes
		// decode's own rank send them: by default only ranks of the first host send them.
		b = strconv.AppendInt(append(b, `,"remote_dp_rank":`...), int64(other.Rank), 10)
		b = append(b, `,"is_request_leader":true`...)
	}
	return append(b, '}')
}

// ReadPrefill checks whether prefill has kept its blocks. An answer without transfer
// parameters means that prefill has kept none. Decode needs the blocks, so the leg has
// failed. In READ mode the parameters go to decode, which must read the blocks within
// defer_timeout of prefill: no message renews it (moriio_connector.py,
// _deferred_send_deadlines).
func (m moriio) ReadPrefill(a *Attempt, body []byte) (Handoff, error) {
	params, _, err := transferParams(body, nil, nil)
	switch {
	case err != nil:
		return Handoff{}, err
	case params == nil:
		if h, ended := endedAtOnce(a, body); ended {
			return h, nil
		}
		return Handoff{}, badReply("no kv_transfer_params, without which decode has no KV")
	}
	id, _ := openai.Find(params, "transfer_id")
	if s, _ := openai.String(id); !openai.IsNull(id) && s != transferID(a) {
		return Handoff{}, badReply("kv_transfer_params of another transfer")
	}
	if !m.read {
		return Handoff{Pinned: true}, nil
	}
	if !namesBlocks(params) {
		return Handoff{}, badReply("kv_transfer_params without blocks")
	}
	if id, _ := openai.Find(params, "remote_engine_id"); openai.IsNull(id) {
		return Handoff{}, badReply("kv_transfer_params without an engine")
	}
	// decodeParams checks the members that are cut here.
	rest := openai.AppendEdited(nil, params, cut("remote_host"), cut("remote_engine_id"),
		cut("remote_port"), cut("remote_handshake_port"), cut("remote_notify_port"))
	if !Sound(a.Prefill.Instance, a.Decode.Instance, rest) {
		return Handoff{}, badReply("kv_transfer_params name a host at which prefill is not known to be")
	}
	return Handoff{Params: params, Pinned: true, Lease: a.Prefill.KVLease, RefusalFrees: true}, nil // see Cleanup
}

// Decode is the client's request with its own limit of tokens: decode generates the
// first token again.
func (m moriio) Decode(a *Attempt, h *Handoff, dst []byte) (Leg, error) {
	params, err := m.decodeParams(a, h)
	if err != nil {
		return Leg{}, err
	}
	return vllmDecode(a, moriioRequestID(a), dst, params)
}

// decodeParams returns the parameters of the decode leg. In READ mode, values of
// prefill's answer replace values of transfer: the answer of engines before vLLM pull
// request 34907 has only some of the values. If the answer names a host that the proxy
// does not know as prefill's host, the parameters keep the address with which prefill
// registered.
func (m moriio) decodeParams(a *Attempt, h *Handoff) ([]byte, error) {
	known := m.transfer(a, a.Prefill, false)
	if !m.read {
		return known, nil
	}
	if h == nil || len(h.Params) == 0 {
		return nil, errNoHandoff
	}
	var base, said openai.Object
	if err := base.Parse(known); err != nil {
		return nil, err
	}
	if err := said.Parse(h.Params); err != nil {
		return nil, err
	}
	foreign := m.foreign(a, &said)
	edits := make([]openai.Edit, 0, 16)
	for key, value := range base.Members {
		if foreign && key == "remote_engine_id" { // an engine's id is the address of its handshake
			at := a.Prefill.Facts().KVAddress
			id := net.JoinHostPort(at.Host, strconv.Itoa(at.Handshake))
			edits = append(edits, openai.Edit{Key: key, Value: openai.AppendQuoted(nil, id)})
			continue
		}
		if foreign && (key == "remote_host" || strings.HasSuffix(key, "_port")) {
			edits = append(edits, openai.Edit{Key: key, Value: value})
			continue
		}
		if key == "is_request_leader" { // used in WRITE mode only
			continue
		}
		if v, ok := said.Get(key); !ok || openai.IsNull(v) {
			edits = append(edits, openai.Edit{Key: key, Value: value})
		}
	}
	return said.Append(nil, edits...), nil
}

// foreign reports whether prefill's answer names a host or a port at which prefill is
// not known to be.
func (moriio) foreign(a *Attempt, said *openai.Object) bool {
	at, handshake, _ := net.SplitHostPort(textOf(said, "remote_engine_id"))
	for _, host := range [...]string{textOf(said, "remote_host"), at} {
		if host != "" && !a.Prefill.Owns(host, a.Decode.Instance) {
			return true
		}
	}
	for _, key := range [...]string{"remote_handshake_port", "remote_notify_port"} {
		if v, _ := said.Get(key); !openai.IsNull(v) && !a.Prefill.OwnsPort(portOf(v)) {
			return true
		}
	}
	port, _ := strconv.Atoi(handshake) // on an error 0, which no engine owns
	return handshake != "" && !a.Prefill.OwnsPort(port)
}

// Defers: in WRITE mode prefill writes when decode has allocated blocks. It gives up
// after defer_timeout, 60 s (moriio_engine.py).
func (m moriio) Defers() bool { return !m.read }

// Reclaims: in READ mode only the answer names the blocks that prefill holds.
func (m moriio) Reclaims() bool { return m.read }

// Cleanup sends a decode engine a request that names the transfer and that the engine rejects. The
// engine then makes prefill free the blocks (vLLM pull request 41269;
// _with_kv_transfer_rejection_cleanup, request_finished). The request is rejected because of its
// limit of tokens, so no part of it is ever scheduled.
//
// In WRITE mode the call is correct only while no decode engine has the leg: a decode
// engine with the leg may be waiting for prefill to write into its blocks, and would wait
// without end for a cancelled transfer. In that case the engines finish the transfer
// without a call: when its connection closes, decode cancels a transfer that was not
// scheduled. Otherwise prefill writes, and both engines free their blocks. In two cases
// the blocks stay until the engines' time-outs, and the proxy counts them: prefill
// failed, so no engine writes; or decode died, so no engine requests the KV.
func (m moriio) Cleanup(a *Attempt, o Orphan) []Cleanup {
	if a.Prefill.IsZero() || o.KVRead {
		return nil
	}
	params := m.transfer(a, a.Prefill, false)
	switch {
	case m.read:
		if o.Handoff == nil || !o.Handoff.Pinned {
			return nil
		}
		var err error
		if params, err = m.decodeParams(a, o.Handoff); err != nil {
			return nil
		}
		call := refusedDecode(a, params)
		at, _, _ := net.SplitHostPort(text(params, "remote_engine_id"))
		call.Hosts, call.Hold = []string{text(params, "remote_host"), at}, o.Handoff.Lease
		return []Cleanup{call}
	case o.DecodeSent && o.PrefillDone:
		return []Cleanup{{Phase: abi.Prefill, How: "engine_timeout"}}
	case o.DecodeSent:
		return []Cleanup{{Phase: abi.Decode, How: "engine_timeout"}}
	case !o.PrefillSent || o.Refused:
		return nil
	}
	return []Cleanup{refusedDecode(a, params)}
}

// refusedDecode returns a decode leg that the engine rejects because of its limit of
// tokens. By the rejection the engine frees the blocks that kv_transfer_params name.
func refusedDecode(a *Attempt, params []byte) Cleanup {
	body := append([]byte(`{"prompt":[0],"max_tokens":0,"kv_transfer_params":`), params...)
	return Cleanup{
		Phase:     abi.Decode,
		AnyTarget: true,
		Leg: Leg{
			Path:   openai.Completions.Path(),
			Header: []Field{{Name: "Content-Type", Value: "application/json"}, {Name: "X-Request-Id", Value: a.LegID + "-cleanup"}},
			Body:   append(body, '}'),
			Unary:  true,
		},
		Until: UntilRefused,
		How:   "refused_decode",
	}
}
