package connector

import (
	"strconv"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// nixlPush is vLLM's NixlPushConnector. Both legs run at once: decode is told
// who prefill is, from the configuration, and registers the blocks that it has
// set aside with it; prefill writes into them when it has computed the prompt,
// and then both free what they hold.
//
// Prefill knows the two legs for one by the id that its engine and decode's give
// them: the route's prefix and the request id, less a random suffix. So both
// bear one X-Request-Id and go to one route, and a route that ignores the line
// cannot be split. Newer engines compare transfer_id first.
//
// Sources, in vLLM: docs/design/nixl_kv_push_connector.md, distributed/
// kv_transfer/kv_connector/v1/nixl/push_scheduler.py (what the legs' parameters
// must have) and push_worker.py (the matching, and who frees what).
type nixlPush struct {
	nixl // the routes, the facts and the forms that no vLLM engine splits are the same
}

func (nixlPush) Name() string   { return "vllm-nixl-push" }
func (nixlPush) Flow() abi.Flow { return abi.FlowConcurrent }

// BothPairs: an engine of role both serves whole requests, so that it needs no
// identity.
func (nixlPush) BothPairs() bool { return false }

// Pairable refuses responses besides: their ids are the engine's own
// (openai/responses/serving.py), so that prefill finds nothing to write to.
func (p nixlPush) Pairable(r *openai.Request) error {
	if r.API == openai.Responses {
		return notPairable("", "Responses cannot be split into prefill and decode in push mode, and no engine here serves them whole.")
	}
	return p.nixl.Pairable(r)
}

// Prefill asks for one token, as NIXL's leg in pull mode does.
func (nixlPush) Prefill(a *Attempt, dst []byte) (Leg, error) {
	leg, err := vllmPrefill(a, dst, append(appendTransferID(make([]byte, 0, 256), a), nixlPrefill[1:]...))
	leg.Header = vllmHeader(a.LegID, a.Prefill)
	return leg, err
}

// appendTransferID begins an object with the transfer's id.
func appendTransferID(dst []byte, a *Attempt) []byte {
	dst = openai.AppendQuoted(append(dst, `{"transfer_id":`...), transferID(a))
	return append(dst, ',')
}

// decodeParams tells decode who prefill is. All of it must be there: an engine
// ends at a registration without one of the remote_* members or tp_size
// (KeyError in update_state_after_alloc, add_new_req_to_recv).
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

// ReadPrefill looks whether prefill will write. When it holds no blocks, is of
// pull mode, or is not the engine that decode was told of, it will not, and
// decode would wait for ever: the leg failed.
func (nixlPush) ReadPrefill(a *Attempt, body []byte) (Handoff, error) {
	params, err := transferParams(body)
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

// Decode is the client's request, its limit of tokens as it is: decode produces
// the first token again.
func (p nixlPush) Decode(a *Attempt, _ *Handoff, dst []byte) (Leg, error) {
	leg, err := vllmDecode(a, dst, p.decodeParams(a))
	leg.Header = vllmHeader(a.LegID, a.Decode)
	return leg, err
}

// Defers: prefill keeps its blocks until decode has registered, or their lease is
// over (push_scheduler.py).
func (nixlPush) Defers() bool { return true }

// Reclaims: there is nothing in prefill's answer by which it could be told to
// free anything.
func (nixlPush) Reclaims() bool { return false }

// Cleanup sends the prefill leg again where decode may be waiting and prefill
// has not computed the prompt. A decode that has registered its blocks holds
// them, hung up on or not, until they are written to, and has no time-out for
// that (vLLM issue 46283); the leg's ids are all that prefill needs to know it
// by, and what it had computed is in its prefix cache. One that has not
// registered leaves prefill with blocks that its lease frees.
//
// Prefill's blocks cannot be freed from outside: whoever registers for them gets
// them, but a decode that registers for blocks which are gone waits for ever.
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
