package discovery

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// poolOf returns the InferencePool vllm. selector and ports are JSON.
func poolOf(selector, ports string) string {
	return fmt.Sprintf(`{"metadata":{"namespace":"llm","name":"vllm"},"spec":{"selector":{"matchLabels":{%s}},"targetPorts":[%s]}}`, selector, ports)
}

// runningPod returns a pod. labels are JSON, more are further members of its metadata.
func runningPod(name, ip, labels, ready, more string) string {
	return fmt.Sprintf(`{"metadata":{"namespace":"llm","name":%q,"uid":"u-%s","labels":{%s}%s},"spec":{"nodeName":"n"},"status":{"podIP":%q,"conditions":[{"type":"Initialized","status":"True"},{"type":"Ready","status":%q}]}}`, name, name, labels, more, ip, ready)
}

const (
	poolLabels = `"app":"vllm"`
	poolPort   = `{"number":8000}`
)

func TestPoolPods(t *testing.T) {
	a, b := runningPod("a", "10.0.0.5", poolLabels, "True", ""), runningPod("b", "10.0.0.6", poolLabels+`,"x":"y"`, "True", "")
	for name, tt := range map[string]struct {
		url    string
		pool   string
		pods   []string
		want   []string // name and URL of each engine
		logged string
	}{
		"two pods":         {"http://vllm.llm", poolOf(poolLabels, poolPort), []string{b, a}, []string{"p@a http://10.0.0.5:8000", "p@b http://10.0.0.6:8000"}, ""},
		"port of url":      {"https://vllm.llm:8200/x", poolOf(poolLabels, poolPort), []string{a}, []string{"p@a https://10.0.0.5:8200/x"}, ""},
		"two target ports": {"http://vllm.llm", poolOf(poolLabels, poolPort+`,{"number":8001}`), []string{a}, []string{"p@a:8000 http://10.0.0.5:8000", "p@a:8001 http://10.0.0.5:8001"}, ""},
		"IPv6":             {"http://vllm.llm", poolOf(poolLabels, poolPort), []string{runningPod("a", "fd00::5", poolLabels, "True", "")}, []string{"p@a http://[fd00::5]:8000"}, ""},
		"other labels":     {"http://vllm.llm", poolOf(poolLabels+`,"x":"y"`, poolPort), []string{a, b}, []string{"p@b http://10.0.0.6:8000"}, ""},
		"not ready":        {"http://vllm.llm", poolOf(poolLabels, poolPort), []string{a, runningPod("b", "10.0.0.6", poolLabels, "False", "")}, []string{"p@a http://10.0.0.5:8000"}, ""},
		"terminates":       {"http://vllm.llm", poolOf(poolLabels, poolPort), []string{runningPod("a", "10.0.0.5", poolLabels, "True", `,"deletionTimestamp":"2026-11-21T13:00:00Z"`)}, nil, ""},
		"no address yet":   {"http://vllm.llm", poolOf(poolLabels, poolPort), []string{runningPod("a", "", poolLabels, "True", "")}, nil, ""},
		"no status yet":    {"http://vllm.llm", poolOf(poolLabels, poolPort), []string{`{"metadata":{"namespace":"llm","name":"a","labels":{"app":"vllm"}},"status":{"podIP":"10.0.0.5"}}`}, nil, ""},
		"no pool":          {"http://vllm.llm", strings.Replace(poolOf(poolLabels, poolPort), `"vllm"`, `"other"`, 1), []string{a}, nil, ""},
		"no selector":      {"http://vllm.llm", poolOf("", poolPort), []string{a}, nil, ""}, // it would select every pod
		"no port":          {"http://vllm.llm", poolOf(poolLabels, ""), []string{a}, nil, "give the url a port"},
		"invalid port":     {"http://vllm.llm", poolOf(poolLabels, `{"number":70000}`), []string{a}, nil, "give the url a port"},
		"role":             {"http://vllm.llm", poolOf(poolLabels, poolPort), []string{runningPod("a", "10.0.0.5", poolLabels+`,"llm-d.ai/role":"chef"`, "True", "")}, nil, "no role"},
	} {
		t.Run(name, func(t *testing.T) {
			l := &logs{}
			s := newKube(t, config.DiscoveryKubernetes{Pools: []config.Engine{patternAt(tt.url)}}, l)
			has(t, &s.pools[0].pools, tt.pool)
			has(t, &s.pools[0].pods, tt.pods...)
			var got []string
			for _, e := range s.engines() {
				got = append(got, e.Name+" "+e.URL)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("got %q, want %q", got, tt.want)
			}
			if text := l.take(); !strings.Contains(text, tt.logged) || tt.logged == "" && text != "" {
				t.Errorf("logged: %s", text)
			}
			s.engines()
			if text := l.take(); text != "" {
				t.Errorf("the problem was logged again: %s", text)
			}
		})
	}
}

// A pool of pods of both roles is one pattern; the labels of a pod name its role, and its
// revision and the configured labels are labels for policies.
func TestPoolRoles(t *testing.T) {
	s := newKube(t, config.DiscoveryKubernetes{Labels: []string{"zone=app"}, Pools: []config.Engine{patternAt("http://vllm.llm")}}, nil)
	has(t, &s.pools[0].pools, poolOf(poolLabels, poolPort))
	has(t, &s.pools[0].pods, runningPod("a", "10.0.0.5", poolLabels+`,"llm-d.ai/role":"prefill"`, "True", ""),
		runningPod("b", "10.0.0.6", poolLabels+`,"llm-d.ai/role":"decode","pod-template-hash":"7d9f"`, "True", ""))
	got := s.engines()
	if len(got) != 2 || got[0].Role != config.RolePrefill || got[1].Role != config.RoleDecode {
		t.Fatalf("got %+v", got)
	}
	if want := config.LabelsOf(map[string]string{"revision": "7d9f", "zone": "vllm"}); got[1].Labels != want {
		t.Errorf("labels %v, want %v", got[1].Labels, want)
	}
}

// Patterns of one namespace share the watches of pods and pools; a Service beside a pool
// reads pods only if the configuration says so.
func TestPoolWatches(t *testing.T) {
	pattern := patternAt("http://vllm.llm")
	s := newKube(t, config.DiscoveryKubernetes{Engines: []config.Engine{pattern}, Pools: []config.Engine{pattern, patternAt("http://other.llm"), patternAt("http://vllm.x")}}, nil)
	var paths []string
	for _, w := range s.watches {
		paths = append(paths, w.Paths[0])
	}
	want := []string{
		"/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices",
		"/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools", "/api/v1/namespaces/llm/pods",
		"/apis/inference.networking.k8s.io/v1/namespaces/x/inferencepools", "/api/v1/namespaces/x/pods",
	}
	slices.Sort(paths)
	slices.Sort(want)
	if !slices.Equal(paths, want) || s.services[0].pods != nil {
		t.Errorf("watches of %q, pods of the Service %v", paths, s.services[0].pods)
	}
	if _, err := newKubernetes(config.DiscoveryKubernetes{API: "http://127.0.0.1:1", Pools: []config.Engine{patternAt("http://vllm")}}, s.log); err == nil || !strings.Contains(err.Error(), "POOL.NAMESPACE") {
		t.Errorf("without a namespace: %v", err)
	}
}
