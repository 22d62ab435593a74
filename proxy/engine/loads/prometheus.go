package loads

import (
	"bytes"
	"math"
	"strconv"
)

// ReadMetrics reads GET /metrics of vLLM, or of SGLang with --enable-metrics, in
// Prometheus' text format. A body that is a JSON list comes from TensorRT-LLM.
//
// An answer has thousands of samples, mostly of histograms, and the proxy needs only a
// few. This scanner skips the other samples without building values, which takes a small
// part of the time of a full parser. The scanner ignores an unreadable line and continues
// with the next one.
//
// Sources: vLLM v1/metrics/loggers.py (label engine is the data-parallel rank;
// gpu_cache_usage_perc is the old name of kv_cache_usage_perc, both from 0 to 1;
// lora_requests_info is described at newestAdapters);
// SGLang srt/observability/metrics_collector.py (label dp_rank).
func ReadMetrics(body []byte) (Answer, error) {
	if first := bytes.TrimLeft(body, " \t\r\n"); len(first) > 0 && first[0] == '[' {
		return ReadTRTLLM(body)
	}
	var (
		answer   Answer
		capacity int64                   // of each rank
		old      = make(map[int]float32) // usage under the old name
		lora     newestAdapters
	)
	for len(body) > 0 {
		var line []byte
		line, body, _ = bytes.Cut(body, []byte("\n"))
		s, ok := wanted(line)
		if !ok {
			continue
		}
		if s.name == "vllm:cache_config_info" {
			capacity = max(capacity, s.capacity)
			answer.BlockTokens = max(answer.BlockTokens, s.block)
			continue
		}
		if s.name == loraInfo {
			lora.add(&s)
			continue
		}
		r := answer.rank(s.rank)
		if r == nil {
			continue
		}
		switch s.name {
		case "vllm:num_requests_running", "sglang:num_running_reqs":
			r.Running = requests(float64(r.Running) + s.value)
		case "vllm:num_requests_waiting", "sglang:num_queue_reqs":
			r.Waiting = requests(float64(r.Waiting) + s.value)
		case "vllm:kv_cache_usage_perc", "sglang:token_usage":
			r.Usage = max(r.Usage, portion(s.value))
		case sleepState:
			r.Sleep = max(r.Sleep, s.sleep.of(s.value))
		case "vllm:gpu_cache_usage_perc":
			old[s.rank] = max(old[s.rank], portion(s.value))
		case "sglang:num_used_tokens":
			r.Tokens = max(r.Tokens, tokens(s.value))
		}
	}
	if len(answer.Ranks) == 0 {
		return Answer{}, errNoLoad
	}
	for i := range answer.Ranks {
		r := &answer.Ranks[i]
		if r.Usage == 0 {
			r.Usage = old[r.Rank]
		}
		if r.Capacity = capacity; r.Tokens == 0 {
			r.Tokens = int64(float64(r.Usage) * float64(r.Capacity))
		}
	}
	if len(answer.Ranks) == 1 {
		answer.Ranks[0].Adapters = lora.adapters()
	}
	return answer, nil
}

// sleepState is vLLM's gauge of the state of an engine: one sample for each of the states "awake",
// "weights_offloaded" (sleep level 1) and "discard_all" (level 2) in the label sleep_state, of which
// one is 1; none is 1 at level 0. In older releases, an engine with some of its memory awake (POST
// /wake_up?tags=weights) counts as awake.
// Source: vLLM v1/metrics/loggers.py (record_sleep_state).
const sleepState = "vllm:engine_sleep_state"

// sleepOf returns the state of a label sleep_state. The samples of "awake" and "discard_all" together
// show every state.
func sleepOf(label string) Sleep {
	switch label {
	case "awake":
		return Awake
	case "discard_all":
		return Discarded
	}
	return SleepUnknown
}

// of returns what the value of a sample about state s shows; SleepUnknown: nothing.
func (s Sleep) of(value float64) Sleep {
	switch {
	case s == Awake && value == 0:
		return Asleep
	case s == Discarded && value == 0:
		return SleepUnknown
	}
	return s
}

// sample is one line of the format with a needed name.
type sample struct {
	name     string
	rank     int
	value    float64
	sleep    Sleep // sleepState: the state that the sample is about
	block    int   // cache_config_info: tokens per block
	capacity int64 // cache_config_info: tokens of KV
	adapters adapterLabels
}

// wanted reads a line if the line is a sample with a needed name about a whole instance
// or a rank. It skips samples of tensor-parallel and similar workers above 0, which
// repeat the values of their rank.
func wanted(line []byte) (s sample, ok bool) {
	if !bytes.HasPrefix(line, []byte("vllm:")) && !bytes.HasPrefix(line, []byte("sglang:")) {
		return s, false
	}
	end := bytes.IndexAny(line, "{ \t")
	if end < 0 {
		return s, false
	}
	if s.name, ok = gauge(line[:end]); !ok {
		return s, false
	}
	s.rank, line = Whole, line[end:]
	if line[0] == '{' {
		if line, ok = s.labels(line[1:]); !ok {
			return s, false
		}
	}
	text, _, _ := bytes.Cut(bytes.TrimLeft(line, " \t"), []byte(" ")) // a timestamp may follow
	value, err := strconv.ParseFloat(string(bytes.TrimRight(text, "\t\r")), 64)
	s.value = value
	return s, err == nil && !math.IsNaN(value) && !math.IsInf(value, 0)
}

// gauge returns the name if it is needed.
func gauge(name []byte) (string, bool) {
	for _, known := range [...]string{
		"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
		"vllm:gpu_cache_usage_perc", "vllm:cache_config_info", loraInfo, sleepState,
		"sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "sglang:num_used_tokens",
	} {
		if string(name) == known {
			return known, true
		}
	}
	return "", false
}

// labels reads the labels of a sample and returns the bytes after the labels.
func (s *sample) labels(b []byte) (rest []byte, ok bool) {
	var blocks int64
	for {
		b = bytes.TrimLeft(b, " \t,")
		if len(b) > 0 && b[0] == '}' {
			if s.capacity == 0 {
				s.capacity = min(blocks*int64(s.block), 1<<40)
			}
			return b[1:], true
		}
		key, after, found := bytes.Cut(b, []byte(`="`))
		end := closing(after)
		if !found || end < 0 {
			return nil, false
		}
		value := after[:end]
		b = after[end+1:]
		switch string(key) {
		case "engine", "dp_rank":
			n, err := strconv.Atoi(string(value))
			if err == nil && n >= 0 {
				s.rank = n
			}
		case "tp_rank", "pp_rank", "moe_ep_rank":
			if string(value) != "0" {
				return nil, false
			}
		case "sleep_state":
			s.sleep = sleepOf(string(value))
		case "block_size":
			s.block = int(natural(value, 1<<20))
		case "num_gpu_blocks":
			blocks = natural(value, 1<<32)
		case "kv_cache_size_tokens":
			s.capacity = natural(value, 1<<40)
		case "max_lora":
			s.adapters.most = natural(value, 1<<20)
		case "running_lora_adapters":
			s.adapters.running = value
		case "waiting_lora_adapters":
			s.adapters.waiting = value
		}
	}
}

// natural reads an integer from 0 to most, and returns 0 for anything else.
func natural(text []byte, most int64) int64 {
	n, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil || n < 0 || n > most {
		return 0
	}
	return n
}

// closing returns the index of the quotation mark that ends the label value at the start
// of b, -1 if there is none.
func closing(b []byte) int {
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			return i
		}
	}
	return -1
}
