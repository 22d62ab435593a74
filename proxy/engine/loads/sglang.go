package loads

import (
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// ReadSGLang reads GET /v1/loads of SGLang. Source: srt/entrypoints/v1_loads.py,
// srt/managers/load_snapshot.py: num_total_tokens is the KV in use and the
// prompts that wait; num_waiting_uncached_tokens counts what is not computed of a
// prompt in chunks, too.
func ReadSGLang(body []byte) (Answer, error) {
	list, ok, err := openai.Lookup(body, "loads")
	if err != nil {
		return Answer{}, err
	}
	if !ok {
		return Answer{}, errSilent
	}
	return readList(list, func(r *Rank, o *openai.Object) {
		r.Running = requests(number(o, "num_running_reqs"))
		r.Waiting = requests(number(o, "num_waiting_reqs"))
		r.Tokens = tokens(max(number(o, "num_total_tokens"), number(o, "num_used_tokens")))
		r.Capacity = tokens(number(o, "max_total_num_tokens"))
		r.Usage = portion(number(o, "token_usage"))
		r.Queued = optional(o, "num_waiting_uncached_tokens")
	})
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

// readList reads a JSON list with an object for each rank. One without a rank
// speaks of all.
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
		return Answer{}, errSilent
	}
	return answer, nil
}
