package importer

import (
	"fmt"
	"strings"
	"testing"
)

// pickerText returns an EndpointPickerConfig with a handler and more plugins.
func pickerText(version, handler, more string) string {
	return fmt.Sprintf(`apiVersion: %s
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
%s%sschedulingProfiles:
- name: prefill
  plugins: [{pluginRef: queue-scorer}]
`, version, handler, more)
}

// pd-profile-handler has three generations. The same text means another plan in each of them.
func TestGenerationsOfTheHandler(t *testing.T) {
	const old, prefix, always = "inference.networking.x-k8s.io/v1alpha1",
		"- type: prefix-based-pd-decider\n  parameters: {nonCachedTokens: 16}\n", "- type: always-disagg-pd-decider\n"
	pd := func(parameters string) string {
		return "- type: pd-profile-handler\n  parameters: " + parameters + "\n"
	}
	disagg := func(parameters string) string {
		return "- type: disagg-profile-handler\n  parameters: " + parameters + "\n"
	}
	for name, tt := range map[string]struct {
		version, handler, more string
		plan, tokens           string
		problem                string
	}{
		"threshold 0":                     {old, pd("{threshold: 0, hashBlockSize: 5}"), "", "always", "", ""},
		"threshold in bytes":              {old, pd("{threshold: 100}"), "", "pd_auto", "24", ""},
		"threshold below a token":         {old, pd("{threshold: 1}"), "", "pd_auto", "0", ""},
		"negative threshold":              {old, pd("{threshold: -1}"), "", "", "", "line 6: plugins.parameters.threshold: must be from 0"},
		"threshold by default":            {old, pd("{}"), "", "always", "", ""},
		"always by default":               {old, pd("{}"), always, "always", "", ""},
		"prefix by default":               {old, pd("{}"), prefix, "pd_auto", "15", ""},
		"prefix in the new API":           {newAPI, pd("{}"), prefix + always, "pd_auto", "15", ""},
		"only always in the new API":      {newAPI, pd("{}"), always, "", "", "needs prefix-based-pd-decider"},
		"no decider in the new API":       {newAPI, pd("{}"), "", "", "", "line 5: plugins.parameters.deciderPluginName: llm-d does not start"},
		"named decider":                   {old, pd("{deciderPluginName: always-disagg-pd-decider}"), always, "always", "", ""},
		"undeclared decider":              {old, pd("{deciderPluginName: always-disagg-pd-decider}"), "", "", "", "line 6: plugins.parameters.deciderPluginName: \"always-disagg-pd-decider\" names no plugin"},
		"two generations at once":         {old, pd("{threshold: 1, deciderPluginName: always-disagg-pd-decider}"), always, "", "", "no version of llm-d has both"},
		"disabled prefix decider":         {old, pd("{}"), "- type: prefix-based-pd-decider\n", "never", "", ""},
		"new handler without a decider":   {newAPI, disagg("{}"), always, "never", "", ""},
		"new handler, nested":             {newAPI, disagg("{deciders: {prefill: always-disagg-pd-decider}}"), always, "always", "", ""},
		"new handler, flat":               {newAPI, disagg("{prefillDeciderPluginName: prefix-based-pd-decider}"), prefix, "pd_auto", "15", ""},
		"new handler, flat legacy name":   {newAPI, disagg("{deciderPluginName: always-disagg-pd-decider}"), always, "always", "", ""},
		"new handler, undeclared":         {newAPI, disagg("{deciders: {prefill: x}}"), always, "", "", "deciders.prefill: \"x\" names no plugin"},
		"new handler, prefill first":      {newAPI, disagg("{stageOrder: prefill-first}"), "", "always", "", ""},
		"new handler, unknown order":      {newAPI, disagg("{stageOrder: both}"), "", "", "", "stageOrder: want decode-first or prefill-first"},
		"threshold as text":               {old, pd("{threshold: none}"), "", "", "", "threshold: want a whole number"},
		"a decider that pdproxy has not":  {newAPI, disagg("{deciders: {prefill: mine}}"), "- {type: own-decider, name: mine}\n", "", "", ""},
		"the whole prompt has a minimum":  {newAPI, disagg("{deciders: {prefill: prefix-based-pd-decider}}"), "- type: prefix-based-pd-decider\n  parameters: {nonCachedTokens: 16, promptTokens: 64}\n", "pd_auto", "15", ""},
		"the minimum is below the tokens": {newAPI, disagg("{deciders: {prefill: prefix-based-pd-decider}}"), "- type: prefix-based-pd-decider\n  parameters: {nonCachedTokens: 16, promptTokens: 8}\n", "pd_auto", "15", ""},
	} {
		t.Run(name, func(t *testing.T) {
			res, err := LLMD(File{"picker.yaml", []byte(pickerText(tt.version, tt.handler, tt.more))})
			if tt.problem != "" {
				if err == nil || !strings.Contains(err.Error(), tt.problem) {
					t.Fatalf("got %v, want the problem %q", err, tt.problem)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if has := strings.Contains(res.TOML, "\nplan = "); has != (tt.plan != "") || !strings.Contains(res.TOML, fmt.Sprintf("plan = %q", tt.plan)) && has {
				t.Errorf("want plan %q in\n%s", tt.plan, res.TOML)
			}
			if tt.tokens != "" && !strings.Contains(res.TOML, "local_tokens = "+tt.tokens+".0") {
				t.Errorf("want local_tokens %s in\n%s", tt.tokens, res.TOML)
			}
			lost := strings.Contains(name, "has not") || strings.Contains(name, "has a minimum")
			if lost != (len(res.Lost) == 1) {
				t.Errorf("lost: %v", res.Lost)
			}
		})
	}
}

// Every routing logic of the production stack has a place policy, and two of them have separate
// engines.
func TestRoutingLogics(t *testing.T) {
	for logic, want := range map[string][]string{
		"roundrobin": {`place = "round_robin"`, `role = "both"`}, "loadaware": {`place = "kv_aware"`}, "prefixaware": {`place = "kv_aware"`},
		"kvaware": {`place = "kv_aware"`}, "priority": {`place = "least_load"`}, "session --session-key x-user": {`place = "conversation"`, `headers = ["x-user"]`},
		"disaggregated_prefill":              {`place = "least_load"`, `connector = "vllm-store"`, `role = "prefill"`, `role = "decode"`},
		"disaggregated_prefill_orchestrated": {`place = "round_robin"`, `connector = "vllm-nixl"`, `role = "prefill"`, `role = "decode"`},
	} {
		text := "--service-discovery static --static-backends http://a:1,http://b:1 --static-models m,m --static-model-labels x,y " +
			"--prefill-model-labels x --decode-model-labels y --static-aliases chat:m --max-instance-failover-reroute-attempts 2 --routing-logic " + logic
		res, err := ProductionStack(File{"f", []byte(text)})
		if err != nil || len(res.Lost) > 0 {
			t.Errorf("%s: %v, %v", logic, err, res.Lost)
			continue
		}
		for _, part := range append(want, `alias_of = "m"`, "attempts = 3") {
			if !strings.Contains(res.TOML, part) {
				t.Errorf("%s: %s is missing in\n%s", logic, part, res.TOML)
			}
		}
	}
	if logics := len(stackLogics()); logics != 8 {
		t.Errorf("%d routing logics, of which 8 are tried", logics)
	}
}

// A setting that changes what a request does is lost, and named with its line. The same setting
// in a state that does nothing is not.
func TestLost(t *testing.T) {
	const stack = "--service-discovery static --static-backends http://a --static-models m --routing-logic roundrobin"
	const deployment = "model_list: [{model_name: m, litellm_params: {model: openai/m, api_base: 'http://h:1'}}]\n"
	for _, tt := range []struct {
		name, text string
		want       []string
	}{
		{"stack-idle", stack + " --request-rewriter noop --root-path / --feature-gates '' --prefix-min-match-length 0", nil},
		{"stack-lost", stack + "\n--root-path /vllm\n--callbacks a.b --external-providers-config f --enable-batch-api", []string{
			"line 2: --root-path ~ get 404", "line 3: --callbacks", "line 3: --external-providers-config", "line 3: --enable-batch-api"}},
		{"stack-values", "routerSpec:\n  rootPath: /vllm\n  vllmApiKey: {secretName: s, secretKey: k}\n  routingLogic: loadaware\n", []string{"line 2: routerSpec.rootPath", "line 3: routerSpec.vllmApiKey"}},
		{"stack-empty values", "routerSpec:\n  rootPath: ''\n  vllmApiKey: {secretName: '', secretKey: ''}\n  routingLogic: roundrobin\n", nil},
		{"vllm-lost", "--worker-urls http://a\n--api-key-validation-urls http://b --rate-limit-tokens-per-second 5 --wasm-middleware m", []string{
			"line 2: --api-key-validation-urls", "line 2: --rate-limit-tokens-per-second", "line 2: --wasm-middleware"}},
		{"sglang-lost", "--worker-urls http://a grpc://b:1\n--jwt-issuer a --mcp-config-path b --client-cert-path c --prometheus-host localhost", []string{
			"line 1: --worker-urls ~ gRPC", "line 2: --jwt-issuer", "line 2: --mcp-config-path", "line 2: --client-cert-path"}},
		{"llmd-sidecar", "--port 1 --configuration-file f --enable-p2p-pull=false", []string{"line 1: --configuration-file"}},
		{"llmd-gates", pickerText(newAPI, "- type: probabilistic-admitter\n", "") + "featureGates: [flowControl]\nflowControl:\n  priorityBands: [{priority: 1, maxRequests: 2}]\n  noEndpointRequestTTL: 5s\n", []string{
			"line 5: plugin probabilistic-admitter", "line 11: flowControl.priorityBands.maxRequests"}},
		{"dynamo-idle", "dynamo.frontend --router-queue-threshold None --no-kserve-grpc-server --router-mode kv", nil},
		{"dynamo-saturation", "dynamo.frontend --active-decode-blocks-threshold 0.8 --migration-limit 0 --migration-max-seq-len 4096 --load-aware", nil},
		{"dynamo-lost", "dynamo.frontend --router-mode direct\n--router-queue-threshold 0.5 --kserve-grpc-server", []string{
			"line 1: --router-mode ~ direct", "line 2: --router-queue-threshold", "line 2: --kserve-grpc-server"}},
		{"litellm-rates", "model_list: [{model_name: m, litellm_params: {model: openai/m, api_base: 'http://h:1', rpm: 5}}]\n", nil},
		{"litellm-rate limits", deployment + "router_settings:\n  optional_pre_call_checks: [enforce_model_rate_limits]\n", []string{"line 3: router_settings.optional_pre_call_checks"}},
		{"litellm-auth", deployment + "general_settings: {master_key: sk-x, custom_auth: f, allowed_ips: [a]}\nguardrails: [a]\n", []string{
			"line 2: general_settings.master_key", "line 2: general_settings.custom_auth", "line 2: general_settings.allowed_ips", "line 3: guardrails"}},
		{"litellm-retries", deployment + "router_settings: {retry_policy: {TimeoutErrorRetries: 1}, num_retries: 2}\nlitellm_settings: {fallbacks: [{m: [x]}], guardrails: []}\n", []string{
			"line 2: router_settings.retry_policy", "line 3: fallbacks m ~ is not in the result"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			res, err := importFile(tt.name, []byte(tt.text))
			if err != nil {
				t.Fatal(err)
			}
			expect(t, "lost", res.Lost, tt.want)
			for _, f := range res.Lost {
				if !strings.Contains(res.TOML, fmt.Sprintf("# - line %d: %s: ", f.Line, f.Key)) {
					t.Errorf("the text does not list %v", f)
				}
			}
		})
	}
}

// Problems within values and manifests name the line of the file.
func TestProblemsOfKubernetes(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		want       []string
	}{
		{"llmd-embedded", "router:\n  epp:\n    pluginsConfigFile: a\n    pluginsCustomConfig:\n      a: |\n        kind: EndpointPickerConfig\n        plugins:\n        - type: pd-profile-handler\n          parameters: {threshold: x}\n", []string{"line 9: plugins.parameters.threshold: want a whole number"}},
		{"llmd-embedded syntax", "router:\n  epp:\n    pluginsConfigFile: a\n    pluginsCustomConfig:\n      a: |\n        kind: [\n", []string{"line 6: router.epp.pluginsCustomConfig.a: invalid YAML"}},
		{"llmd-missing file", "inferenceExtension:\n  pluginsConfigFile: a\n", []string{"line 2: inferenceExtension.pluginsConfigFile ~ is not in pluginsCustomConfig"}},
		{"llmd-other manifest", "apiVersion: v1\nkind: Pod\nspec: {containers: [{image: a, args: [--port=1]}]}\n", []string{"the file is no input of llm-d"}},
		{"stack-other manifest", "apiVersion: v1\nkind: Pod\nspec: {containers: [{image: a, args: [--port=1]}]}\n", []string{"the file is no input of production-stack"}},
		{"stack-logic", "routerSpec:\n  routingLogic: best\n", []string{"line 2: routerSpec.routingLogic: want one of disaggregated_prefill, disaggregated_prefill_orchestrated, kvaware, loadaware, prefixaware"}},
		{"stack-session", "routerSpec: {routingLogic: session}\n", []string{"line 1: routerSpec.sessionKey: is required"}},
		{"stack-label", "routerSpec:\n  routingLogic: disaggregated_prefill\nservingEngineSpec: {modelSpec: [{name: a}]}\n", []string{"line 2: routerSpec.routingLogic: the model \"a\" is neither"}},
		{"dynamo-no frontend", "kind: DynamoGraphDeployment\nspec: {services: {a: {componentType: worker}}}\n", []string{"spec: the graph has no component of type frontend"}},
		{"dynamo-mode", "dynamo.frontend --router-mode best", []string{"line 1: --router-mode: want one of device-aware-weighted"}},
		{"dynamo-config", "dynamo.frontend --router-conditional-disagg --router-conditional-disagg-config x", []string{"line 1: --router-conditional-disagg-config: want a JSON object"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			res, err := importFile(tt.name, []byte(tt.text))
			problems, ok := err.(Problems)
			if !ok {
				t.Fatalf("no problems: %v\n%s", err, res.TOML)
			}
			expect(t, "problem", problems, tt.want)
		})
	}
}

// The names of clients stay, whatever the engines call their models.
func TestNamesOfLiteLLM(t *testing.T) {
	res, err := LiteLLM(File{"config.yaml", []byte(`model_list:
- {model_name: chat, litellm_params: {model: hosted_vllm/big, api_base: 'http://a:1/v1', weight: 3}}
- {model_name: chat, litellm_params: {model: hosted_vllm/new, api_base: 'http://b:1/v1'}}
- {model_name: big, litellm_params: {model: hosted_vllm/big, api_base: 'http://c:1/v1'}}
- {model_name: one, litellm_params: {model: hosted_vllm/small, api_base: 'http://d:1/v1'}}
- {model_name: tuned, litellm_params: {model: hosted_vllm/adapter, api_base: 'http://d:1/v1'}}
- {model_name: cloud, litellm_params: {model: gpt-x, api_key: os.environ/KEY}}
router_settings:
  model_group_alias: {gpt-4: chat, hidden: {model: one, hidden: true}}
  fallbacks: [{one: [chat, cloud]}, {big: [one]}]
litellm_settings: {default_fallbacks: [cloud]}
`)})
	if err != nil || len(res.Lost) > 0 {
		t.Fatalf("%v, %v", err, res.Lost)
	}
	for _, part := range []string{
		"name = \"chat\"                    # model_name, which clients request\nsplit = { \"big\" = 3, \"new\" = 1 }",
		"name = \"big\"                     # model_name, which clients request\nfallback = [\"one\", \"remote:cloud\"]",
		"alias_of = \"small\"               # litellm_params.model\nfallback = [\"big\", \"new\", \"remote:cloud\"]",
		"name = \"tuned\"                   # model_name, which clients request\nalias_of = \"adapter\"",
		"name = \"gpt-4\"                   # model_group_alias\nalias_of = \"chat\"", "name = \"hidden\"                  # model_group_alias\nalias_of = \"one\"",
		"url = \"http://d:1\"               # api_base\nrole = \"both\"\nconnector = \"none\"\n\n", // two models: the engine names them
		"[[remote]]\nname = \"cloud\"\nurl = \"https://api.openai.com\"",
	} {
		if !strings.Contains(res.TOML, part) {
			t.Errorf("%q is missing in\n%s", part, res.TOML)
		}
	}
	if strings.Contains(res.TOML+warnings(res.Warnings), "must request") {
		t.Error("clients must change their names")
	}
}

// The frontend's flags, and its variables in a graph, give the same configuration.
func TestDynamoVariables(t *testing.T) {
	const graph = `kind: DynamoGraphDeployment
metadata: {name: g}
spec:
  envs: [{name: DYN_MIGRATION_LIMIT, value: "3"}]
  services:
    Frontend:
      componentType: frontend
      envs: [{name: DYN_ROUTER_MODE, value: kv}, {name: DYN_HTTP_PORT, value: "9000"}]
      extraPodSpec:
        mainContainer:
          command: [/bin/sh, -c]
          args: ["cd /workspace && exec python3 -m dynamo.frontend --http-port 8080 --no-router-kv-events | tee log"]
    Worker:
      componentType: worker
      extraPodSpec: {mainContainer: {command: [python3, -m, dynamo.vllm], args: [--model, $(MODEL)]}}
`
	res, err := Dynamo(File{"graph.yaml", []byte(graph)})
	if err != nil || len(res.Lost) > 0 {
		t.Fatalf("%v, %v", err, res.Lost)
	}
	for _, part := range []string{`listen = "0.0.0.0:8080"`, `place = "kv_aware"`, "attempts = 4", `continue = "on"`, `#role = "both"`, `#connector = "none"`} {
		if !strings.Contains(res.TOML, part) {
			t.Errorf("%q is missing in\n%s", part, res.TOML)
		}
	}
	if strings.Contains(res.TOML, "$(MODEL)") {
		t.Errorf("a variable is the name of a model:\n%s", res.TOML)
	}
}
