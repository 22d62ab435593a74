package importer

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// fuzz checks any input: the import returns problems, or a text that config.Parse
// accepts. A second import returns the same.
func fuzz(f *testing.F, kind string, more ...string) {
	for _, name := range inputs(f) {
		if strings.HasPrefix(filepath.Base(name), kind) {
			f.Add(read(f, name))
		}
	}
	for _, text := range more {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		res, err := importFile(kind, text)
		again, _ := importFile(kind, text)
		if res.TOML != again.TOML || warnings(res.Warnings) != warnings(again.Warnings) {
			t.Error("twice the same input, two results")
		}
		if err != nil {
			var problems Problems
			if !errors.As(err, &problems) || len(problems) == 0 || res.TOML != "" {
				t.Errorf("got error %v with text %q", err, res.TOML)
			}
			return
		}
		if _, err := config.Parse([]byte(res.TOML)); err != nil {
			t.Errorf("%v\n%s", err, res.TOML)
		}
	})
}

func FuzzTRTLLM(f *testing.F) {
	fuzz(f, "trtllm", "a: &a [*a]\nb: {<<: *a}", "a: &a {b: *a}\ncontext_servers: *a\ngeneration_servers: {b: 1}", "port: 0x10\nnode_id: 1_0")
}

func FuzzVLLMRouter(f *testing.F) {
	fuzz(f, "vllm", "--prefill http://[::1]:80/a%20b/ NONE --decode=http://a", "--host \x01 --prometheus-port 30000")
}

func FuzzSGLangRouter(f *testing.F) {
	fuzz(f, "sglang", "--tls-cert-path '' --tls-key-path \"\\\"\"", "--worker-urls http://a/%zz http://a%41")
}

func FuzzLLMD(f *testing.F) {
	fuzz(f, "llmd", "--port 1 --secure-serving=no", "port: 1\nenable-tls: [decoder, 1]\n", "kind: 1\nplugins: [a, {type: t}]\nschedulingProfiles: [{plugins: [{pluginRef: t}]}]",
		"router: {epp: {pluginsConfigFile: a, pluginsCustomConfig: {a: 'plugins: [{type: pd-profile-handler}]'}}}", "inferencePool: {}\ninferenceExtension: &a {flags: *a}",
		"apiVersion: v1\nkind: Pod\nspec: {containers: [{image: routing-sidecar, args: [--port=1]}]}",
		"plugins: [{type: label-selector-filter, parameters: {matchLabels: {a: b}, matchExpressions: [{key: a, operator: NotIn, values: [1, c]}]}}]",
		"plugins: &a [{type: endpoint-attribute-scorer, parameters: {attributeKey: a}}, {type: core-metrics-extractor, parameters: {engineConfigs: *a}}]\nfeatureGates: [flowControl=1]\nflowControl: {defaultPriorityBand: {fairnessPolicyRef: a}}",
		"plugins: [{type: topology-affinity-filter, parameters: {minAffinity: rack}}, {type: topology-extractor, parameters: {rack: [a]}}]\nschedulingProfiles: [{name: decode, plugins: [{pluginRef: topology-affinity-filter, weight: 1e9}]}]",
		"router: {latencyPredictor: {enabled: true}, epp: {pluginsConfigFile: payload-agnostic.yaml}}")
}

func FuzzDynamo(f *testing.F) {
	fuzz(f, "dynamo", "dynamo.frontend --router-mode kv --no-router-kv-events --migration-limit 3", "kind: DynamoGraphDeployment\nspec: {components: [{type: frontend}, a]}", "kind: &a DynamoGraphDeployment\nspec: &b {services: {x: *b}}")
}

func FuzzLiteLLM(f *testing.F) {
	fuzz(f, "litellm", "model_list: [a, {model_name: 1, litellm_params: {model: openai/, api_base: 'http://h/v1/v1'}}]\nrouter_settings: 3")
}

func FuzzProductionStack(f *testing.F) {
	fuzz(f, "stack", "--routing-logic session --session-key \x01 --static-backends http://a,http://a,grpc://b --static-models ,a,b,c", "a: {routerSpec: {routingLogic: loadaware, extraArgs: ['--log-stats', x]}}", "servingEngineSpec: &a {modelSpec: [*a]}")
}
