package operations

import (
	"fmt"
	"strings"
	"testing"
)

// scalingRules are the expressions of published rules for HPAs and KEDA's ScaledObjects that concern the
// endpoint picker of the Inference Extension or llm-d's, with the files that have them: repository, path
// and the beginning of the commit. Not listed are metrics of engines (vllm:kv_cache_usage_perc), and the
// two metrics without an equal here: inference_extension_flow_control_queue_bytes
// (llm-d-workload-variant-autoscaler, internal/collector/registration/saturation.go) and
// llm_d_epp_inflight_tokens (llm-d, guides/workload-autoscaling/keda-epp-token-aware, 04c0115b).
var scalingRules = []struct{ source, expr string }{
	{"llm-d/llm-d guides/workload-autoscaling/README.hpa-epp.md 1b624fae", `sum(inference_extension_flow_control_queue_size{inference_pool="vllm-llama3-8b-instruct"})`},
	{"llm-d/llm-d guides/workload-autoscaling/README.hpa-epp.md 1b624fae", `sum(inference_objective_running_requests{top_level_controller_name="vllm-llama3-8b-instruct-epp"})`},
	{"llm-d/llm-d guides/workload-autoscaling/keda-epp/optimized-baseline/components/trigger-queue/kustomization.yaml f8197655", `sum(llm_d_epp_flow_control_queue_size{namespace="llm-d-optimized-baseline",service="optimized-baseline-epp",model_name="Qwen/Qwen3-32B"})`},
	{"llm-d/llm-d guides/workload-autoscaling/keda-epp/optimized-baseline/base/scaledobject.yaml b0d6a794", `sum(llm_d_epp_request_running{namespace="llm-d-optimized-baseline",service="optimized-baseline-epp",model_name="Qwen/Qwen3-32B"})`},
	{"llm-d/llm-d guides/workload-autoscaling/keda-epp-saturation/optimized-baseline/base/scaledobject.yaml 903da90e", `max(llm_d_epp_flow_control_pool_saturation{inference_pool="optimized-baseline",namespace="llm-d-optimized-baseline"})`},
	{"llm-d/llm-d guides/workload-autoscaling/keda-epp-saturation/optimized-baseline/base/scaledobject.yaml 903da90e", `sum(llm_d_epp_request_running{model_name="Qwen/Qwen3-32B",namespace="llm-d-optimized-baseline"})`},
	{"llm-d-incubation/llm-d-fast-model-actuation test/e2e/demo-fma-hpa/demo-fma-hpa-ocp.sh 553c7b73", `sum(inference_pool_average_queue_size{namespace="fma-hpa"})`},
	{"llm-d-incubation/llm-d-fast-model-actuation test/e2e/demo-fma-hpa/demo-fma-hpa-ocp.sh 553c7b73", `sum(inference_objective_running_requests{namespace="fma-hpa"})`},
	{"deanlorenz/llm-d-workload-variant-autoscaler config/samples/hpa/co-ordinator/prometheus-adapter-epp-rules.yaml 2976e4ee", `sum(inference_extension_flow_control_queue_size{inference_pool="model-a"})`},
	{"deanlorenz/llm-d-workload-variant-autoscaler config/samples/hpa/co-ordinator/prometheus-adapter-epp-rules.yaml 2976e4ee", `sum(inference_pool_per_pod_queue_size{name="model-a"})`},
	{"deanlorenz/llm-d-workload-variant-autoscaler internal/collector/registration/saturation.go 2976e4ee", `sum(inference_extension_flow_control_queue_size{target_model_name="MODEL"}) or sum(inference_extension_flow_control_queue_size{model_name="MODEL",target_model_name=""})`},
	{"deanlorenz/llm-d-workload-variant-autoscaler benchmark/config/scenarios/simulator/pd-disaggregation-sim.yaml 2976e4ee", `max(llm_d_epp_average_queue_size{name="MODEL-router"})`},
}

// TestPublishedScalingRules: each expression has one series, as KEDA and the adapters for HPAs need, and
// the value of the proxy's own metric. Only the names of the deployment differ from the published ones: the
// labels namespace, service and top_level_controller_name are those that the scrape adds.
func TestPublishedScalingRules(t *testing.T) {
	names := strings.NewReplacer("vllm-llama3-8b-instruct-epp", "epp", "optimized-baseline-epp", "epp", "llm-d-optimized-baseline", "llm", "fma-hpa", "llm",
		"vllm-llama3-8b-instruct", "pool", "optimized-baseline", "pool", "MODEL-router", "pool", "model-a", "pool", "Qwen/Qwen3-32B", "sim", "MODEL", "sim")
	for _, workers := range []int{0, 2} {
		t.Run(fmt.Sprint(workers, " workers"), func(t *testing.T) {
			_, lines := engines(t, "vllm-nixl", map[string][]string{"p0": nil, "d0": {"--decode-us-per-token", "50000"}})
			p := run(t, nil, fmt.Sprintf("names = [\"inference_extension\", \"llm_d\"]\n[epp]\n[limits]\nmax_exchanges = 2\nsaturation_queue_depth = 1000\n[fleet]\nname = \"pool\"\nworkers = %d\n%s", workers, lines), "")
			p.ready(t)
			s := prometheus(t, p.metrics, "namespace: llm, service: epp, top_level_controller_name: epp")
			stop := p.load(t, 8, 20)
			defer stop()
			for _, r := range scalingRules {
				expr := names.Replace(r.expr)
				eventually(t, r.source+": "+expr+" has one series", func() bool { return s.query(t, expr) == 1 })
			}
			eventually(t, "the values are those of the proxy, and not 0", func() bool {
				return s.query(t, `sum(llm_d_epp_flow_control_queue_size) == sum(pdproxy_requests_waiting) and sum(inference_extension_flow_control_queue_size) == sum(pdproxy_requests_waiting) and sum(pdproxy_requests_waiting) > 0`) == 1 &&
					s.query(t, `sum(llm_d_epp_request_running) == sum(pdproxy_requests_running) and sum(pdproxy_requests_running) > 0`) == 1
			})
		})
	}
}
