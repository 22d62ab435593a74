package config

import "testing"

// TestManagementRoutes: no route by which the engines of any kind are managed can be listed,
// and the routes for requests can.
func TestManagementRoutes(t *testing.T) {
	for _, route := range []string{
		// vLLM
		"/sleep", "/wake_up", "/is_sleeping", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache",
		"/collective_rpc", "/server_info", "/abort_requests", "/start_profile", "/stop_profile", "/pause", "/resume", "/is_paused", "/init_weight_transfer_engine",
		"/update_weights", "/get_world_size", "/scale_elastic_ep", "/is_scaling_elastic_ep", "/pd_role_switch", "/load", "/metrics", "/health", "/ping", "/version",
		// SGLang
		"/flush_cache", "/clear_hicache_storage_backend", "/hicache/storage-backend", "/freeze_gc", "/start_expert_distribution_record", "/dump_expert_distribution_record",
		"/update_weights_from_disk", "/init_weights_update_group", "/destroy_weights_update_group", "/send_weights_to_remote_instance", "/update_weight_version",
		"/get_weights_by_name", "/release_memory_occupation", "/resume_memory_occupation", "/slow_down", "/load_lora_adapter", "/open_session", "/close_session",
		"/configure_logging", "/abort_request", "/pause_generation", "/continue_generation", "/set_internal_state", "/add_external_corpus", "/get_server_info", "/model_info",
		"/dumper/set", "/route", "/register_to_bootstrap", "/health_generate", "/v1/loads",
		// TensorRT-LLM
		"/release_memory", "/resume_memory", "/kv_cache_events", "/v1/kv_cache_hints", "/steady_clock_offset", "/perf_metrics", "/prometheus/metrics", "/cluster_info",
		"/_internal/tokenize",
		// in another case, or with other separators
		"/Sleep", "/v2/UPDATE-WEIGHTS", "/x.reset", "/sim/fault",
	} {
		if managementPart(route) == "" {
			t.Errorf("%s can be listed", route)
		}
	}
	for _, route := range []string{
		"/generative_scoring", "/cohere/v2/chat", "/invocations", "/v1/chat/completions/batch", "/v1/chat/completions/render", "/v1/videos", "/v1/videos/generations",
		"/encode", "/parse_function_call", "/separate_reasoning", "/vertex_generate", "/api/chat", "/v1/audio/voices", "/v2/embed", "/v1/moderations", "/v1/images/variations",
	} {
		if part := managementPart(route); part != "" {
			t.Errorf("%s cannot be listed: %q", route, part)
		}
	}
}
