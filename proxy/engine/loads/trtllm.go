package loads

import (
	"strconv"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// ReadTRTLLM reads GET /metrics of TensorRT-LLM: a JSON list with the statistics of each
// iteration since the last GET of any client. The list is empty if no iteration has ended
// since. Without enable_iter_perf_stats the list is always empty. From an empty list
// ReadTRTLLM returns an Answer without ranks.
//
// With attention data parallelism there is a row for each rank. The row has the rank's
// own counts of scheduled and paused requests. All ranks share one queue, which the row
// of rank 0 reports. numActiveRequests and the blocks may be those of rank 0 in all rows.
// Source: _torch/pyexecutor/adp_iter_stats.py, executor/base_worker.py _stats_serializer.
func ReadTRTLLM(body []byte) (Answer, error) {
	rows, err := openai.Elements(body)
	if err != nil {
		return Answer{}, err
	}
	last := make(map[int][]byte) // last row of each rank
	ranks := 0
	for raw := range rows {
		n := 0
		if v, ok := openai.Find(raw, "attentionDpRank"); ok {
			id, _ := openai.Int64(v)
			n = int(min(max(id, 0), maxRanks))
		}
		if n < maxRanks {
			last[n] = raw
			ranks = max(ranks, n+1)
		}
	}
	var answer Answer
	var queue row
	for n := range ranks {
		r, ok := readRow(last[n])
		if !ok {
			continue
		}
		if n == 0 {
			queue = r
			answer.BlockTokens = int(r.blockTokens)
		}
		running := r.active
		if ranks > 1 {
			running = r.scheduled + r.paused
		}
		at := answer.rank(n)
		at.Running = requests(running)
		at.Usage = portion(r.used / max(1, r.blocks))
		at.Tokens = tokens(r.used * r.blockTokens)
		at.Capacity = tokens(r.blocks * r.blockTokens)
	}
	whole := Rank{}
	whole.Waiting, whole.Queued = requests(queue.queued), queue.queuedTokens
	for i := range answer.Ranks {
		part := whole.share(i, len(answer.Ranks))
		answer.Ranks[i].Waiting, answer.Ranks[i].Queued = part.Waiting, part.Queued
	}
	if ranks == 1 && len(answer.Ranks) == 1 {
		if _, told := openai.Find(last[0], "attentionDpRank"); !told {
			answer.Ranks[0].Rank = Whole
		}
	}
	return answer, nil
}

// row holds the statistics of one iteration.
type row struct {
	active, queued            float64 // requests
	scheduled, paused         float64 // requests
	queuedTokens              int64   // prompt tokens of queued requests; -1 if not reported
	used, blocks, blockTokens float64 // of KV
}

func readRow(raw []byte) (r row, ok bool) {
	var o, batch, cache openai.Object
	if len(raw) == 0 || o.Parse(raw) != nil {
		return r, false
	}
	r.active, r.queued = number(&o, "numActiveRequests"), number(&o, "numQueuedRequests")
	r.queuedTokens = -1
	if v, _ := o.Get("inflightBatchingStats"); batch.Parse(v) == nil {
		r.scheduled, r.paused = number(&batch, "numScheduledRequests"), number(&batch, "numPausedRequests")
		r.queuedTokens = optional(&batch, "numQueuedCtxTokens")
	}
	if v, _ := o.Get("kvCacheStats"); cache.Parse(v) == nil {
		r.used, r.blocks = number(&cache, "usedNumBlocks"), number(&cache, "maxNumBlocks")
		r.blockTokens = bounded(number(&cache, "tokensPerBlock"), 1<<20)
	}
	return r, true
}

// number returns a numeric member, or 0.
func number(o *openai.Object, key string) float64 {
	v, _ := o.Get(key)
	if len(v) == 0 || v[0] != '-' && (v[0] < '0' || v[0] > '9') {
		return 0
	}
	x, _ := strconv.ParseFloat(string(v), 64)
	return x
}

// optional returns a count of tokens, or -1 if the engine does not report it.
func optional(o *openai.Object, key string) int64 {
	if v, ok := o.Get(key); !ok || openai.IsNull(v) {
		return -1
	}
	return tokens(number(o, key))
}
