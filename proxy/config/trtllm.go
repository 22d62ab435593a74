package config

// TRTLLM is how the workers of TensorRT-LLM are spoken to, beyond what each says
// of itself.
type TRTLLM struct {
	// AuthKeyFile is a file with the key that signs, for decode, where the KV is
	// fetched: the workers' internal_request_auth_key. Default "": not signed,
	// which workers with a key refuse.
	AuthKeyFile string `toml:"auth_key_file"`
	// Base64IDs has prefill hand a chat prompt's token ids on as one base64
	// text instead of a list of numbers, which is smaller and faster to read.
	// Workers from 1.3 know it. Default false.
	Base64IDs bool `toml:"base64_ids"`
	// StripHistory leaves decode of a chat the last message only: it has the
	// prompt as token ids. Wrong for harmony and multimodal models. Default
	// false.
	StripHistory bool `toml:"strip_history"`
	// PerfMetrics asks workers for the times of each request, which those with
	// return_perf_metrics tell, and sets their clocks; shown by explain and
	// /perf_metrics, and answered to clients that ask for them. Default false.
	PerfMetrics bool `toml:"perf_metrics"`
	// Msgpack sends bodies to workers as MessagePack, which is faster for them to
	// read: those that were started with TRTLLM_SERVE_ENABLE_MSGSPEC=1. Others
	// refuse every request. Default false: JSON.
	Msgpack bool `toml:"msgpack"`
}
