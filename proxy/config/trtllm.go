package config

// TRTLLM configures the calls to TensorRT-LLM's workers, beyond the facts that each
// worker reports.
type TRTLLM struct {
	// AuthKeyFile is a file with the workers' internal_request_auth_key. With this key
	// the proxy signs the address from which decode fetches the KV. Default "": the proxy
	// does not sign, and workers with a key reject the request.
	AuthKeyFile string `toml:"auth_key_file"`
	// Base64IDs makes prefill pass a chat prompt's token ids as one base64 text instead
	// of a list of numbers, which is smaller and faster to read. Workers from 1.3
	// support it. Default false.
	Base64IDs bool `toml:"base64_ids"`
	// StripHistory sends decode only the last message of a chat, because it has the
	// prompt as token ids. Wrong for harmony and multimodal models. Default false.
	StripHistory bool `toml:"strip_history"`
	// PerfMetrics requests the timing of each request from workers with
	// return_perf_metrics, and sets their clocks. GET /v1/explain and /perf_metrics show
	// the timing, and clients get it on request. Default false.
	PerfMetrics bool `toml:"perf_metrics"`
	// Msgpack sends bodies to workers as MessagePack, which they read faster, if they
	// were started with TRTLLM_SERVE_ENABLE_MSGSPEC=1. Other workers reject every
	// request. Default false: JSON.
	Msgpack bool `toml:"msgpack"`
}
