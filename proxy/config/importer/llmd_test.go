package importer

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// scorersOf imports an EndpointPickerConfig with one profile and returns its scorers, as "weight name
// parameters", with the leg before the name if there is one.
func scorersOf(t *testing.T, text string) ([]string, Result) {
	t.Helper()
	res, err := LLMD(File{"f", []byte(text)})
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	c, err := config.Parse([]byte(res.TOML))
	if err != nil || c.Policy.Place != config.PlaceScores || len(c.Scores) != 1 {
		t.Fatalf("%v\n%s", err, res.TOML)
	}
	got := []string{c.Scores[0].Picker}
	for _, s := range c.Scores[0].Scorers {
		line := strings.TrimSpace(fmt.Sprintf("%g %s", s.Weight, s.Leg)) + " " + s.Name
		for _, key := range slices.Sorted(maps.Keys(s.Params)) {
			line += " " + key + "=" + s.Params[key]
		}
		got = append(got, line)
	}
	return got, res
}

// Each scorer, filter and picker of llm-d is the one of the proxy, with its parameters.
func TestScorersOfLLMD(t *testing.T) {
	for _, tt := range []struct {
		plugin string   // type and parameters
		want   []string // after the picker
		unlike []string // findings, as for expect
	}{
		{"{type: prefix-cache-scorer}", []string{"1 prefix"}, nil},
		{"{type: prefix-cache-scorer, parameters: {matchLengthWeight: 1, matchLengthScaleTokens: 100}}", []string{"1 prefix match_length_scale_tokens=100 match_length_weight=1"}, nil},
		{"{type: active-request-scorer, parameters: {idleThreshold: -1, maxBusyScore: 1.5}}", []string{"1 active_requests"}, nil},
		{"{type: load-aware-scorer, parameters: {threshold: 0}}", []string{"1 load_aware"}, nil},
		{"{type: token-load-scorer, parameters: {queueThresholdTokens: 5}}", []string{"1 token_load queue_threshold_tokens=5"}, nil},
		{"{type: no-hit-lru-scorer, parameters: {lruSize: 5}}", []string{"1 no_hit_lru"}, []string{"line 4: plugin no-hit-lru-scorer, lruSize ~ no equal"}},
		{"{type: latency-scorer, parameters: {headroomSelectionStrategy: least, compositeKVWeight: 2, compositeQueueWeight: 2, compositePrefixWeight: 2}}", []string{"1 latency"}, nil},
		{"{type: latency-scorer, parameters: {headroomSelectionStrategy: most, compositeKVWeight: 2}}", []string{"1 latency most_headroom=1"}, []string{"line 4: plugin latency-scorer, compositeKVWeight ~ equal weights"}},
		{"{type: session-affinity-scorer, parameters: {strategy: session_id}}", []string{"1 session"}, nil},
		{"{type: session-affinity-scorer}", []string{"1 session"}, []string{`line 4: plugin session-affinity-scorer ~ "x-session-token"`}},
		{"{type: session-affinity-filter, parameters: {strategy: session_id, sessionIdConfig: {sources: [{attribute: a}]}}}", []string{"1 session_filter"}, []string{`line 4: plugin session-affinity-filter, sessionIdConfig.sources ~ no plugin of the file makes the attribute "a"`}},
		{"{type: context-length-aware, parameters: {label: a}}", []string{"1 context_length"}, nil},
		{"{type: header-label-affinity-scorer, parameters: {headerName: X-A, labelKey: b}}", []string{"1 header_label header=X-A label=b"}, nil},
		{"{type: header-label-affinity-scorer, parameters: {headerName: X-A, labelKey: 'b c'}}", nil, []string{"line 4: plugin header-label-affinity-scorer ~ lacks the scorer"}},
		{"{type: header-label-affinity-scorer, parameters: {headerName: Authorization, labelKey: b}}", nil, []string{"line 4: plugin header-label-affinity-scorer: no policy can read"}},
		{"{type: by-label, parameters: {label: a, validValues: [" + strings.TrimSuffix(strings.Repeat("abcdefghij, ", 25), ", ") + "]}}", nil, []string{"line 4: plugin by-label ~ 256 bytes"}},
		{"{type: topology-affinity-scorer}", []string{"1 decode topology"}, nil},
		{"{type: topology-affinity-filter, parameters: {minAffinity: region}}", []string{"1 decode topology_filter min_affinity=4"}, nil},
		{"{type: slo-headroom-tier-filter, parameters: {epsilonExploreNeg: 0.5}}", []string{"1 slo_headroom_filter epsilon_explore_neg=0.5"}, nil},
		{"{type: prefix-cache-affinity-filter, parameters: {ttftSource: latencyPredictor, maxTTFTPenaltyMs: 0}}", []string{"1 prefix_affinity_filter max_ttft_penalty_ms=0"}, nil},
		{"{type: prefix-cache-affinity-filter}", []string{"1 prefix_affinity_filter"}, []string{"line 4: plugin prefix-cache-affinity-filter, ttftSource ~ predicts"}},
		{"{type: utilization-filter, parameters: {fallbackOnEmpty: true, conditions: [{metric: waiting-queue, maxValue: 3}, {metric: waiting-queue, maxValue: 2}]}}", []string{"1 utilization_filter max_waiting_requests=2"}, nil},
		{"{type: utilization-filter, parameters: {conditions: [{metric: kv-cache-utilization, maxValue: 0.5}]}}", []string{"1 utilization_filter max_kv_usage=0.5"}, []string{"line 4: plugin utilization-filter, fallbackOnEmpty ~ llm-d answers 429"}},
		{"{type: by-label, parameters: {label: llm-d.ai/role, validValues: [decode], allowsNoLabel: true}}", nil, nil},
		{"{type: by-label, parameters: {label: a, validValues: [b, c]}}", []string{"1 label_filter label=a values=b c"}, []string{"line 4: plugin by-label ~ removes none"}},
		{"{type: by-label, parameters: {label: a, validValues: [b], allowsNoLabel: true}}", nil, []string{"line 4: plugin by-label, allowsNoLabel ~ lacks the filter"}},
		{"{type: label-selector-filter, parameters: {matchLabels: {a: 'b c'}}}", nil, []string{"line 4: plugin label-selector-filter ~ lacks the filter"}},
		{"{type: mm-embeddings-cache-scorer}", []string{"1 mm_cache"}, nil},
		{"{type: lab-scorer}", nil, []string{"line 4: plugin lab-scorer ~ does not know"}},
		{"{type: endpoint-attribute-scorer, parameters: {attributeKey: a, algorithm: {type: linear_lower_is_better}}}", nil, []string{"line 4: plugin endpoint-attribute-scorer ~ lacks the scorer"}},
	} {
		got, res := scorersOf(t, "kind: EndpointPickerConfig\napiVersion: llm-d.ai/v1alpha1\nplugins:\n- "+tt.plugin+"\n")
		if want := append([]string{config.PickerMaxScore}, tt.want...); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", tt.plugin, got, want)
		}
		findings := slices.DeleteFunc(append(slices.Clone(res.Warnings), res.Lost...), func(f Finding) bool { return f.Line == 0 })
		expect(t, tt.plugin, findings, tt.unlike)
	}
}

// The engines get the labels that scorers read from their pods.
func TestLabelsOfLLMD(t *testing.T) {
	for _, tt := range []struct {
		plugins, want string
		unlike        []string // findings, as for expect
	}{
		{"- {type: context-length-aware, parameters: {label: a}}\n", `labels = ["context_length=a"]`, nil},
		{"- {type: context-length-aware}\n", `labels = ["context_length=llm-d.ai/context-length-range"]`, nil},
		{"- {type: header-label-affinity-scorer, parameters: {headerName: X-A, labelKey: b}}\n- {name: f, type: by-label, parameters: {label: b, validValues: [c]}}\n", `labels = ["b"]`, []string{"line 5: plugin f ~ removes none"}},
		{"- {type: topology-affinity-scorer}\n", `labels = ["host=kubernetes.io/hostname", "rack=topology.kubernetes.io/rack", "zone=topology.kubernetes.io/zone", "region=topology.kubernetes.io/region"]`, nil},
		{"- {type: topology-extractor, parameters: {zone: z}}\n- {type: topology-affinity-scorer}\n", `labels = ["host=kubernetes.io/hostname", "rack=topology.kubernetes.io/rack", "z", "region=topology.kubernetes.io/region"]`, nil},
		{"- {type: topology-affinity-scorer}\n- {type: label-selector-filter, parameters: {matchLabels: {zone: a, b: c, d: e, f: g}}}\n",
			`labels = ["host=kubernetes.io/hostname", "rack=topology.kubernetes.io/rack", "zone=topology.kubernetes.io/zone", "region=topology.kubernetes.io/region", "b", "d"]`,
			[]string{"line 5: plugin label-selector-filter ~ it lacks zone, f", "line 5: plugin label-selector-filter ~ removes none"}},
		{"- {type: label-selector-filter, parameters: {matchLabels: {llm-d.ai/role: decode}}}\n", "", nil},
	} {
		_, res := scorersOf(t, "kind: EndpointPickerConfig\napiVersion: llm-d.ai/v1alpha1\nplugins:\n"+tt.plugins)
		got := ""
		for line := range strings.Lines(res.TOML) {
			if strings.HasPrefix(line, "#labels = ") {
				got, _, _ = strings.Cut(strings.TrimSpace(line[1:]), " #")
			}
		}
		if strings.TrimSpace(got) != tt.want {
			t.Errorf("%s: got %s, want %s", tt.plugins, got, tt.want)
		}
		findings := slices.DeleteFunc(append(slices.Clone(res.Warnings), res.Lost...), func(f Finding) bool { return f.Line == 0 })
		expect(t, tt.plugins, findings, tt.unlike)
	}
}

// An attribute of endpoints that is a load of the engine is the scorer or the limit of this load.
func TestAttributesOfLLMD(t *testing.T) {
	const extractor = "- type: core-metrics-extractor\n  parameters: {engineConfigs: [{name: e, customMetrics: [{attributeKey: a, metricSpec: 'METRIC'}]}]}\n"
	for _, tt := range []struct{ metric, plugin, want string }{
		{"sglang:num_queue_reqs", "scorer\n  parameters: {attributeKey: a, algorithm: {type: linear_lower_is_better}}", "1 queue"},
		{"vllm:num_requests_running{x=y}", "scorer\n  parameters: {attributeKey: a, producer: core-metrics-extractor, algorithm: {type: linear_lower_is_better, normalization: {adaptiveRange: {}}}}", "1 running_requests"},
		{"vllm:kv_cache_usage_perc", "scorer\n  parameters: {attributeKey: a, algorithm: {type: linear_lower_is_better, normalization: {fixedRange: {min: 0, max: 1}}}}", "1 kv_usage"},
		{"vllm:kv_cache_usage_perc", "scorer\n  parameters: {attributeKey: a, algorithm: {type: linear_lower_is_better}}", ""},
		{"vllm:num_requests_waiting", "scorer\n  parameters: {attributeKey: a, algorithm: {type: linear_lower_is_better, normalization: {fixedRange: {min: 0, max: 9}}}}", ""},
		{"vllm:num_requests_waiting", "scorer\n  parameters: {attributeKey: a, algorithm: {type: linear_higher_is_better}}", ""},
		{"vllm:num_requests_waiting", "scorer\n  parameters: {attributeKey: a, producer: other, algorithm: {type: linear_lower_is_better}}", ""},
		{"vllm:num_requests_waiting", "filter\n  parameters: {attribute: a, algorithm: {type: threshold, threshold: {operator: LessThanOrEqual, value: 7}}}", "1 utilization_filter max_waiting_requests=7"},
		{"vllm:num_requests_waiting", "filter\n  parameters: {attribute: a, onMissing: Fail, algorithm: {type: threshold, threshold: {operator: LessThanOrEqual, value: 7}}}", ""},
		{"vllm:num_requests_waiting", "filter\n  parameters: {attribute: a, algorithm: {type: threshold, threshold: {operator: GreaterThan, value: 7}}}", ""},
		{"vllm:kv_cache_usage_perc", "filter\n  parameters: {attribute: a, algorithm: {type: threshold, threshold: {operator: LessThanOrEqual, value: 7}}}", ""},
	} {
		got, res := scorersOf(t, "plugins:\n"+strings.Replace(extractor, "METRIC", tt.metric, 1)+"- type: endpoint-attribute-"+tt.plugin+"\n")
		want := []string{config.PickerMaxScore}
		if tt.want != "" {
			want = append(want, tt.want)
		}
		if lacks := strings.Contains(findings(res), "the result lacks the "); !slices.Equal(got, want) || lacks != (tt.want == "") {
			t.Errorf("%s, %s: %q, want %q\n%s", tt.metric, tt.plugin, got, want, findings(res))
		}
	}
}

// Each profile places the leg that its handler gives it, with its weights and its picker.
func TestProfilesOfLLMD(t *testing.T) {
	const plugins = "plugins:\n- type: queue-scorer\n- type: kv-cache-utilization-scorer\n- type: prefill-filter\n- type: decode-filter\n- type: utilization-filter\n  parameters: {fallbackOnEmpty: true, conditions: [{metric: waiting-queue, maxValue: 1}]}\n"
	const two = "schedulingProfiles:\n- name: prefill\n  plugins: [{pluginRef: queue-scorer, weight: 2}, {pluginRef: prefill-filter}]\n- name: decode\n  plugins: [{pluginRef: kv-cache-utilization-scorer, weight: 0.5}, {pluginRef: utilization-filter}]\n"
	for _, tt := range []struct{ name, text, want, plan string }{
		{"all plugins", plugins, "max_score|1 utilization_filter max_waiting_requests=1|1 queue|1 kv_usage", "never"},
		{"handler of one profile", plugins + "- type: single-profile-handler\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer, weight: 7}]}]\n", "max_score|7 queue", "never"},
		{"ranks", plugins + "- type: data-parallel-profile-handler\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]\n", "max_score|1 queue", "never"},
		{"two legs", plugins + "- type: disagg-profile-handler\n  parameters: {deciders: {prefill: always-disagg-pd-decider}}\n- type: always-disagg-pd-decider\n" + two,
			"max_score|2 prefill queue|1 decode utilization_filter max_waiting_requests=1|0.5 decode kv_usage", "always"},
		{"decode before prefill", plugins + "- type: always-disagg-pd-decider\n- type: pd-profile-handler\n  parameters: {deciderPluginName: always-disagg-pd-decider, decodeProfile: a, prefillProfile: b}\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}, {name: b, plugins: [{pluginRef: queue-scorer}]}]\n",
			"max_score|1 prefill queue|1 decode queue", "always"},
		{"unknown handler", plugins + "- type: lab-handler\n" + two, "max_score|2 prefill queue|1 decode utilization_filter max_waiting_requests=1|0.5 decode kv_usage", "auto"},
		{"handler by a header", plugins + "- type: header-profile-handler\n  parameters: {headerName: A, defaultProfile: decode}\n" + two, "max_score|2 prefill queue|1 decode utilization_filter max_waiting_requests=1|0.5 decode kv_usage", "auto"},
		{"weighted", plugins + "- type: weighted-random-picker\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}, {pluginRef: weighted-random-picker}]}]\n", "weighted_random|1 queue", "never"},
		{"the only picker of the file", plugins + "- type: weighted-random-picker\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]\n", "weighted_random|1 queue", "never"},
		{"random", plugins + "- type: random-picker\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}, {pluginRef: utilization-filter}, {pluginRef: random-picker}]}]\n", "max_score|1 utilization_filter max_waiting_requests=1", "never"},
		{"random prefill", plugins + "- type: random-picker\n- type: weighted-random-picker\nschedulingProfiles: [{name: prefill, plugins: [{pluginRef: queue-scorer}, {pluginRef: random-picker}]}, {name: decode, plugins: [{pluginRef: queue-scorer}, {pluginRef: weighted-random-picker}]}]\n", "weighted_random|1 decode queue", "auto"},
	} {
		got, res := scorersOf(t, tt.text)
		c, err := config.Parse([]byte(res.TOML))
		if list := strings.Join(got, "|"); err != nil || list != tt.want || c.Policy.Plan != tt.plan {
			t.Errorf("%s: %s and plan %s, want %s and %s", tt.name, list, c.Policy.Plan, tt.want, tt.plan)
		}
	}
}

// The findings of profiles and of the queue name their lines.
func TestDifferencesOfLLMD(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		want       []string
		toml       string
	}{
		{"weight", "plugins:\n- type: queue-scorer\nschedulingProfiles:\n- name: a\n  plugins:\n  - {pluginRef: queue-scorer, weight: -2}\n", []string{"line 6: schedulingProfiles a: a weight below 0"}, ""},
		{"pickers", "plugins: [{type: max-score-picker}, {type: weighted-random-picker}]\nschedulingProfiles:\n- name: decode\n  plugins: [{pluginRef: weighted-random-picker}]\n- name: prefill\n  plugins: [{pluginRef: max-score-picker}]\n",
			[]string{"line 3: schedulingProfiles decode: a set has one picker"}, `picker = "max_score"`},
		{"endpoints", "plugins:\n- type: max-score-picker\n  parameters:\n    maxNumOfEndpoints: 20\n", []string{"line 4: plugin max-score-picker, maxNumOfEndpoints: epp.fallbacks is at most 16"}, "fallbacks = 16"},
		{"encoders", "plugins: [{type: queue-scorer}]\nschedulingProfiles:\n- name: encode\n  plugins:\n  - pluginRef: queue-scorer\n- name: decode\n", []string{"line 5: schedulingProfiles encode: encoders are used in turn"}, ""},
		{"unknown keys", "plugins: [{type: queue-scorer}]\nschedulingProfiles:\n- name: a\n  more: 1\n  plugins:\n  - {pluginRef: queue-scorer, most: 2}\nlater: 3\n",
			[]string{"line 4: schedulingProfiles.more: unknown", "line 6: schedulingProfiles.plugins.most: unknown", "line 7: later: unknown"}, ""},
		{"queue by default", "plugins: [{type: queue-scorer}]\nfeatureGates: [flowControl]\n", nil, "queue_timeout = \"60s\""},
		{"no queue", "plugins: [{type: queue-scorer}]\nfeatureGates: [flowControl=false]\nflowControl: {maxRequests: 5}\n", nil, "# - line 3: flowControl.maxRequests: llm-d ignores it"},
		{"bare detector", "plugins: [{type: utilization-detector}]\nsaturationDetector: {pluginRef: utilization-detector}\n", []string{"line 2: saturationDetector: without the feature gate"}, ""},
		{"flows", "plugins: [{type: program-aware-fairness}]\nfeatureGates: [flowControl]\nflowControl:\n  defaultPriorityBand:\n    fairnessPolicyRef: program-aware-fairness\n", []string{"line 5: flowControl.defaultPriorityBand.fairnessPolicyRef: flows get equal shares"}, `fairness_header = "x-llm-d-inference-fairness-id"`},
		{"eviction", "plugins: [{type: queue-scorer}]\nfeatureGates: [flowControl]\nflowControl: {enableEviction: true, priorityBands: [{priority: -2}]}\n", nil, "evict = \"lowest_youngest\""},
		{"bands", "plugins: [{type: edf-ordering-policy}]\nfeatureGates: [flowControl]\nflowControl:\n  priorityBands:\n  - {priority: -2, orderingPolicyRef: edf-ordering-policy}\n", []string{"line 5: flowControl.priorityBands.orderingPolicyRef"}, "name = \"priority-2\"              # of InferenceObjectives with this priority: epp.pool\npriority = -2"},
		{"time between tokens", "plugins: [{type: latency-scorer}]\n", nil, `token_time_header = "x-llm-d-slo-tpot-ms"`},
		{"cookie", "plugins:\n- type: session-id-producer\n  parameters: {cookieName: c}\n- type: session-affinity-scorer\n  parameters: {strategy: session_id, sessionIdConfig: {sources: [{attribute: SessionID, producer: session-id-producer}]}}\n",
			[]string{"line 3: plugin session-id-producer, cookieName"}, ""},
		{"deadline", "plugins: [{type: slo-headroom-tier-filter}]\n", nil, `deadline_header = "x-llm-d-slo-ttft-ms"`},
		{"chart with predictor", "router:\n  latencyPredictor: {enabled: true}\n  modelServers: {type: vllm}\n", nil, "params = { affinity_threshold = 0.99, max_ttft_penalty_ms = 5000 }"},
		{"chart", "router:\n  modelServers: {type: vllm}\n", nil, "name = \"prefix\"                  # prefix-cache-scorer of the profile default\nweight = 3.0"},
		{"chart without payloads", "router:\n  epp: {pluginsConfigFile: payload-agnostic.yaml}\n", []string{"line 2: plugin session-affinity-scorer ~ x-session-token"}, `name = "session"`},
	} {
		res, err := LLMD(File{"f", []byte(tt.text)})
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		expect(t, tt.name, slices.DeleteFunc(res.Warnings, func(f Finding) bool { return f.Line == 0 }), tt.want)
		if !strings.Contains(res.TOML, tt.toml) {
			t.Errorf("%s: %q is missing in\n%s", tt.name, tt.toml, res.TOML)
		}
	}
}

// The reader refuses what llm-d refuses, with the line.
func TestProblemsOfLLMD(t *testing.T) {
	for text, want := range map[string]string{
		"plugins:\n- type: by-label\n  parameters: {validValues: [a]}\n":                                                      "line 2: plugins.parameters.label: is required",
		"plugins:\n- type: by-label\n  parameters: {label: a}\n":                                                              "plugins.parameters.validValues: is required without allowsNoLabel",
		"plugins:\n- type: utilization-filter\n":                                                                              "line 2: plugins.parameters.conditions: is required",
		"plugins:\n- type: utilization-filter\n  parameters: {conditions: [{metric: x, maxValue: 1}]}\n":                      "line 3: plugins.parameters.conditions: want a metric",
		"plugins:\n- type: header-label-affinity-scorer\n":                                                                    "line 2: plugins.parameters: headerName and labelKey are required",
		"plugins:\n- type: topology-affinity-filter\n  parameters: {minAffinity: street}\n":                                   "line 3: plugins.parameters.minAffinity: want host, rack, zone or region",
		"plugins:\n- type: session-affinity-filter\n  parameters: {strategy: none}\n":                                         "line 3: plugins.parameters.strategy: want",
		"plugins:\n- type: session-affinity-filter\n  parameters: {strategy: session_id, sessionIdConfig: {sources: [{}]}}\n": "line 3: plugins.parameters.sessionIdConfig.sources: want header or attribute",
		"plugins:\n- type: label-selector-filter\n  parameters: {matchExpressions: [{key: a, operator: In}]}\n":               "line 3: plugins.parameters.matchExpressions: want a key",
		"plugins:\n- type: prefix-cache-scorer\n  parameters: {matchLengthWeight: 2}\n":                                       "line 3: plugins.parameters.matchLengthWeight: must be from 0 to 1",
		"plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: a}, {name: a}]\n":                                       "line 2: schedulingProfiles.name: the file has two profiles of this name",
		"plugins: [{type: queue-scorer}]\nfeatureGates: [flowControl=perhaps]\n":                                              "line 2: featureGates: want the name of a feature",
		"plugins: [{type: queue-scorer}]\nrequestHandler: {parsers: [{pluginRef: x}]}\n":                                      "line 2: requestHandler.parsers.pluginRef: names no plugin of this file",
	} {
		res, err := LLMD(File{"f", []byte(text)})
		if err == nil || !strings.Contains(err.Error(), want) || strings.Count(err.Error(), "\n") > 0 {
			t.Errorf("%s: got error %v and %q, want %s", text, err, res.TOML, want)
		}
	}
}

// Every parameter of the file with all types has an equal in the result, or is named with its line.
func TestNothingOfLLMDIsDropped(t *testing.T) {
	text := string(read(t, "testdata/llmd-types.yaml"))
	res, err := LLMD(File{"llmd-types.yaml", []byte(text)})
	if err != nil {
		t.Fatal(err)
	}
	// equal has the parameters with an equal: in the result, they are this text.
	equal := map[string]string{
		"matchLengthWeight": "match_length_weight = 0.25", "matchLengthScaleTokens": "match_length_scale_tokens = 4096", "idleThreshold": "idle_threshold = 3",
		"maxBusyScore": "max_busy_score = 0.5", "threshold": "{ threshold = 64 }", "queueThresholdTokens": "queue_threshold_tokens = 2000000",
		"ttftWeight": "ttft_weight = 0.7", "tpotWeight": "tpot_weight = 0.3", "headroomSelectionStrategy": "most_headroom = 1", "strategy": `name = "session_filter"`,
		"label": `label = "hardware", values = "h100 h200"`, "headerName": `header = "X-Lab-Tier"`, "labelKey": `label = "tier"`, "attributeKey": `# waiting of`,
		"validValues": "h100 h200", "allowsNoLabel": `label = "hardware", not = 1`, "fallbackOnEmpty": "max_running_requests = 100", "affinityThreshold": "affinity_threshold = 0.9",
		"explorationProbability": "exploration_probability = 0.05", "maxTTFTPenaltyMs": "max_ttft_penalty_ms = 9000", "minAffinity": "min_affinity = 3",
		"epsilonExploreNeg": "epsilon_explore_neg = 0.02", "attribute": "max_running_requests = 100", "maxNumOfEndpoints": "fallbacks = 2",
		"nonCachedTokens": "local_tokens = 99.0", "autoTune": "text_tokens = 160000", "blockSizeTokens": "text_tokens = 160000", "lruCapacityPerServer": "text_tokens = 160000",
		"additionalSessionHeaders": "x-lab-agent", "queueDepthThreshold": "saturation_queue_depth = 7", "kvCacheUtilThreshold": "saturation_kv_usage = 0.85",
		"stageOrder": `leg = "prefill"`,
	}
	plugin, named, checked := 0, false, 0
	for i, line := range strings.Split(text, "\n") {
		key, value, isKey := strings.Cut(strings.TrimSpace(line), ":")
		indent := len(line) - len(strings.TrimLeft(line, " "))
		switch {
		case strings.HasPrefix(line, "schedulingProfiles"):
			i = len(text)
		case strings.HasPrefix(line, "- type"):
			plugin = i + 1
			named = strings.Contains(res.TOML+findings(res), fmt.Sprintf("line %d: plugin ", plugin))
		}
		if i == len(text) {
			break
		}
		if !isKey || indent != 4 || strings.TrimSpace(value) == "" || strings.HasPrefix(key, "-") {
			continue
		}
		checked++
		if want := equal[key]; !strings.Contains(res.TOML, fmt.Sprintf("line %d: ", i+1)) && !named && (want == "" || !strings.Contains(res.TOML, want)) {
			t.Errorf("line %d: %s has no equal and no finding", i+1, key)
		}
	}
	if unknown := strings.Count(warnings(res.Warnings), "does not know"); unknown != 1 { // lab-scorer
		t.Errorf("%d types are unknown", unknown)
	}
	if checked < 60 {
		t.Errorf("%d parameters were checked", checked)
	}
}

// The page of llm-d's plugins lists every type that the reader knows.
func TestPageOfLLMD(t *testing.T) {
	page := string(read(t, "../../../docs/reference/llm-d.md"))
	for kind := range pickerKinds() {
		if !strings.Contains(page, "`"+kind+"`") {
			t.Errorf("docs/reference/llm-d.md lacks %s", kind)
		}
	}
}
