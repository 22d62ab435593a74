package openai

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

// PDCuts is how many edits CutPD makes at most: one for each PD field, and for
// vllm_xargs and sampling_params. No body has a member twice.
const PDCuts = len(pdFields) + 2

// PDField reports whether a top-level member of a request body is a PD field: one
// that no client sets unless it is trusted, whatever its request meets.
func PDField(key string) bool {
	for i := range pdFields {
		if pdFields[i] == key {
			return true
		}
	}
	return false
}

// CutPD adds to the edits of r's body those that cut the PD fields out of it,
// unless an edit before sets the field. The edits must have room for PDCuts more:
// it is not grown, so that they, and the values that they point to, stay on the
// caller's stack.
func CutPD(edits []Edit, r *Request) []Edit {
	n := len(edits)
	edits = edits[:cap(edits)]
	for key, value := range r.Members {
		switch {
		case PDField(key):
			if !sets(edits[:n], key) {
				edits[n] = Edit{Key: key, Remove: true}
				n++
			}
		case key == "vllm_xargs":
			// vLLM merges these into the same arguments that its transfer
			// parameters travel in.
			if rest, cut := cutTransferParams(value); cut {
				edits[n] = Edit{Key: key, Value: rest}
				n++
			}
		case key == "sampling_params" && r.API == VLLMGenerate && !sets(edits[:n], key):
			if rest, cut := cutExtraArgs(value); cut {
				edits[n] = Edit{Key: key, Value: rest}
				n++
			}
		}
	}
	return edits[:n]
}

// sets reports whether one of the edits gives the member a value.
func sets(edits []Edit, key string) bool {
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
	args, ok, err := Lookup(params, "extra_args")
	if err != nil || !ok {
		return nil, false
	}
	args, cut = cutTransferParams(args)
	if !cut {
		return nil, false
	}
	var o Object
	if o.Parse(params) != nil {
		return nil, false
	}
	return o.Append(nil, Edit{Key: "extra_args", Value: args}), true
}

// cutTransferParams cuts vLLM's transfer parameters out of an object that vLLM
// takes them from; cut is false, and rest nil, when there are none.
func cutTransferParams(args []byte) (rest []byte, cut bool) {
	var o Object
	if o.Parse(args) != nil { // no object: nothing is taken from it
		return nil, false
	}
	_, kv := o.Get("kv_transfer_params")
	_, ec := o.Get("ec_transfer_params")
	if !kv && !ec {
		return nil, false
	}
	return o.Append(nil,
		Edit{Key: "kv_transfer_params", Remove: true},
		Edit{Key: "ec_transfer_params", Remove: true}), true
}
