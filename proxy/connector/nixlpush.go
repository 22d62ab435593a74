package connector

import (
	"strconv"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// nixlPush is vLLM's NixlPushConnector. Both legs run at once. Decode gets prefill's
// identity from the configuration and registers its allocated blocks with prefill. When
// prefill has computed the prompt, it writes into these blocks. Then both engines free
// their blocks.
//
// Prefill matches the two legs by the ids that prefill and decode give them: the
// route's prefix and the request id, without a random suffix. So both legs have the
// same X-Request-Id and route. A route that ignores X-Request-Id cannot be split. Newer
// engines compare transfer_id first.
//
// Sources, in vLLM: docs/design/nixl_kv_push_connector.md,
// distributed/kv_transfer/kv_connector/v1/nixl/push_scheduler.py (required parameters
// of the legs) and push_worker.py (the matching, and which engine frees what).
type nixlPush struct {
	nixl // same routes, facts and unpairable forms as every vLLM engine
}

func (nixlPush) Name() string   { return "vllm-nixl-push" }
func (nixlPush) Flow() abi.Flow { return abi.FlowConcurrent }

// BothPairs: an engine of role both serves whole requests only, so it needs no
// identity.
func (nixlPush) BothPairs() bool { return false }

// Pairable also rejects responses: the engine itself makes their ids
// (openai/responses/serving.py), so prefill would find no registered blocks to write
// to.
func (p nixlPush) Pairable(r *openai.Request) error {
	if r.API == openai.Responses {
		return notPairable("", "Responses cannot be split into prefill and decode in push mode, and no engine here serves them whole.")
	}
	return p.nixl.Pairable(r)
}

// Prefill requests one token, as NIXL's leg in pull mode does.
func (nixlPush) Prefill(a *Attempt, dst []byte) (Leg, error) {
	return vllmPrefill(a, a.LegID, dst, append(appendTransferID(make([]byte, 0, 256), a), nixlPrefill[1:]...))
}

// appendTransferID appends the start of an object with the transfer's id.
func appendTransferID(dst []byte, a *Attempt) []byte {
	dst = openai.AppendQuoted(append(dst, `{"transfer_id":`...), transferID(a))
	return append(dst, ',')
}

// decodeParams sends decode the identity of prefill. All members are required: an engine crashes at
// a registration without one of the remote_* members or tp_size (KeyError in
// update_state_after_alloc, add_new_req_to_recv).
func (nixlPush) decodeParams(a *Attempt) []byte {
	p := a.Prefill
	host, port := p.Spec.SideChannelOf(p.Rank)
	b := appendTransferID(make([]byte, 0, 384), a)
	b = append(b, `"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":`...)
	b = openai.AppendQuoted(b, p.Spec.EngineIDOf(p.Rank))
	b = openai.AppendQuoted(append(b, `,"remote_host":`...), host)
	b = strconv.AppendInt(append(b, `,"remote_port":`...), int64(port), 10)
	b = strconv.AppendInt(append(b, `,"tp_size":`...), int64(max(1, p.Spec.TPSize)), 10)
	b = strconv.AppendInt(append(b, `,"pp_size":`...), int64(max(1, p.Spec.PPSize)), 10)
	b = openai.AppendQuoted(append(b, `,"remote_request_id":`...), a.LegID)
	return append(b, '}')
}

// ReadPrefill checks whether prefill will write the KV. Prefill writes nothing if it
// holds no blocks, runs in pull mode, or is not the engine that the decode leg names.
// Decode would then wait without end, so the leg has failed.
func (nixlPush) ReadPrefill(a *Attempt, body []byte) (Handoff, error) {
	params, _, err := transferParams(body, nil, nil)
	switch {
	case err != nil:
		return Handoff{}, err
	case params == nil:
		return Handoff{}, badReply("no kv_transfer_params, without which prefill writes nothing")
	case memberText(params, "transfer_mode") == "pull":
		return Handoff{}, badReply("prefill runs in pull mode, which cannot be paired with push")
	case !namesBlocks(params):
		return Handoff{}, badReply("kv_transfer_params without blocks")
	}
	if id := memberText(params, "remote_engine_id"); id != a.Prefill.Spec.EngineIDOf(a.Prefill.Rank) {
		return Handoff{}, badReply("prefill's engine_id is not the configured one")
	}
	return Handoff{Pinned: true}, nil
}

// Decode is the client's request with its own limit of tokens: decode generates the
// first token again.
func (p nixlPush) Decode(a *Attempt, _ *Handoff, dst []byte) (Leg, error) {
	return vllmDecode(a, a.LegID, dst, p.decodeParams(a))
}

// Defers: prefill keeps its blocks until decode has registered, or until their lease
// ends (push_scheduler.py).
func (nixlPush) Defers() bool { return true }

// WaitsWithoutEnd: decode has no time-out for the write of prefill (vLLM issue 46283).
func (nixlPush) WaitsWithoutEnd() {}

// Reclaims: prefill's answer has no data for a call that frees blocks.
func (nixlPush) Reclaims() bool { return false }

// Cleanup sends the prefill leg again if decode may be waiting and prefill has not
// computed the prompt. A decode engine that has registered its blocks holds them until
// they are written to, even if its connection is closed, and has no time-out for that
// (vLLM issue 46283). Prefill matches the repeated leg by its ids, and finds computed KV
// in its prefix cache. If decode has not registered, prefill frees its blocks when their
// lease expires.
//
// No call can free prefill's blocks. An engine that registers for them gets them, but a
// decode engine that registers for blocks that no longer exist waits without end.
func (p nixlPush) Cleanup(a *Attempt, o Orphan) []Cleanup {
	switch {
	case a.Prefill.IsZero() || o.KVRead:
		return nil
	case o.DecodeSent && !o.DecodeIdle && !o.PrefillDone:
		leg, err := p.Prefill(a, nil)
		if err != nil {
			return nil
		}
		leg.Header = append(leg.Header, Field{Name: "Content-Type", Value: "application/json"})
		return []Cleanup{{Phase: abi.Prefill, Leg: leg, Until: UntilServed, How: "prefill_again"}}
	case o.PrefillSent && !o.Refused:
		return []Cleanup{{Phase: abi.Prefill, How: "engine_timeout"}}
	}
	return nil
}
