package loads

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// ReadSGLang reads GET /v1/loads of SGLang. Source: srt/entrypoints/v1_loads.py,
// srt/managers/load_snapshot.py: num_total_tokens is the KV in use plus the waiting
// prompts; num_waiting_uncached_tokens includes the uncomputed rest of a chunked
// prompt.
//
// If requests on a decode engine wait only for memory, or were retracted for lack of
// it, the engine has no free memory, whatever its token_usage: part of the memory is
// reserved for running requests.
func ReadSGLang(body []byte) (Answer, error) {
	list, ok, err := openai.Lookup(body, "loads")
	if err != nil {
		return Answer{}, err
	}
	if !ok {
		return Answer{}, errNoLoad
	}
	return readList(list, func(r *Rank, o *openai.Object) {
		r.Running = requests(number(o, "num_running_reqs"))
		r.Waiting = requests(number(o, "num_waiting_reqs"))
		r.Tokens = tokens(max(number(o, "num_total_tokens"), number(o, "num_used_tokens")))
		r.Capacity = tokens(number(o, "max_total_num_tokens"))
		r.Usage = portion(number(o, "token_usage"))
		r.Queued = optional(o, "num_waiting_uncached_tokens")
		queues, disagg := member(o, "queues"), member(o, "disaggregation")
		if number(&queues, "prealloc_ready") > 0 || number(&disagg, "decode_retracted_queue_reqs") > 0 {
			r.Usage = 1
		}
		r.Moved, r.MovedIn = lastTransfer(o, &disagg)
	})
}

// lastTransfer returns the tokens of the KV that a prefill rank sent last, and the
// duration. The engine reports speed and time. The size of a token is the total memory
// divided by its token capacity (speed and memory have the same unit of 2^30 bytes).
func lastTransfer(o, disagg *openai.Object) (tokens int64, took time.Duration) {
	memory := member(o, "memory")
	speed, millis := number(disagg, "kv_transfer_speed_gb_s"), number(disagg, "kv_transfer_latency_ms")
	size, capacity := number(&memory, "kv_cache_gb"), number(&memory, "token_capacity")
	if !(speed > 0 && millis > 0 && size > 0 && capacity > 0) {
		return 0, 0
	}
	took = time.Duration(bounded(millis, 1e6) * float64(time.Millisecond))
	return int64(bounded(speed*took.Seconds()/size*capacity, 1<<40)), took
}

// member returns a member of o that is an object, or an empty object.
func member(o *openai.Object, key string) openai.Object {
	var inner openai.Object
	if v, ok := o.Get(key); ok && inner.Parse(v) != nil {
		return openai.Object{}
	}
	return inner
}

// ReadSGLangLegacy reads GET /get_load of older engines. Source:
// srt/managers/io_struct.py GetLoadReqOutput.
func ReadSGLangLegacy(body []byte) (Answer, error) {
	return readList(body, func(r *Rank, o *openai.Object) {
		all, waiting := number(o, "num_reqs"), number(o, "num_waiting_reqs")
		r.Running, r.Waiting = requests(all-waiting), requests(waiting)
		r.Tokens = tokens(number(o, "num_tokens"))
		r.Queued = optional(o, "num_pending_tokens")
	})
}

// readList reads a JSON list with an object for each rank. An object without a rank
// describes all ranks.
func readList(list []byte, read func(*Rank, *openai.Object)) (Answer, error) {
	elements, err := openai.Elements(list)
	if err != nil {
		return Answer{}, err
	}
	var answer Answer
	for raw := range elements {
		var o openai.Object
		if o.Parse(raw) != nil {
			continue
		}
		n := Whole
		if v, ok := o.Get("dp_rank"); ok && !openai.IsNull(v) {
			id, whole := openai.Int64(v)
			if !whole || id < 0 || id >= maxRanks {
				continue
			}
			n = int(id)
		}
		if r := answer.rank(n); r != nil {
			read(r, &o)
		}
	}
	if len(answer.Ranks) == 0 {
		return Answer{}, errNoLoad
	}
	return answer, nil
}
