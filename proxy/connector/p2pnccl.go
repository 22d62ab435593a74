package connector

import (
	"fmt"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// p2pNCCL is vLLM's P2pNcclConnector, which vLLM contains up to its releases of June
// 2026. Prefill sends its KV to the decode engine whose address is in the request id. A
// buffer of decode stores the KV under the request id until decode's request with the
// same id reads it. Requests have no transfer parameters, and both engines crash on a
// request whose id contains no address.
//
// Prefill comes first, whatever the engines' send_type. A decode leg that runs before
// its KV has arrived blocks its whole engine until the KV comes (recv_tensor), or
// answers from uninitialized memory (send_type GET).
//
// Source: vLLM before pull request 44854,
// distributed/kv_transfer/kv_connector/v1/p2p/p2p_nccl_connector.py and
// p2p_nccl_engine.py. The ids of both legs must reach the engines' cores unchanged:
// releases since February 2026 need VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1.
type p2pNCCL struct {
	nixl // same facts and unpairable forms as every vLLM engine
}

// BindsDecode: prefill sends the KV to the address in the request id.
func (p2pNCCL) BindsDecode() {}

func (p2pNCCL) Name() string { return "vllm-p2p-nccl" }

// AggregatesOn: producers and consumers crash on an aggregated request.
func (p2pNCCL) AggregatesOn() abi.Role { return 0 }

// BothPairs: an engine of role both has no KV transfer.
func (p2pNCCL) BothPairs() bool { return false }

// Serves excludes responses, whose ids the engine makes itself, and the route of token
// ids.
func (p p2pNCCL) Serves(api openai.API) bool {
	switch api {
	case openai.Responses, openai.VLLMGenerate:
		return false
	default:
		return p.nixl.Serves(api)
	}
}

// Compatible: the tensors of both engines must have the same shape except for the
// number of blocks (check_tensors_except_dim).
func (p2pNCCL) Compatible(p, d *engine.Facts) error {
	switch {
	case p.KVCacheType != "" && d.KVCacheType != "" && p.KVCacheType != d.KVCacheType:
		return fmt.Errorf("KV cache types differ: prefill %s, decode %s", p.KVCacheType, d.KVCacheType)
	case p.PageSize != 0 && d.PageSize != 0 && p.PageSize != d.PageSize:
		return fmt.Errorf("block sizes differ: prefill %d, decode %d", p.PageSize, d.PageSize)
	case p.TPSize != 0 && d.TPSize != 0 && p.TPSize != d.TPSize:
		return fmt.Errorf("tensor-parallel sizes differ: prefill %d, decode %d", p.TPSize, d.TPSize)
	}
	return nil
}

// Prefill requests one token. When prefill's answer arrives, decode has the KV.
func (p2pNCCL) Prefill(a *Attempt, dst []byte) (Leg, error) {
	leg, err := vllmPrefill(a, dst, nil)
	leg.Header = []Field{{Name: "X-Request-Id", Value: moriioRequestID(a)}}
	return leg, err
}

// ReadPrefill: any valid answer means that prefill has sent the KV to this attempt's
// decode engine.
func (p2pNCCL) ReadPrefill(a *Attempt, body []byte) (Handoff, error) {
	if _, err := transferParams(body); err != nil { // checks the whole body
		return Handoff{}, err
	}
	key := "choices"
	if a.Request.API == openai.Messages {
		key = "content"
	}
	if _, found := openai.Find(body, key); !found {
		return Handoff{}, badReply("no text")
	}
	return Handoff{Pinned: true}, nil
}

// Decode is the client's request with prefill's id.
func (p2pNCCL) Decode(a *Attempt, _ *Handoff, dst []byte) (Leg, error) {
	var room [editRoom]openai.Edit
	leg := vllmLeg(a, dst, room[:0])
	leg.Header = []Field{{Name: "X-Request-Id", Value: moriioRequestID(a)}}
	return leg, nil
}

// Reclaims: the KV is in decode's buffer, and only prefill's answer shows that it has
// arrived.
func (p2pNCCL) Reclaims() bool { return true }

// Cleanup makes decode run a request with the same id and a prompt of one token, which
// needs no transferred KV. When this request ends, the engine drops the KV under the same
// id (get_finished). A chat prompt is always longer, and a prompt that needs missing KV
// would block the engine. So the KV of a chat stays until the engine's process ends.
func (p2pNCCL) Cleanup(a *Attempt, o Orphan) []Cleanup {
	switch {
	case a.Prefill.IsZero() || o.KVRead || !o.PrefillSent || o.Refused:
		return nil
	case a.Request.API != openai.Completions:
		return []Cleanup{{Phase: abi.Decode, How: "engine_timeout"}}
	}
	body := []byte{'{'}
	if model, _ := a.Request.Get("model"); !openai.IsNull(model) {
		body = append(append(append(body, `"model":`...), model...), ',')
	}
	return []Cleanup{{
		Phase: abi.Decode,
		Leg: Leg{
			Path:   openai.Completions.Path(),
			Header: []Field{{Name: "Content-Type", Value: "application/json"}, {Name: "X-Request-Id", Value: moriioRequestID(a)}},
			Body:   append(body, `"prompt":[0],"max_tokens":1}`...),
			Unary:  true,
		},
		Until:  UntilAnswer,
		SameID: true,
		How:    "same_id",
	}}
}
