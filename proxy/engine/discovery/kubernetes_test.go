package discovery

import (
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/kube"
)

// patternAt is an entry of discovery.kubernetes.engine.
func patternAt(url string) config.Engine {
	e := config.DefaultEngine()
	e.Name, e.URL, e.Role, e.Connector, e.KVEvents = "p", url, config.RolePrefill, config.ConnectorVLLMNixl, "tcp://*:5557"
	return e
}

func newKube(t *testing.T, cfg config.DiscoveryKubernetes, l *logs) *kubeSource {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	if l != nil {
		log = l.logger()
	}
	cfg.API = "http://127.0.0.1:1"
	s, err := newKubernetes(cfg, log)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// has replaces a watch by a watch of these objects.
func has(t *testing.T, w **kube.Watch, objects ...string) {
	t.Helper()
	listing := says(200, `{"metadata":{"resourceVersion":"1"},"items":[`+strings.Join(objects, ",")+`]}`)
	*w = kube.NewWatch(kube.Over(&kubeWire{lists: []func() (int, io.Reader){listing}}), kube.Selected{Paths: []string{"/x"}}, func(error) {}, func() {})
	if err := (*w).List(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// sliceOf returns an EndpointSlice. endpoints and ports are JSON.
func sliceOf(name, family, endpoints, ports string) string {
	return fmt.Sprintf(`{"metadata":{"namespace":"llm","name":%q,"labels":{"kubernetes.io/service-name":"vllm"}},"addressType":%q,"endpoints":[%s],"ports":[%s]}`, name, family, endpoints, ports)
}

const (
	podRef   = `"targetRef":{"kind":"Pod","namespace":"llm","name":"vllm-0","uid":"u1"}`
	httpPort = `{"name":"","port":8000}`
)

func TestEndpointConditions(t *testing.T) {
	for conditions, takes := range map[string]bool{
		`{}`:             true, // the API defines an unknown state as ready
		`{"ready":null}`: true,
		`{"ready":true,"serving":true,"terminating":false}`:   true,
		`{"ready":false,"serving":false,"terminating":false}`: false,
		`{"ready":false,"serving":true,"terminating":true}`:   false, // the endpoint drains
		`{"ready":false,"serving":false,"terminating":true}`:  false,
		`{"ready":true,"serving":true,"terminating":true}`:    false, // publishNotReadyAddresses
		`{"ready":true,"terminating":true}`:                   false,
	} {
		t.Run(conditions, func(t *testing.T) {
			s := newKube(t, config.DiscoveryKubernetes{Engines: []config.Engine{patternAt("http://vllm.llm")}}, nil)
			has(t, &s.services[0].slices, sliceOf("s", "IPv4", `{"addresses":["10.0.0.5"],"conditions":`+conditions+`}`, httpPort))
			if got := s.engines(); (len(got) == 1) != takes {
				t.Errorf("got %v", got)
			}
		})
	}
}

func TestEndpointAddresses(t *testing.T) {
	for name, tt := range map[string]struct {
		url    string
		slices []string
		want   []string // name and URL of each engine
		events string   // event endpoint of the first engine
		logged string
	}{
		"address": {"http://vllm.llm", []string{sliceOf("s", "IPv4", `{"addresses":["10.0.0.5"]}`, httpPort)},
			[]string{"p@10.0.0.5 http://10.0.0.5:8000"}, "tcp://10.0.0.5:5557", ""},
		"pod, path": {"https://vllm.llm.svc.cluster.local/x", []string{sliceOf("s", "IPv4", `{"addresses":["10.0.0.5"],`+podRef+`}`, httpPort)},
			[]string{"p@vllm-0 https://10.0.0.5:8000/x"}, "tcp://10.0.0.5:5557", ""},
		"port of the pattern": {"http://vllm.llm:8200", []string{sliceOf("s", "IPv4", `{"addresses":["10.0.0.5"]}`, httpPort)},
			[]string{"p@10.0.0.5 http://10.0.0.5:8200"}, "tcp://10.0.0.5:5557", ""},
		"headless without ports": {"http://vllm.llm:8000", []string{sliceOf("s", "IPv4", `{"addresses":["10.0.0.5"]}`, "")},
			[]string{"p@10.0.0.5 http://10.0.0.5:8000"}, "tcp://10.0.0.5:5557", ""},
		"port named http": {"http://vllm.llm", []string{sliceOf("s", "IPv4", `{"addresses":["10.0.0.5"]}`, `{"name":"nixl","port":5600},{"name":"http","port":8000}`)},
			[]string{"p@10.0.0.5 http://10.0.0.5:8000"}, "tcp://10.0.0.5:5557", ""},
		"no port":    {"http://vllm.llm", []string{sliceOf("s", "IPv4", `{"addresses":["10.0.0.5"]}`, "")}, nil, "", "give the url a port"},
		"which port": {"http://vllm.llm", []string{sliceOf("s", "IPv4", `{"addresses":["10.0.0.5"]}`, `{"name":"a","port":1},{"name":"b","port":2}`)}, nil, "", "give the url a port"},
		"IPv6": {"http://vllm.llm", []string{sliceOf("s", "IPv6", `{"addresses":["fd00::5"]}`, httpPort)},
			[]string{"p@fd00::5 http://[fd00::5]:8000"}, "tcp://[fd00::5]:5557", ""},
		"both families": {"http://vllm.llm", []string{sliceOf("a", "IPv6", `{"addresses":["fd00::5"],`+podRef+`}`, httpPort), sliceOf("b", "IPv4", `{"addresses":["10.0.0.5"],`+podRef+`}`, httpPort)},
			[]string{"p@vllm-0 http://10.0.0.5:8000"}, "tcp://10.0.0.5:5557", ""},
		"in two slices": {"http://vllm.llm", []string{sliceOf("a", "IPv4", `{"addresses":["10.0.0.5"],"conditions":{"ready":false},`+podRef+`}`, httpPort), sliceOf("b", "IPv4", `{"addresses":["10.0.0.5"],`+podRef+`}`, httpPort), sliceOf("c", "IPv4", `{"addresses":["10.0.0.5"],`+podRef+`}`, httpPort)},
			[]string{"p@vllm-0 http://10.0.0.5:8000"}, "tcp://10.0.0.5:5557", ""},
		"many": {"http://vllm.llm", []string{sliceOf("a", "IPv4", `{"addresses":["10.0.0.6"]},{"addresses":[]},{"addresses":["10.0.0.5"]}`, httpPort), sliceOf("b", "IPv4", `{"addresses":["10.0.0.4"]}`, httpPort)},
			[]string{"p@10.0.0.4 http://10.0.0.4:8000", "p@10.0.0.5 http://10.0.0.5:8000", "p@10.0.0.6 http://10.0.0.6:8000"}, "tcp://10.0.0.4:5557", ""},
	} {
		t.Run(name, func(t *testing.T) {
			l := &logs{}
			s := newKube(t, config.DiscoveryKubernetes{Engines: []config.Engine{patternAt(tt.url)}}, l)
			has(t, &s.services[0].slices, tt.slices...)
			var got []string
			for _, e := range s.engines() {
				got = append(got, e.Name+" "+e.URL)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("got %q, want %q", got, tt.want)
			}
			if len(got) > 0 && s.engines()[0].KVEvents != tt.events {
				t.Errorf("events are at %q", s.engines()[0].KVEvents)
			}
			if text := l.take(); !strings.Contains(text, tt.logged) || tt.logged == "" && text != "" {
				t.Errorf("logged: %s", text)
			}
		})
	}
}

// podOf returns a pod. labels and annotations are JSON.
func podOf(uid, labels, annotations, more string) string {
	return fmt.Sprintf(`{"metadata":{"namespace":"llm","name":"vllm-0","uid":%q,"labels":{%s},"annotations":{%s}%s}}`, uid, labels, annotations, more)
}

func TestPodsSayMore(t *testing.T) {
	sglang := func(role string) func(*config.Engine) {
		return func(e *config.Engine) { e.Connector, e.Role = config.ConnectorSGLang, role }
	}
	for name, tt := range map[string]struct {
		pattern func(*config.Engine)
		pod     string
		role    string // "": the pod is no engine
		port    int
		logged  string // level and text of the log line
	}{
		"nothing":              {pod: podOf("u1", ``, ``, ``), role: "prefill"},
		"prefill":              {pod: podOf("u1", `"llm-d.ai/role":"prefill"`, ``, ``), role: "prefill"},
		"decode":               {pod: podOf("u1", `"llm-d.ai/role":"decode"`, ``, ``), role: "decode"},
		"prefill-decode":       {pod: podOf("u1", `"llm-d.ai/role":"prefill-decode"`, ``, ``), role: "both"},
		"both":                 {pod: podOf("u1", `"llm-d.ai/role":"both"`, ``, ``), role: "both"},
		"encode-prefill":       {pod: podOf("u1", `"llm-d.ai/role":"encode-prefill"`, ``, ``), role: "prefill"},
		"all three":            {pod: podOf("u1", `"llm-d.ai/role":"encode-prefill-decode"`, ``, ``), role: "both"},
		"encoder":              {pod: podOf("u1", `"llm-d.ai/role":"encode"`, ``, ``), role: "encode"},
		"encoder of SGLang":    {pattern: sglang("prefill"), pod: podOf("u1", `"llm-d.ai/role":"encode"`, ``, ``), logged: "level=INFO"},
		"no role":              {pod: podOf("u1", `"llm-d.ai/role":"chef"`, ``, ``), logged: "level=ERROR"},
		"engine":               {pod: podOf("u1", `"llm-d.ai/engine-type":"vllm"`, ``, ``), role: "prefill"},
		"other engine":         {pod: podOf("u1", `"llm-d.ai/engine-type":"sglang"`, ``, ``), logged: "level=INFO"},
		"trtllm":               {pattern: func(e *config.Engine) { e.Connector = config.ConnectorTRTLLM; e.KVEvents = "" }, pod: podOf("u1", `"llm-d.ai/engine-type":"trtllm-serve"`, ``, ``), role: "prefill"},
		"any engine":           {pattern: func(e *config.Engine) { e.Connector, e.Role = config.ConnectorNone, config.RoleBoth }, pod: podOf("u1", `"llm-d.ai/engine-type":"x"`, ``, ``), role: "both"},
		"none cannot pair":     {pattern: func(e *config.Engine) { e.Connector, e.Role = config.ConnectorNone, config.RoleBoth }, pod: podOf("u1", `"llm-d.ai/role":"decode"`, ``, ``), logged: "transfers nothing"},
		"bootstrap":            {pattern: sglang("prefill"), pod: podOf("u1", `"llm-d.ai/engine-type":"sglang"`, `"sglang.ai/bootstrap-port":"9001"`, ``), role: "prefill", port: 9001},
		"decode has none":      {pattern: sglang("decode"), pod: podOf("u1", ``, `"sglang.ai/bootstrap-port":"9001"`, ``), role: "decode"},
		"decode by its label":  {pattern: sglang("prefill"), pod: podOf("u1", `"llm-d.ai/role":"decode"`, `"sglang.ai/bootstrap-port":"9001"`, ``), role: "decode"},
		"no SGLang":            {pod: podOf("u1", ``, `"sglang.ai/bootstrap-port":"9001"`, ``), role: "prefill"},
		"bootstrap is no port": {pattern: sglang("prefill"), pod: podOf("u1", ``, `"sglang.ai/bootstrap-port":"x"`, ``), logged: "no port"},
		"bootstrap is 0":       {pattern: sglang("prefill"), pod: podOf("u1", ``, `"sglang.ai/bootstrap-port":"0"`, ``), logged: "no port"},
		"bootstrap too high":   {pattern: sglang("prefill"), pod: podOf("u1", ``, `"sglang.ai/bootstrap-port":"65536"`, ``), logged: "bootstrap_port"},
		"pod of before":        {pod: podOf("u0", ``, ``, ``)},
		"pod is deleted":       {pod: podOf("u1", ``, ``, `,"deletionTimestamp":"2026-11-21T13:00:00Z"`)},
		"pod not known yet":    {pod: `{"metadata":{"namespace":"llm","name":"vllm-1","uid":"u1"}}`},
	} {
		t.Run(name, func(t *testing.T) {
			l := &logs{}
			pattern := patternAt("http://vllm.llm")
			if tt.pattern != nil {
				tt.pattern(&pattern)
			}
			s := newKube(t, config.DiscoveryKubernetes{Pods: "*", Engines: []config.Engine{pattern}}, l)
			has(t, &s.services[0].slices, sliceOf("s", "IPv4", `{"addresses":["10.0.0.5"],`+podRef+`}`, httpPort))
			has(t, &s.services[0].pods, tt.pod)
			got := s.engines()
			switch {
			case tt.role == "" && len(got) == 0:
			case len(got) != 1 || got[0].Role != tt.role || got[0].BootstrapPort != tt.port:
				t.Errorf("got %+v", got)
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

// EndpointSlices have the labels of their Service.
func TestServiceSaysRole(t *testing.T) {
	s := newKube(t, config.DiscoveryKubernetes{Engines: []config.Engine{patternAt("http://vllm.llm")}}, nil)
	slice := sliceOf("s", "IPv4", `{"addresses":["10.0.0.5"],`+podRef+`}`, httpPort)
	has(t, &s.services[0].slices, strings.Replace(slice, `"labels":{`, `"labels":{"llm-d.ai/role":"decode",`, 1))
	if got := s.engines(); len(got) != 1 || got[0].Role != config.RoleDecode {
		t.Errorf("got %+v", got)
	}
}

// TestKubernetesLabels: an engine has the zone of its node, the revision of its pod and the configured
// labels of its pod, unless the pattern sets them.
func TestKubernetesLabels(t *testing.T) {
	copied := []string{"llm-d.ai/model", "rack=topology.kubernetes.io/rack", "zone=topology.kubernetes.io/zone", "absent", "empty"}
	for name, tt := range map[string]struct {
		pods    string
		labels  []string
		pattern map[string]string
		want    map[string]string
	}{
		"zone only":              {want: map[string]string{"zone": "eu-1a"}},
		"zone and revision":      {pods: "*", want: map[string]string{"zone": "eu-1a", "revision": "7d9f"}},
		"pattern":                {pods: "*", pattern: map[string]string{"zone": "x", "hardware": "h100"}, want: map[string]string{"zone": "x", "revision": "7d9f", "hardware": "h100"}},
		"copied":                 {pods: "*", labels: copied, want: map[string]string{"zone": "eu-1b", "revision": "7d9f", "rack": "r7", "llm-d.ai/model": "qwen"}},
		"copied and pattern":     {pods: "*", labels: copied, pattern: map[string]string{"rack": "x", "zone": "y"}, want: map[string]string{"zone": "y", "revision": "7d9f", "rack": "x", "llm-d.ai/model": "qwen"}},
		"copied of the Service":  {labels: []string{"service=kubernetes.io/service-name", "rack"}, want: map[string]string{"zone": "eu-1a", "service": "vllm"}},
		"another revision":       {pods: "*", labels: []string{"revision=llm-d.ai/model"}, want: map[string]string{"zone": "eu-1a", "revision": "qwen"}},
		"a revision that is not": {pods: "*", labels: []string{"revision=absent"}, want: map[string]string{"zone": "eu-1a", "revision": "7d9f"}},
	} {
		t.Run(name, func(t *testing.T) {
			pattern := patternAt("http://vllm.llm")
			pattern.Labels = config.LabelsOf(tt.pattern)
			s := newKube(t, config.DiscoveryKubernetes{Pods: tt.pods, Labels: tt.labels, Engines: []config.Engine{pattern}}, &logs{})
			has(t, &s.services[0].slices, sliceOf("s", "IPv4", `{"addresses":["10.0.0.5"],"zone":"eu-1a",`+podRef+`}`, httpPort))
			if tt.pods != "" {
				has(t, &s.services[0].pods, podOf("u1", `"pod-template-hash":"7d9f","llm-d.ai/model":"qwen","topology.kubernetes.io/rack":"r7","topology.kubernetes.io/zone":"eu-1b","empty":"","other":"x"`, ``, ``))
			}
			got := s.engines()
			if len(got) != 1 || got[0].Labels != config.LabelsOf(tt.want) {
				t.Errorf("got %+v, want labels %v", got, tt.want)
			}
		})
	}
}
