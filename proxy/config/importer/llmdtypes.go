package importer

// profileHandlers are the types of handlers that run profiles by name.
func profileHandlers() []string { return []string{"disagg-profile-handler", "pd-profile-handler"} }

// ownWork are the types of plugins whose work the proxy does by itself, with the reason why it needs
// none of their parameters.
func ownWork() map[string]string {
	const (
		prompt = "[tokens] gets the ids of prompts from clients, files and engines"
		events = "the proxy reads the blocks of each engine from its KV events: kv_events and kv_replay, if the engine does not announce them"
		report = "the proxy reads the reports of each engine in the form of its connector"
		load   = "the proxy counts the requests and tokens in flight by itself"
		roles  = "the plan policy and the roles of engines decide about the legs"
		form   = "the proxy reads the form of a request by its path"
		band   = "flowControl says which policy counts, and what does the same"
		object = "[discovery.kubernetes] watches the objects that it needs"
	)
	return map[string]string{
		"approx-prefix-cache-producer": "the proxy follows the KV events of engines, or estimates their blocks: kv_index.text_tokens", "precise-prefix-cache-producer": events,
		"token-producer": prompt, "tokenizer": prompt, "inflight-load-producer": load, "mm-embeddings-cache-producer": "the proxy remembers the last 2,048 media that each engine was sent", "predicted-latency-producer": "the proxy predicts times by the measured ones of each engine",
		"session-id-producer": "the id is used by the session affinity alone", "agent-identity": "conversation.headers has the headers of agents",
		"destination-endpoint-served-verifier": "it is a test of llm-d",
		"file-discovery":                       "dataLayer.discovery names the source of the endpoints",
		"metrics-data-source":                  report, "core-metrics-extractor": report, "models-data-source": report, "models-data-extractor": report,
		"endpoint-notification-source": object, "k8s-notification-source": object, "topology-extractor": "the scorers name the labels of its place",
		"disagg-headers-handler": roles, "prefill-header-handler": roles, singleHandler: roles, headerHandler: roles, "disagg-profile-handler": roles, "pd-profile-handler": roles,
		dataParallelHandler: "the proxy addresses the ranks of an engine by itself",
		"prefill-filter":    roles, "decode-filter": roles, "encode-filter": roles,
		"openai-parser": form, "anthropic-parser": form, "vllmhttp-parser": form, "sglanghttp-parser": form,
		"static-usage-limit-policy": band, "soft-reflective-ceiling-policy": band, "priority-holdback-policy": band,
		"fcfs-ordering-policy": band, "edf-ordering-policy": band, "slo-deadline-ordering-policy": band,
		"global-strict-fairness-policy": band, "round-robin-fairness-policy": band, "program-aware-fairness": band,
		"sheddable-eviction-filter": band, "priority-then-time-eviction-order-policy": band,
	}
}

// otherWork are the types of plugins without an equal whose work changes no answer: the difference.
func otherWork() map[string]string {
	const cluster = "the proxy places on engines, not on clusters"
	const metric = "the proxy reads no GPU metrics"
	return map[string]string{
		"burst-prefix-cache-producer": "the proxy does not hold requests back to place equal prompts together: the index of blocks finds them after the first one",
		"p2p-source-producer":         "an engine fetches KV from the prefill engine of its request only: see the connector vllm-p2p-tier",
		"request-attribute-reporter":  "epp.metadata tells the gateway the tokens of a request under fixed names, without expressions",
		"dcgm-data-source":            metric, "dcgm-extractor": metric,
		"multicluster-queue-scorer": cluster, "multicluster-kv-cache-utilization-scorer": cluster, "multicluster-prefix-cache-scorer": cluster,
		"multicluster-session-affinity-filter": cluster, "multicluster-approx-prefix-cache-producer": cluster, "multicluster-file-discovery": cluster,
		"multicluster-metrics-data-source": cluster, "multicluster-metrics-extractor": cluster,
		"local-syncer":       "the workers of a fleet share their state: [fleet]",
		"passthrough-parser": "the proxy reads the form of a request by its path",
		"vertexai-parser":    "the proxy has no form of Vertex AI",
	}
}

// gates are types of plugins that refuse requests, or that exclude engines from some requests.
func gates() map[string]string {
	const refuse = "the proxy does not refuse requests by this rule: limits and [[priority_class]] bound them"
	return map[string]string{"latency-slo-admitter": refuse, "probabilistic-admitter": refuse,
		"disaggregatedset-rollout-screener": "the proxy does not select engines by revision: pairs.same_labels = [\"revision\"] keeps both legs in one revision",
		"header-based-testing-filter":       "the proxy does not choose engines by a header of the client",
		"vllmgrpc-parser":                   "the proxy reads no gRPC requests of vLLM",
	}
}

// pickerKinds are the types of plugins that the reader knows.
func pickerKinds() map[string]bool {
	known := map[string]bool{"prefix-based-pd-decider": true, "always-disagg-pd-decider": true, "always-disagg-multimodal-decider": true,
		usualDetector: true, concurrencyDetector: true}
	for _, kinds := range []map[string]string{setPickers(), ownWork(), otherWork(), gates()} {
		for kind := range kinds {
			known[kind] = true
		}
	}
	for kind := range scorerKinds() {
		known[kind] = true
	}
	return known
}
