package importer

import (
	"errors"
	"strings"
	"testing"
	"unicode"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// foreignFiles are files of no router.
var foreignFiles = map[string]string{
	"empty":   "",
	"comment": "# nothing\n",
	"binary":  "\x7fELF\x02\x01\x01\x00\x00\xff\xfe",
	"deployment": `apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  template:
    spec:
      containers:
      - {name: web, image: "nginx:1.29", args: [--port, "80"]}
`,
	"service": "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {ports: [{port: 80}]}\n",
	"compose": "services:\n  web:\n    image: nginx\n    ports: ['80:80']\n",
	"values":  "replicaCount: 2\nimage: {repository: nginx, tag: '1.29'}\nservice: {type: ClusterIP, port: 80}\n",
	"list":    "- a\n- b\n",
	"text":    "Dear colleagues,\nthe router is new.\n",
	"json":    `{"name": "web", "dependencies": {"left-pad": "1.0.0"}}`,
	"toml":    "[server]\nlisten = '127.0.0.1:80'\n",
	"script":  "#!/bin/sh\nset -e\nnginx --prefix /etc/nginx\n",
	"prom":    "global: {scrape_interval: 15s}\nscrape_configs:\n- job_name: a\n",
}

// sources has an input of each reader, by the name of the command.
var sources = map[string]string{
	"trtllm": "trtllm", "vllm-router": "vllm", "sglang-router": "sglang", "production-stack": "stack", "llm-d": "llmd", "dynamo": "dynamo", "litellm": "litellm",
}

// TestForeignFiles: a file of no router is an error of each reader that says what the reader expects.
func TestForeignFiles(t *testing.T) {
	for source, kind := range sources {
		for name, text := range foreignFiles {
			res, err := importFile(kind+"-"+name, []byte(text))
			if err == nil {
				t.Errorf("%s of %s: %q", source, name, res.TOML)
			} else if strings.Count(err.Error(), "\n") > 0 || !strings.Contains(err.Error(), ": expected is ") {
				t.Errorf("%s of %s: %v", source, name, err)
			}
		}
	}
}

// TestFilesOfOtherRouters: the file of another router is an error that names its router.
func TestFilesOfOtherRouters(t *testing.T) {
	for _, name := range inputs(t) {
		if !strings.Contains(name, "public/") {
			continue
		}
		base := strings.TrimPrefix(name, "testdata/public/")
		for source, kind := range sources {
			if strings.HasPrefix(base, kind+"-") {
				continue
			}
			_, err := importFile(kind+"-x", read(t, name))
			if strings.HasSuffix(base, ".flags") && source != "trtllm" && source != "litellm" || base == "vllm-manifest.yaml" && source == "production-stack" {
				continue // several routers have these flags, or a program of this name
			}
			if err == nil || strings.Count(err.Error(), "\n") > 0 || !strings.Contains(err.Error(), ": expected is ") {
				t.Errorf("%s of %s: %v", source, base, err)
			} else if !strings.HasSuffix(base, ".flags") && !strings.Contains(err.Error(), "; the file looks like one for: pdproxy import ") {
				t.Errorf("%s of %s: %v", source, base, err)
			}
		}
	}
}

// TestControlCharacters: no value of an input writes a control character or a line of its own into
// the result, its comments or a finding.
func TestControlCharacters(t *testing.T) {
	const yamlEvil, shellEvil = `"a\n[admin]\nlisten = '0.0.0.0:1' #\e]0;x\a\u009b\u202e"`, "'a\n[admin]\nlisten = \x1b]0;x\a\u009b\u202e'"
	for name, text := range map[string]string{
		"trtllm-values":  "hostname: localhost\ncontext_servers: {" + yamlEvil + ": 1, urls: ['a:1'], router: {type: " + yamlEvil + "}}\n" + yamlEvil + ": 1\n",
		"trtllm-keys":    "port: 1\n" + yamlEvil + ": 1\nconditional_disagg_config: {" + yamlEvil + ": 1}\n",
		"litellm-values": "model_list: [{model_name: " + yamlEvil + ", litellm_params: {model: " + yamlEvil + "}}, {model_name: " + yamlEvil + ", litellm_params: {model: 'openai/m', api_base: 'http://h:1/v1', tags: " + yamlEvil + "}}]\n",
		"litellm-remote": "model_list: [{model_name: " + yamlEvil + ", litellm_params: {model: openai/m}}]\nrouter_settings: {" + yamlEvil + ": 1, model_group_alias: {" + yamlEvil + ": " + yamlEvil + "}}\n",
		"vllm-flags":     "vllm-router --worker-urls http://a:1 --policy " + shellEvil + " --" + shellEvil + " 1 --host " + shellEvil,
		"vllm-unknown":   "vllm-router --worker-urls http://a:1 --x" + shellEvil + " 1 --log-dir " + shellEvil,
		"sglang-flags":   "--worker-urls http://a:1 --prometheus-host ::1 --log-dir " + shellEvil + " --backend " + shellEvil,
		"stack-flags":    "--routing-logic session --session-key " + shellEvil + " --static-backends http://a:1 --static-models " + shellEvil,
		"stack-values":   "routerSpec: {routingLogic: roundrobin, " + yamlEvil + ": 1}\nservingEngineSpec: {modelSpec: [{name: " + yamlEvil + ", modelURL: " + yamlEvil + "}]}\n",
		"llmd-picker":    "kind: EndpointPickerConfig\nplugins: [{type: " + yamlEvil + ", name: " + yamlEvil + "}, {type: queue-scorer}]\nschedulingProfiles: [{name: " + yamlEvil + ", plugins: [{pluginRef: " + yamlEvil + "}]}]\n",
		"llmd-scorers": "plugins: [{type: label-selector-filter, name: " + yamlEvil + ", parameters: {matchLabels: {" + yamlEvil + ": " + yamlEvil + "}, matchExpressions: [{key: a, operator: In, values: [" + yamlEvil + "]}]}}, " +
			"{type: by-label, parameters: {label: " + yamlEvil + ", validValues: [" + yamlEvil + "], " + yamlEvil + ": 1}}, {type: header-label-affinity-scorer, parameters: {headerName: " + yamlEvil + ", labelKey: " + yamlEvil + "}}, " +
			"{type: context-length-aware, parameters: {label: " + yamlEvil + ", enableFiltering: true}}, {type: endpoint-attribute-scorer, parameters: {attributeKey: " + yamlEvil + ", producer: " + yamlEvil + "}}, " +
			"{type: topology-extractor, parameters: {hostname: " + yamlEvil + "}}, {type: topology-affinity-scorer}]\nschedulingProfiles: [{name: " + yamlEvil + ", plugins: [{pluginRef: " + yamlEvil + "}, {pluginRef: by-label}, {pluginRef: header-label-affinity-scorer}, " +
			"{pluginRef: context-length-aware}, {pluginRef: topology-affinity-scorer}, {pluginRef: endpoint-attribute-scorer}]}, {name: decode}]\nfeatureGates: [" + yamlEvil + ", flowControl]\ndataLayer: {" + yamlEvil + ": 1}\n",
		"llmd-sessions": "plugins: [{type: session-affinity-scorer, parameters: {strategy: session_id, sessionIdConfig: {sources: [{attribute: " + yamlEvil + "}], " + yamlEvil + ": 1}}}, {type: " + yamlEvil + "}]\nflowControl: {" + yamlEvil + ": 1}\n",
		"llmd-values":   "inferencePool: {modelServers: {matchLabels: {app: " + yamlEvil + "}}, " + yamlEvil + ": 1}\ninferenceExtension: {flags: {" + yamlEvil + ": " + yamlEvil + "}}\n",
		"dynamo-graph":  "kind: DynamoGraphDeployment\nmetadata: {name: " + yamlEvil + "}\nspec: {services: {Frontend: {componentType: frontend, envs: [{name: " + yamlEvil + ", value: " + yamlEvil + "}]}, " + yamlEvil + ": {componentType: worker, extraPodSpec: {mainContainer: {args: [--model, " + yamlEvil + "]}}}}}\n",
	} {
		res, err := importFile(name, []byte(text))
		all := res.TOML + "\n" + findings(res)
		if err != nil {
			all = err.Error()
			var problems Problems
			if errors.As(err, &problems) && strings.Count(all, "\n") != len(problems)-1 {
				t.Errorf("%s: a problem has several lines: %q", name, all)
			}
		} else if c, err := config.Parse([]byte(res.TOML)); err != nil || c.Admin.Listen == "0.0.0.0:1" || strings.Contains(res.TOML, "\n[admin]\nlisten = '") {
			t.Errorf("%s: %v\n%s", name, err, res.TOML)
		}
		for _, r := range all {
			if r != '\n' && !unicode.IsPrint(r) {
				t.Errorf("%s: %q in %q", name, r, all)
				break
			}
		}
		for _, f := range append(res.Warnings, res.Lost...) {
			if strings.ContainsFunc(f.String(), func(r rune) bool { return !unicode.IsPrint(r) }) {
				t.Errorf("%s: %q", name, f.String())
			}
		}
	}
}
