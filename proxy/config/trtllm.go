package config

// TRTLLM configures the calls to TensorRT-LLM's workers, beyond the facts that each
// worker reports.
type TRTLLM struct {
	// AuthKeyFile is a file with the workers' internal_request_auth_key. With this key
	// the proxy signs the address from which decode fetches the KV. Default "": the proxy
	// does not sign, and workers with a key reject the request.
	AuthKeyFile string `toml:"auth_key_file"`
	// PerfMetrics requests the timing of each request from workers with
	// return_perf_metrics, and sets their clocks. GET /v1/explain and /perf_metrics show
	// the timing, and clients get it on request. Default false.
	PerfMetrics bool `toml:"perf_metrics"`
	// ScheduleStyle is the order of the legs of a pair: "context_first" or
	// "generation_first", which needs prefill engines that publish an endpoint in
	// GET /server_info; "" is the latter where they do. Default "context_first".
	ScheduleStyle string `toml:"schedule_style"`
}

func defaultTRTLLM() TRTLLM { return TRTLLM{ScheduleStyle: "context_first"} }
