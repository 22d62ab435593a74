package openai

import (
	"slices"
	"strings"
)

// pdFields are the PD fields of request bodies: top-level members that describe to engines a
// transfer, about the encoders and caches to call, and about the process that receives their
// answer.
//
// Sources: vLLM entrypoints/openai/*/protocol.py (kv_transfer_params,
// ec_transfer_params, request_id) and v1/kv_hints/protocol.py (kv_hints); SGLang
// managers/io_struct.py GenerateReqInput, all members of which /generate reads from a
// body, and entrypoints/openai/protocol.py (bootstrap_*, decode_tp_size, ranks, rid,
// members that its language servers exchange with encoders, http_worker_ipc,
// kv_router_hint, and positional_embed_overrides, a tensor between processes);
// TensorRT-LLM serve/openai_protocol.py (disaggregated_params; prompt_token_ids_b64 is
// the orchestrator's form of prompt_token_ids, which clients may send).
var pdFields = [...]string{
	"kv_transfer_params", "ec_transfer_params", "request_id", "kv_hints", "kv_router_hint",
	"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
	"routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", "rid", "http_worker_ipc",
	"need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls", "mm_data_mooncake", "positional_embed_overrides",
	"disaggregated_params", "prompt_token_ids_b64",
}

// pdContainers are the top-level members in which engines also look for transfer
// parameters.
//
// Sources, in vLLM: entrypoints/openai/*/protocol.py (vllm_xargs, which
// to_sampling_params merges with the transfer parameters), sampling_params.py
// (extra_args, from which v1/request.py reads them), and the sampling parameters of the
// Rust front end (extra_args and vllm_xargs).
var pdContainers = [...]string{"vllm_xargs", "extra_args", "sampling_params"}

// pdNames are the names of all members that CutPD may cut.
var pdNames = slices.Concat(pdFields[:], pdContainers[:])

// PDCuts is the maximum number of edits of CutPD: one for each PD field, and one for
// each member that may contain transfer parameters. No body has a member twice, and
// [ParseRequest] rejects these names in another case.
const PDCuts = len(pdFields) + len(pdContainers)

// PDField reports whether a top-level member of a request body is a PD field, which
// only a trusted client may set. Case does not matter, because some JSON decoders
// ignore it.
func PDField(key string) bool {
	found, _ := named(pdFields[:], key)
	return found
}

// HoldsPD reports whether a top-level member of a request body with that value
// contains, or could contain, transfer parameters. For sampling_params that depends on
// the value; a value that is not valid JSON counts. Case does not matter.
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
	return xargs || holdsTransferParams(value)
}

// named reports whether key is one of the names, ignoring case as encoding/json of Go
// and similar decoders do, and whether it is exactly one.
func named(names []string, key string) (found, exact bool) {
	if slices.Contains(names, key) {
		return true, true
	}
	return slices.ContainsFunc(names, func(name string) bool { return strings.EqualFold(name, key) }), false
}

// checkPDHolder rejects a string or a list in place of the object that may contain
// transfer parameters: an engine could convert it to such an object.
func checkPDHolder(field string, value []byte) error {
	if value[0] == '"' || value[0] == '[' {
		return mistyped(field, "an object")
	}
	return nil
}

// CutPD appends the edits that cut the PD fields out of r's body, unless an earlier
// edit sets the field. It cuts transfer parameters at every depth out of the members
// that may contain them. edits must have capacity for PDCuts more: CutPD does not grow
// it, so that the edits and their values stay on the caller's stack. It cuts only the
// exact names, because [ParseRequest] rejects them in another case. A scanned body has
// each name once, so PDCuts edits are always enough.
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
		if holdsTransferParams(value) {
			edits[n] = Edit{Key: key, cut: true}
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

// transferNames are the names under which vLLM reads its transfer parameters from an object.
var transferNames = [...]string{"kv_transfer_params", "ec_transfer_params"}

// transferName reports whether a key is one of these names, ignoring case.
func transferName(key string) bool {
	return strings.EqualFold(key, transferNames[0]) || strings.EqualFold(key, transferNames[1])
}

// CutTransferParams returns a scanned value without vLLM's transfer parameters at any
// depth, or the value itself if there are none. keep names a member of the value that
// stays unchanged, because the caller replaces it; "" for none.
func CutTransferParams(value []byte, keep string) []byte {
	if !holdsTransferParams(value) {
		return value
	}
	return appendCut(make([]byte, 0, len(value)), value, keep)
}

// holdsTransferParams reports whether a scanned value has transfer parameters at any depth.
func holdsTransferParams(value []byte) (holds bool) {
	c := Cursor{Text: value}
	c.Walk("", 0, func(key string, _ int, _ []byte) bool {
		holds = holds || transferName(key)
		return !holds
	})
	return holds
}

// appendCut appends a value as CutTransferParams returns it. The value must be valid JSON; it may
// have any size and is read once. All other bytes stay unchanged.
func appendCut(dst, value []byte, keep string) []byte {
	s, c := splicer{raw: value, out: dst}, Cursor{Text: value}
	s.cut(&c, keep)
	return append(s.out, value[s.from:]...)
}

// cut removes the transfer parameters from the next value.
func (s *splicer) cut(c *Cursor, keep string) {
	switch c.Peek() {
	case '[':
		for c.Open('['); c.Next(']'); {
			s.cut(c, "")
		}
	case '{':
		outer := s.kept
		s.kept = 0
		for c.Open('{'); c.Next('}'); {
			at, name := c.key, unescapedName(c.Key)
			switch {
			case keep != "" && name == keep:
				c.Skip()
			case transferName(name):
				c.Skip()
				s.remove(at, c.at)
				continue
			default:
				s.cut(c, "")
			}
			s.kept = c.at
		}
		s.kept = outer
	default:
		c.Skip()
	}
}
