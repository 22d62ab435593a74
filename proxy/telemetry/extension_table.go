package telemetry

import "github.com/prometheus/client_golang/prometheus"

// ExtensionMetric is a metric of the endpoint picker of the Inference Extension (up to v1.3.0) and of
// llm-d's, its successor.
type ExtensionMetric struct {
	Extension, LLMD string // full names; "": that picker has none
	// Ours are the metrics of this proxy with the same values. "": there are none.
	Ours string
	// Note says what differs, or why there is no equal.
	Note string

	flow    bool      // the metric of the Extension has the labels fairness_id and priority, too
	more    []string  // further labels
	buckets []float64 // of a histogram of ended exchanges; nil: this is none
	of      func(*Exchange) (v float64, ok bool)
}

// Buckets of llm-d-router, pkg/epp/metrics/metrics.go and llm_d_router_metrics.go, with the bound
// 32778.
var (
	extensionTimes     = []float64{.005, .025, .05, .1, .2, .4, .6, .8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 45, 60, 120, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600}
	extensionFirsts    = extensionTimes[:24] // to 120 s
	extensionRequests  = prometheus.ExponentialBuckets(64, 2, 25)
	extensionPrompts   = []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32778, 65536, 131072, 262144, 524288, 1048576}
	extensionAnswers   = extensionPrompts[:15] // to 65536
	extensionOutputs   = extensionPrompts[:12] // to 8192
	extensionPerToken  = []float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10}
	extensionNextToken = []float64{.0005, .00205, .005, .01, .02, .04, .06, .08, .1, .125, .15, .2, .3, .4, .5, .6, .8, 1, 2}
	extensionWaits     = []float64{.0001, .0005, .001, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}
)

const noFlowLabels = "without the labels of the priority and the flow"

const noFlowControl = "the queue of the proxy has no such part"

// ExtensionMetrics lists every metric of the two pickers. Sources: llm-d-router, pkg/epp/metrics and
// the producer inflightload; gateway-api-inference-extension v1.3.0, pkg/epp/metrics.
var ExtensionMetrics = []ExtensionMetric{
	{Extension: requestsName, LLMD: "llm_d_epp_request_total", Ours: "pdproxy_exchanges_total", Note: "counted at the end of a request"},
	{Extension: errorsName, LLMD: "llm_d_epp_request_error_total", Ours: "pdproxy_exchanges_total", Note: "requests with an error of the proxy, the picker or the engine; a client that leaves is no error"},
	{Extension: "inference_objective_request_duration_seconds", LLMD: "llm_d_epp_request_duration_seconds", Ours: "pdproxy_exchange_duration_seconds",
		buckets: extensionTimes, of: func(e *Exchange) (float64, bool) { return e.Duration.Seconds(), e.Outcome == OutcomeOK }, Note: "successful requests"},
	{Extension: "inference_objective_request_sizes", LLMD: "llm_d_epp_request_size_bytes", Ours: "access log",
		buckets: extensionRequests, of: func(e *Exchange) (float64, bool) { return float64(e.Received), true }},
	{Extension: "inference_objective_response_sizes", LLMD: "llm_d_epp_response_size_bytes", Ours: "access log",
		buckets: extensionAnswers, of: func(e *Exchange) (float64, bool) { return float64(e.Sent), e.Outcome == OutcomeOK }, Note: "with `epp.listen`, only of answers whose body the gateway shows"},
	{Extension: "inference_objective_input_tokens", LLMD: "llm_d_epp_request_input_tokens", Ours: "pdproxy_prompt_tokens",
		buckets: extensionPrompts, of: func(e *Exchange) (float64, bool) { return float64(e.Prompt), e.Prompt > 0 }},
	{Extension: "inference_objective_output_tokens", LLMD: "llm_d_epp_request_output_tokens", Ours: "pdproxy_output_tokens",
		buckets: extensionOutputs, of: func(e *Exchange) (float64, bool) { return float64(e.Completion), e.Completion > 0 }},
	{Extension: "inference_objective_prompt_cached_tokens", LLMD: "llm_d_epp_request_cached_tokens", Ours: "pdproxy_tokens_total",
		buckets: extensionPrompts, of: func(e *Exchange) (float64, bool) { return float64(e.Cached), e.Cached >= 0 }, Note: "requests whose engine reports the number"},
	{Extension: "inference_objective_normalized_time_per_output_token_seconds", LLMD: "llm_d_epp_request_ntpot_seconds", Ours: "pdproxy_exchange_duration_seconds",
		buckets: extensionPerToken, of: func(e *Exchange) (float64, bool) {
			return e.Duration.Seconds() / float64(max(1, e.Completion)), e.Outcome == OutcomeOK && e.Completion > 0
		}},
	{LLMD: "llm_d_epp_request_ttft_seconds", Ours: "pdproxy_time_to_first_token_seconds", Note: "`streaming=\"false\"`: `pdproxy_whole_answer_seconds`",
		more: []string{"streaming"}, buckets: extensionFirsts, of: func(e *Exchange) (float64, bool) {
			return e.FirstByte.Seconds(), e.Outcome == OutcomeOK && e.FirstByte > 0
		}},
	{LLMD: "llm_d_epp_request_streaming_tpot_seconds", Ours: "pdproxy_inter_event_seconds",
		buckets: extensionNextToken, of: func(e *Exchange) (float64, bool) {
			return (e.Duration - e.FirstByte).Seconds() / float64(max(1, e.Completion-1)), e.Outcome == OutcomeOK && e.Stream && e.FirstByte > 0 && e.Completion > 1
		}},
	{LLMD: "llm_d_epp_request_streaming_itl_seconds", Note: "`pdproxy_inter_event_seconds` has other buckets, and a second histogram would cost time for each event"},
	{Extension: runningName, Ours: "pdproxy_requests_running"},
	{LLMD: requestRunningName, Ours: "pdproxy_requests_running", Note: noFlowLabels},

	{Extension: "inference_pool_average_kv_cache_utilization", LLMD: "llm_d_epp_average_kv_cache_utilization", Ours: "reports of the engines", Note: "mean of the ranks of the ready engines, as for the following"},
	{Extension: "inference_pool_average_queue_size", LLMD: "llm_d_epp_average_queue_size", Ours: "pdproxy_role_requests_waiting"},
	{Extension: "inference_pool_average_running_requests", LLMD: "llm_d_epp_average_running_requests", Ours: "reports of the engines"},
	{LLMD: "llm_d_epp_std_dev_kv_cache_utilization", Ours: "reports of the engines"},
	{LLMD: "llm_d_epp_std_dev_queue_size", Ours: "reports of the engines"},
	{LLMD: "llm_d_epp_std_dev_running_requests", Ours: "reports of the engines"},
	{Extension: "inference_pool_ready_pods", LLMD: "llm_d_epp_ready_endpoints", Ours: "pdproxy_role_engines_ready"},
	{Extension: "inference_pool_per_pod_queue_size", LLMD: "llm_d_epp_per_endpoint_queue_size", Ours: "reports of the engines", Note: "the pod is the name of the engine, with `-rank-N` if the engine has several ranks"},
	{Extension: "inference_extension_info", LLMD: "llm_d_epp_info", Ours: "pdproxy_build_info", Note: "`build_ref` is the version of pdproxy"},

	{Extension: "inference_extension_flow_control_request_queue_duration_seconds", LLMD: "llm_d_epp_flow_control_request_queue_duration_seconds", Ours: "pdproxy_queue_wait_seconds",
		flow: true, more: []string{"outcome", "inference_pool"}, buckets: extensionWaits, of: func(e *Exchange) (float64, bool) {
			return e.Waited.Seconds(), e.Waited >= 0 && e.Outcome != OutcomeShed
		}, Note: "only requests that got a place (`outcome=\"Dispatched\"`)"},
	{Extension: queueSizeName, LLMD: "llm_d_epp_flow_control_queue_size", Ours: "pdproxy_requests_waiting", Note: "requests that wait in the proxy, " + noFlowLabels},
	{Extension: "inference_extension_flow_control_queue_bytes", LLMD: "llm_d_epp_flow_control_queue_bytes", Note: "the queue is not bounded by bytes; `pdproxy_buffer_bytes` has all requests"},
	{Extension: "inference_extension_flow_control_pool_saturation", LLMD: "llm_d_epp_flow_control_pool_saturation", Ours: "reports of the engines", Note: "only with `limits.saturation_queue_depth`: the phase with more work, as a share of the limits"},
	{Extension: "inference_extension_flow_control_dispatch_cycle_duration_seconds", LLMD: "llm_d_epp_flow_control_dispatch_cycle_duration_seconds", Note: noFlowControl},
	{Extension: "inference_extension_flow_control_request_enqueue_duration_seconds", LLMD: "llm_d_epp_flow_control_request_enqueue_duration_seconds", Note: noFlowControl},
	{LLMD: "llm_d_epp_flow_control_stale_endpoints", Note: "an engine without a fresh report does not count as saturated"},
	{LLMD: "llm_d_epp_flow_control_capacity_utilization_requests", Note: "classes have weights instead of capacities"},
	{LLMD: "llm_d_epp_flow_control_capacity_utilization_bytes", Note: "classes have weights instead of capacities"},
	{LLMD: "llm_d_epp_flow_control_global_capacity_utilization_requests", Note: noFlowControl},
	{LLMD: "llm_d_epp_flow_control_global_capacity_utilization_bytes", Note: noFlowControl},
	{LLMD: "llm_d_epp_flow_control_requests_total", Note: "`pdproxy_shed_total` has the reasons"},
	{LLMD: "llm_d_epp_flow_control_revocations_issued_total", Note: noFlowControl},
	{LLMD: "llm_d_epp_flow_control_revocations_total", Note: noFlowControl},
	{LLMD: "llm_d_epp_flow_control_reclaim_target", Note: noFlowControl},
	{LLMD: "llm_d_epp_flow_control_pending_reclaim", Note: noFlowControl},
	{LLMD: "llm_d_epp_flow_control_revocation_confirmation_seconds", Note: noFlowControl},

	{Extension: "inference_extension_scheduler_e2e_duration_seconds", LLMD: "llm_d_epp_scheduler_e2e_duration_seconds", Note: "`pdproxy_policy_duration_seconds` has the parts of a decision, and other buckets"},
	{Extension: "inference_extension_scheduler_attempts_total", LLMD: "llm_d_epp_scheduler_attempts_total", Note: "records (`pdproxy explain`) have the engines of a request"},
	{Extension: "inference_extension_plugin_duration_seconds", LLMD: "llm_d_epp_plugin_duration_seconds", Note: "`pdproxy_policy_duration_seconds` has other buckets"},
	{LLMD: "llm_d_epp_plugin_data_scope_violations_total", Note: "a policy cannot read data that it does not declare"},
	{LLMD: "llm_d_epp_inflight_requests", Note: "`pdproxy_engine_load` has the requests of each engine"},
	{LLMD: "llm_d_epp_inflight_tokens", Note: "`pdproxy_role_saturation_seconds` has the work of prefill as a time"},
	{LLMD: "llm_d_epp_request_processing_duration_seconds", Note: "`pdproxy_policy_duration_seconds` and `pdproxy_queue_wait_seconds` have the parts"},
	{LLMD: "llm_d_epp_response_processing_duration_seconds", Note: "not measured"},
	{Extension: "inference_extension_model_rewrite_decisions_total", LLMD: "llm_d_epp_model_rewrite_decisions_total", Note: "`pdproxy_model_choices_total` has no name of an object"},
	{LLMD: "llm_d_epp_datalayer_poll_errors_total", Note: "the log names engines whose load cannot be read"},
	{LLMD: "llm_d_epp_datalayer_extract_errors_total", Note: "the log names engines whose load cannot be read"},
}

// Names of metrics that are no histograms and are made in this package.
const (
	requestsName = "inference_objective_request_total"
	errorsName   = "inference_objective_request_error_total"
	runningName  = "inference_objective_running_requests"

	requestRunningName = "llm_d_epp_request_running"
	queueSizeName      = "inference_extension_flow_control_queue_size"
)
