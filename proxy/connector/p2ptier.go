package connector

import (
	"fmt"
	"strconv"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// p2pTier is vLLM's OffloadingConnector with a secondary tier of type p2p. Prefill keeps
// the prompt's KV in its host memory until a decode engine requests it under the
// transfer's id. Decode gets prefill's address from the configuration and fetches all
// full blocks from there. Decode computes the blocks that do not arrive.
//
// Sources, in vLLM: docs/features/kv_offloading_usage.md («Orchestration-Layer
// Protocol»), v1/kv_offload/tiering/p2p/manager.py (the effect of each key, and the time
// after which prefill drops KV that no engine fetched),
// tests/v1/kv_offload/tiering/p2p/p2p_connector_proxy.py (the legs).
type p2pTier struct {
	nixl // same routes, facts and unpairable forms as every vLLM engine
}

func (p2pTier) Name() string { return "vllm-p2p-tier" }

// BothPairs: an engine of role both serves whole requests only, so it needs no side
// channel.
func (p2pTier) BothPairs() bool { return false }

// Compatible: when they connect, peers compare a fingerprint of their configuration,
// which contains both values.
func (p2pTier) Compatible(p, d *engine.Facts) error {
	switch {
	case p.KVCacheType != "" && d.KVCacheType != "" && p.KVCacheType != d.KVCacheType:
		return fmt.Errorf("KV cache types differ: prefill %s, decode %s", p.KVCacheType, d.KVCacheType)
	case p.PageSize != 0 && d.PageSize != 0 && p.PageSize != d.PageSize:
		return fmt.Errorf("block sizes differ: prefill %d, decode %d", p.PageSize, d.PageSize)
	}
	return nil
}

// Prefill requests one token, and makes prefill keep the KV under the transfer's id.
func (p2pTier) Prefill(a *Attempt, dst []byte) (Leg, error) {
	b := append(make([]byte, 0, 96), `{"remote_decoder":{"kv_request_id":`...)
	return vllmPrefill(a, a.LegID, dst, append(openai.AppendQuoted(b, transferID(a)), "}}"...))
}

// ReadPrefill only checks that the prompt was computed: engines answer nothing about
// the transfer.
func (p2pTier) ReadPrefill(a *Attempt, body []byte) (Handoff, error) {
	h, err := vllmStore{}.ReadPrefill(a, body)
	h.Pinned = err == nil
	return h, err
}

// Decode is the client's request plus the address of prefill's rank. The address comes
// from the configuration, never from a client.
func (p2pTier) Decode(a *Attempt, _ *Handoff, dst []byte) (Leg, error) {
	host, port := a.Prefill.Spec.SideChannelOf(a.Prefill.Rank)
	b := append(make([]byte, 0, 192), `{"remote_prefiller":{"kv_request_id":`...)
	b = openai.AppendQuoted(b, transferID(a))
	b = openai.AppendQuoted(append(b, `,"remote_host":`...), host)
	b = strconv.AppendInt(append(b, `,"remote_port":`...), int64(port), 10)
	return vllmDecode(a, a.LegID, dst, append(b, "}}"...))
}

// Reclaims: prefill's answer has nothing by which blocks could be freed.
func (p2pTier) Reclaims() bool { return false }

// Cleanup sends nothing: prefill gives up the KV before its time-out (60 s,
// _UNBOUND_STORE_TIMEOUT_S) only for a decode engine that fetches every block. A decode
// engine that fetches none tells prefill nothing (session/client.py, finish).
func (p2pTier) Cleanup(a *Attempt, o Orphan) []Cleanup {
	if a.Prefill.IsZero() || o.KVRead || !o.PrefillSent || o.Refused {
		return nil
	}
	return []Cleanup{{Phase: abi.Prefill, How: "engine_timeout"}}
}
