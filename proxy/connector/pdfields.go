package connector

import (
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// PD fields are what a proxy tells engines about a transfer. A client that
// could set them would name hosts that engines then connect to, read another
// request's KV blocks, or abort another request; so they are cut out of every
// leg, whatever the engine, unless the client is trusted. The lists hold the
// fields of all engines: which engine a request meets is decided after the
// client wrote it.

// PDHeader reports whether a request line of that name belongs to the protocol
// between proxy and engines, and is therefore not forwarded from a client that
// is not trusted. Names are compared without regard to case.
//
// Sources: vLLM entrypoints/serve/engine/serving.py (X-Request-Id) and
// entrypoints/generate/base/serving.py (X-data-parallel-rank); SGLang
// entrypoints/request_headers.py (x-override-*) and
// entrypoints/openai/serving_base.py (X-Data-Parallel-Rank); TensorRT-LLM
// serve/openai_client.py and serve/disagg_auth.py (X-TRTLLM-*); the lines by
// which side-cars beside an engine are told its peers (x-prefiller-*,
// x-encoder-hosts-ports, x-kv-cache-source-*), its rank (x-data-parallel-*) and
// that their caller coordinates the phases (EPP-Profile).
func PDHeader(name string) bool {
	switch len(name) {
	case len("x-request-id"):
		if equalFold(name, "x-request-id") {
			return true
		}
	case len("epp-profile"):
		if equalFold(name, "epp-profile") {
			return true
		}
	case len("x-encoder-hosts-ports"):
		if equalFold(name, "x-encoder-hosts-ports") {
			return true
		}
	}
	return prefixFold(name, "x-override-") || prefixFold(name, "x-data-parallel-") ||
		prefixFold(name, "x-prefiller-") || prefixFold(name, "x-kv-cache-source-") || prefixFold(name, "x-trtllm-")
}

// prefixFold reports whether name begins with prefix, which is lower case.
func prefixFold(name, prefix string) bool {
	return len(name) >= len(prefix) && equalFold(name[:len(prefix)], prefix)
}

// equalFold compares ASCII without regard to case; low is lower case and as
// long as name.
func equalFold(name, low string) bool {
	for i := range len(low) {
		c := name[i]
		if c-'A' < 26 {
			c |= 0x20
		}
		if c != low[i] {
			return false
		}
	}
	return true
}

// pdFields are the PD fields of request bodies: top-level members by which
// engines are told of a transfer, of the encoders and caches that they are to
// call, and of the process that their answer goes to.
//
// Sources: vLLM entrypoints/openai/*/protocol.py (kv_transfer_params,
// ec_transfer_params, request_id) and v1/kv_hints/protocol.py (kv_hints); SGLang
// managers/io_struct.py GenerateReqInput, all of which /generate takes from a
// body, and entrypoints/openai/protocol.py (bootstrap_*, decode_tp_size, ranks,
// rid, what its language servers agree with encoders, http_worker_ipc,
// kv_router_hint, and positional_embed_overrides, a tensor between processes);
// TensorRT-LLM serve/openai_protocol.py (disaggregated_params;
// prompt_token_ids_b64 is the orchestrator's own form of prompt_token_ids, which
// clients may send).
var pdFields = [...]string{
	"kv_transfer_params", "ec_transfer_params", "request_id", "kv_hints", "kv_router_hint",
	"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
	"routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", "rid", "http_worker_ipc",
	"need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls", "mm_data_mooncake", "positional_embed_overrides",
	"disaggregated_params", "prompt_token_ids_b64",
}

// pdCuts is how many edits cutPD makes at most: one for each PD field, and for
// vllm_xargs and sampling_params. No body has a member twice.
const pdCuts = len(pdFields) + 2

// pdField reports whether a top-level member of a request body is a PD field.
func pdField(key string) bool {
	for i := range pdFields {
		if pdFields[i] == key {
			return true
		}
	}
	return false
}

// PDMember reports whether a top-level member of a leg's body with that value
// carries, or could carry, the transfer: a PD field, or one that vLLM takes its
// transfer parameters out of. The value may be empty.
func PDMember(key string, value []byte) bool {
	switch {
	case key == "vllm_xargs":
		return true
	case key == "sampling_params" && len(value) > 0:
		_, args, err := openai.Lookup(value, "extra_args")
		return args || err != nil
	}
	return pdField(key)
}

// cutPD adds to a leg's edits those that cut the client's PD fields out of a's
// body, unless the edit before sets the field; none for a trusted client. The
// edits must have room for pdCuts more: it is not grown, so that they, and the
// values that they point to, stay on the caller's stack.
func cutPD(edits []openai.Edit, a *Attempt) []openai.Edit {
	if a.Trust {
		return edits
	}
	n := len(edits)
	edits = edits[:cap(edits)]
	for key, value := range a.Request.Members {
		switch {
		case pdField(key):
			if !sets(edits[:n], key) {
				edits[n] = openai.Edit{Key: key, Remove: true}
				n++
			}
		case key == "vllm_xargs":
			// vLLM merges these into the same arguments that its transfer
			// parameters travel in.
			if rest, cut := cutTransferParams(value); cut {
				edits[n] = openai.Edit{Key: key, Value: rest}
				n++
			}
		case key == "sampling_params" && a.Request.API == openai.VLLMGenerate && !sets(edits[:n], key):
			if rest, cut := cutExtraArgs(value); cut {
				edits[n] = openai.Edit{Key: key, Value: rest}
				n++
			}
		}
	}
	return edits[:n]
}

// sets reports whether one of the edits gives the member a value.
func sets(edits []openai.Edit, key string) bool {
	for i := range edits {
		if e := &edits[i]; e.Key == key && len(e.Value) > 0 {
			return true
		}
	}
	return false
}

// cutExtraArgs cuts the transfer parameters out of the extra_args of vLLM's
// sampling parameters; cut is false, and rest nil, when there are none.
func cutExtraArgs(params []byte) (rest []byte, cut bool) {
	args, ok, err := openai.Lookup(params, "extra_args")
	if err != nil || !ok {
		return nil, false
	}
	args, cut = cutTransferParams(args)
	if !cut {
		return nil, false
	}
	var o openai.Object
	if o.Parse(params) != nil {
		return nil, false
	}
	return o.Append(nil, openai.Edit{Key: "extra_args", Value: args}), true
}

// cutTransferParams cuts vLLM's transfer parameters out of an object that vLLM
// takes them from; cut is false, and rest nil, when there are none.
func cutTransferParams(args []byte) (rest []byte, cut bool) {
	var o openai.Object
	if o.Parse(args) != nil { // no object: nothing is taken from it
		return nil, false
	}
	_, kv := o.Get("kv_transfer_params")
	_, ec := o.Get("ec_transfer_params")
	if !kv && !ec {
		return nil, false
	}
	return o.Append(nil,
		openai.Edit{Key: "kv_transfer_params", Remove: true},
		openai.Edit{Key: "ec_transfer_params", Remove: true}), true
}
