package openai

import (
	"slices"
	"strings"
)

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

// pdContainers are the top-level members inside which engines look for transfer
// parameters too.
//
// Sources, in vLLM: entrypoints/openai/*/protocol.py (vllm_xargs, which
// to_sampling_params merges with the transfer parameters), sampling_params.py
// (extra_args, from which v1/request.py takes them), and the sampling parameters
// of the Rust front end (extra_args and vllm_xargs).
var pdContainers = [...]string{"vllm_xargs", "extra_args", "sampling_params"}

// PDCuts is how many edits CutPD makes at most: one for each PD field, and one for
// each member that may hold transfer parameters. No body has a member twice, and
// [ParseRequest] refuses these names in another case.
const PDCuts = len(pdFields) + len(pdContainers)

// PDField reports whether a top-level member of a request body is a PD field: one
// that no client sets unless it is trusted, whatever its request meets. Case does
// not count: some decoders of JSON ignore it.
func PDField(key string) bool {
	found, _ := named(pdFields[:], key)
	return found
}

// HoldsPD reports whether a top-level member of a request body with that value
// holds, or could be given, transfer parameters: one in which engines look for them.
// sampling_params is one only if it has a place for them; a value of it that is no
// valid JSON counts as one. Case does not count.
func HoldsPD(key string, value []byte) bool {
	found, exact := named(pdContainers[:], key)
	if !exact || key != "sampling_params" {
		return found
	}
	if len(value) == 0 {
		return false
	}
	_, args, err := Lookup(value, "extra_args")
	if args || err != nil {
		return true
	}
	_, xargs := Find(value, "vllm_xargs")
	_, cut := cutTransferParams(value, "")
	return xargs || cut
}

// named reports whether key is one of the names without regard to case, as
// encoding/json of Go and similar decoders compare, and whether it is exactly one.
func named(names []string, key string) (found, exact bool) {
	for i := range names {
		if names[i] == key {
			return true, true
		}
	}
	if !hasCase(key) {
		return false, false
	}
	for i := range names {
		if strings.EqualFold(names[i], key) {
			return true, false
		}
	}
	return false, false
}

// hasCase reports whether folding could change key: it has an upper-case letter, or
// one outside ASCII (the Kelvin sign folds to k, the long s to s).
func hasCase(key string) bool {
	for i := range len(key) {
		if c := key[i]; c-'A' < 26 || c >= 0x80 {
			return true
		}
	}
	return false
}

// checkPDName refuses a member whose name is that of a PD field, or of a member
// that may hold one, but for the case: engines do not agree what it is.
func checkPDName(key string) error {
	if !hasCase(key) {
		return nil
	}
	field, exact := named(pdFields[:], key)
	holder, exactly := named(pdContainers[:], key)
	if field && !exact || holder && !exactly {
		return fieldError(clip(key), "invalid_name", "'"+clip(key)+"' must be written in lower case.")
	}
	return nil
}

// checkPDHolder refuses a text or a list where engines expect the object that may
// hold transfer parameters: an engine could make such an object of it.
func checkPDHolder(field string, value []byte) error {
	if value[0] == '"' || value[0] == '[' {
		return mistyped(field, "an object")
	}
	return nil
}

// CutPD adds to the edits of r's body those that cut the PD fields out of it,
// unless an edit before sets the field. Transfer parameters are cut out of the
// members that may hold them at every depth. The edits must have room for PDCuts
// more: it is not grown, so that they, and the values that they point to, stay on
// the caller's stack. Only the exact names are cut, because [ParseRequest] refuses
// them in another case. A scanned body has each name once, so that PDCuts edits are
// always enough.
func CutPD(edits []Edit, r *Request) []Edit {
	n := len(edits)
	edits = edits[:cap(edits)]
	for key, value := range r.Members {
		if slices.Contains(pdFields[:], key) {
			if !sets(edits[:n], key) {
				edits[n] = Edit{Key: key, Remove: true}
				n++
			}
			continue
		}
		if !slices.Contains(pdContainers[:], key) || sets(edits[:n], key) {
			continue
		}
		if rest, cut := cutTransferParams(value, ""); cut {
			edits[n] = Edit{Key: key, Value: rest}
			n++
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
