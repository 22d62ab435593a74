package loads

import "github.com/pdproxy/pdproxy/proxy/state/load"

// loraInfo is vLLM's gauge of the LoRA adapters of its requests.
const loraInfo = "vllm:lora_requests_info"

// adapterLabels are the labels of a sample of loraInfo. They point into the answer.
type adapterLabels struct {
	most             int64 // max_lora: different adapters in one batch
	running, waiting []byte
}

// newestAdapters finds the newest sample of loraInfo. Each step of the engine sets the sample of
// its adapters to the present time in seconds, and the samples of earlier combinations of
// adapters stay in the answer. Source: vLLM v1/metrics/loggers.py (record, gauge_lora_info),
// v1/metrics/stats.py (LoRARequestStates).
//
// The gauge has no label engine: with several data-parallel ranks, all of them write it, and the
// newest sample is about an unknown one. With several API servers (--api-server-count), the
// value is the sum of the times of all processes (multiprocess_mode "sum"), so that no sample is
// certainly the newest. The adapters are unknown in both cases.
type newestAdapters struct {
	at     float64
	labels adapterLabels
}

// latest is a time in seconds, in the year 2070. A sum of two times is above it.
const latest = 3.155e9

func (n *newestAdapters) add(s *sample) {
	if s.value >= n.at {
		n.at, n.labels = s.value, s.adapters
	}
}

// maxNames bounds the length in bytes of a list of adapters that is used. Each placement of a
// request with an adapter searches the lists of its candidates.
const maxNames = 16 << 10

// adapters returns the adapters in the newest sample, the zero value if they are not known or
// their lists are too long.
func (n *newestAdapters) adapters() load.Adapters {
	if n.at > latest || n.labels.most == 0 || max(len(n.labels.running), len(n.labels.waiting)) > maxNames {
		return load.Adapters{}
	}
	return load.NewAdapters(string(n.labels.running), string(n.labels.waiting), int32(n.labels.most))
}
