package deploy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// object holds the members of Kubernetes' schemas that the manifests use, so
// that a misspelt key is an error.
type object struct {
	APIVersion string            `yaml:"apiVersion"`
	Kind       string            `yaml:"kind"`
	Metadata   metadata          `yaml:"metadata"`
	Rules      []map[string]any  `yaml:"rules"`
	RoleRef    map[string]string `yaml:"roleRef"`
	Subjects   []map[string]any  `yaml:"subjects"`
	Data       map[string]string `yaml:"data"`
	Spec       struct {
		ClusterIP                string `yaml:"clusterIP"`
		PublishNotReadyAddresses bool   `yaml:"publishNotReadyAddresses"`
		Selector                 any    `yaml:"selector"`
		Ports                    []struct {
			Name       string `yaml:"name"`
			Port       int    `yaml:"port"`
			TargetPort string `yaml:"targetPort"`
		} `yaml:"ports"`
		Replicas int `yaml:"replicas"`
		Template struct {
			Metadata metadata `yaml:"metadata"`
			Spec     pod      `yaml:"spec"`
		} `yaml:"template"`
	} `yaml:"spec"`
}

type metadata struct {
	Name   string            `yaml:"name"`
	Labels map[string]string `yaml:"labels"`
}

type pod struct {
	ServiceAccountName            string      `yaml:"serviceAccountName"`
	TerminationGracePeriodSeconds int         `yaml:"terminationGracePeriodSeconds"`
	Containers                    []container `yaml:"containers"`
	Volumes                       []volume    `yaml:"volumes"`
}

type volume struct {
	Name      string            `yaml:"name"`
	ConfigMap map[string]string `yaml:"configMap"`
	Secret    map[string]string `yaml:"secret"`
	EmptyDir  map[string]any    `yaml:"emptyDir"`
}

type container struct {
	Name  string   `yaml:"name"`
	Image string   `yaml:"image"`
	Args  []string `yaml:"args"`
	Env   []any    `yaml:"env"`
	Ports []struct {
		Name          string `yaml:"name"`
		ContainerPort int    `yaml:"containerPort"`
	} `yaml:"ports"`
	LivenessProbe  probe `yaml:"livenessProbe"`
	ReadinessProbe probe `yaml:"readinessProbe"`
	StartupProbe   probe `yaml:"startupProbe"`
	Lifecycle      struct {
		PreStop struct {
			Sleep struct {
				Seconds int `yaml:"seconds"`
			} `yaml:"sleep"`
		} `yaml:"preStop"`
	} `yaml:"lifecycle"`
	SecurityContext map[string]any `yaml:"securityContext"`
	Resources       map[string]any `yaml:"resources"`
	VolumeMounts    []struct {
		Name      string `yaml:"name"`
		MountPath string `yaml:"mountPath"`
	} `yaml:"volumeMounts"`
}

type probe struct {
	HTTPGet struct {
		Path string `yaml:"path"`
		Port string `yaml:"port"`
	} `yaml:"httpGet"`
	PeriodSeconds    int `yaml:"periodSeconds"`
	FailureThreshold int `yaml:"failureThreshold"`
}

// manifests reads the objects of a file.
func manifests(t *testing.T, name string) []object {
	t.Helper()
	d := yaml.NewDecoder(bytes.NewReader([]byte(recipe(t, "kubernetes/"+name))))
	d.KnownFields(true)
	var all []object
	for {
		var o object
		err := d.Decode(&o)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		all = append(all, o)
	}
}

// find returns the object of a kind and name.
func find(t *testing.T, all []object, kind, name string) object {
	t.Helper()
	for _, o := range all {
		if o.Kind == kind && o.Metadata.Name == name {
			return o
		}
	}
	t.Fatalf("no %s %q", kind, name)
	return object{}
}

func (c container) port(name string) int {
	for _, p := range c.Ports {
		if p.Name == name {
			return p.ContainerPort
		}
	}
	return 0
}

// TestManifestsAgree: every reference in the manifests has its target.
func TestManifestsAgree(t *testing.T) {
	engines := manifests(t, "engines.yaml")
	for _, file := range []string{"engines.yaml", "simulated.yaml", "proxy.yaml", "sidecar.yaml"} {
		t.Run(file, func(t *testing.T) {
			all := manifests(t, file)
			for _, o := range all {
				if o.Kind == "Deployment" {
					checkDeployment(t, all, o)
				}
				if o.Kind == "RoleBinding" {
					find(t, all, "Role", o.RoleRef["name"])
					find(t, all, "ServiceAccount", o.Subjects[0]["name"].(string))
				}
				if o.Kind == "ConfigMap" {
					checkConfig(t, engines, o)
				}
			}
		})
	}
}

// checkDeployment checks one set of pods.
func checkDeployment(t *testing.T, all []object, o object) {
	t.Helper()
	spec := o.Spec.Template.Spec
	app := o.Spec.Template.Metadata.Labels["app"]
	service := find(t, all, "Service", o.Metadata.Name)
	if fmt.Sprint(service.Spec.Selector) != fmt.Sprint(map[string]any{"app": app}) ||
		fmt.Sprint(o.Spec.Selector) != fmt.Sprint(map[string]any{"matchLabels": map[string]any{"app": app}}) {
		t.Errorf("%s: selectors %v and %v of pods with app %s", o.Metadata.Name, service.Spec.Selector, o.Spec.Selector, app)
	}
	for _, p := range service.Spec.Ports {
		want := p.Port
		if p.TargetPort != "" {
			want = 0
		}
		if got := spec.Containers[0].port("http"); got == 0 || want != 0 && got != want {
			t.Errorf("%s: the Service's port is %d, the pods' %d", o.Metadata.Name, p.Port, got)
		}
	}
	longest := 0
	for _, c := range spec.Containers {
		for _, p := range []probe{c.LivenessProbe, c.ReadinessProbe, c.StartupProbe} {
			if p.HTTPGet.Port != "" && c.port(p.HTTPGet.Port) == 0 {
				t.Errorf("%s: a probe of port %q", c.Name, p.HTTPGet.Port)
			}
		}
		for _, m := range c.VolumeMounts {
			if !slices.ContainsFunc(spec.Volumes, func(v volume) bool { return v.Name == m.Name }) {
				t.Errorf("%s: no volume %q", c.Name, m.Name)
			}
		}
		ends := c.Lifecycle.PreStop.Sleep.Seconds
		if c.Name == "pdproxy" {
			cfg := parse(t, find(t, all, "ConfigMap", o.Metadata.Name))
			ends += int(time.Duration(cfg.Server.DrainTimeout+cfg.Timeouts.Cleanup) / time.Second)
			find(t, all, "ServiceAccount", spec.ServiceAccountName)
			if c.port("http") != portOf(t, cfg.Server.Listen) || c.port("admin") != portOf(t, cfg.Admin.Listen) {
				t.Errorf("ports %v, but the proxy listens on %s and %s", c.Ports, cfg.Server.Listen, cfg.Admin.Listen)
			}
		} else if ends < longest {
			t.Errorf("the engine is killed after %d s, but the proxy in its pod drains for %d s", ends, longest)
		}
		longest = max(longest, ends)
	}
	if spec.TerminationGracePeriodSeconds <= longest {
		t.Errorf("%s: killed after %d s, when %d are needed", o.Metadata.Name, spec.TerminationGracePeriodSeconds, longest)
	}
}

func portOf(t *testing.T, address string) int {
	t.Helper()
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	n, _ := strconv.Atoi(port)
	return n
}

func parse(t *testing.T, o object) config.Config {
	t.Helper()
	cfg, err := config.Parse([]byte(o.Data["config.toml"]))
	if err != nil {
		t.Fatal(err)
	}
	if w := cfg.Warnings(); len(w) > 0 {
		t.Errorf("warnings: %v", w)
	}
	return cfg
}

// checkConfig checks that the engines of a configuration are those in
// engines.yaml.
func checkConfig(t *testing.T, engines []object, o object) {
	t.Helper()
	cfg := parse(t, o)
	for _, e := range cfg.Discovery.Kubernetes.Engines {
		host, port, _ := net.SplitHostPort(e.Address())
		service := find(t, engines, "Service", host)
		if strconv.Itoa(service.Spec.Ports[0].Port) != port || service.Spec.ClusterIP != "None" {
			t.Errorf("%s is not the address of Service %+v", e.URL, service.Spec)
		}
		if e.Role != host {
			t.Errorf("the Service %s has role %s", host, e.Role)
		}
	}
	if len(cfg.Discovery.Kubernetes.Engines) == 0 || cfg.Fleet.NodeID != -1 {
		t.Errorf("no engines, or one part of the ids for all pods: %+v", cfg.Fleet)
	}
}

// apiServer is the part of Kubernetes' API server that serves one EndpointSlice
// for each Service.
func apiServer(t *testing.T, hosts map[string]string, port int) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		service, ok := strings.CutPrefix(r.URL.Query().Get("labelSelector"), "kubernetes.io/service-name=")
		switch {
		case r.URL.Path != "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices" || !ok || hosts[service] == "":
			http.NotFound(w, r)
		case r.URL.Query().Get("watch") != "":
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			fmt.Fprintf(w, `{"kind":"EndpointSliceList","apiVersion":"discovery.k8s.io/v1","metadata":{"resourceVersion":"1"},"items":[`+
				`{"metadata":{"name":"%[1]s-x","namespace":"llm","labels":{"kubernetes.io/service-name":"%[1]s"}},"addressType":"IPv4",`+
				`"endpoints":[{"addresses":["%[2]s"],"conditions":{"ready":true},"targetRef":{"kind":"Pod","namespace":"llm","name":"%[1]s-0"}}],`+
				`"ports":[{"name":"http","port":%[3]d}]}]}`, service, hosts[service], port)
		}
	}))
	t.Cleanup(s.CloseClientConnections)
	return s.URL
}

// TestPods runs the proxy's container of each manifest, with simulated engines
// in the other pods and in its own pod.
func TestPods(t *testing.T) {
	for file, name := range map[string]string{"proxy.yaml": "pdproxy", "sidecar.yaml": "decode"} {
		t.Run(file, func(t *testing.T) { testPod(t, file, name) })
	}
}

func testPod(t *testing.T, file, name string) {
	all := manifests(t, file)
	text := find(t, all, "ConfigMap", name).Data["config.toml"]
	spec := find(t, all, "Deployment", name).Spec.Template.Spec
	hosts := map[string]string{"prefill": "127.0.0.11", "decode": "127.0.0.12"}
	port := testbed.Ports(t, 4, "127.0.0.1", hosts["prefill"], hosts["decode"])
	dir := t.TempDir()

	// The pod's addresses and files are those of the test.
	for from, to := range map[string]string{
		"0.0.0.0:8080": fmt.Sprintf("127.0.0.1:%d", port+1), "0.0.0.0:8000": fmt.Sprintf("127.0.0.1:%d", port+1),
		"0.0.0.0:9090": fmt.Sprintf("127.0.0.1:%d", port+2), "127.0.0.1:8200": fmt.Sprintf("127.0.0.1:%d", port+3),
		"prefill:8000": fmt.Sprintf("prefill:%d", port), "decode:8000": fmt.Sprintf("decode:%d", port),
		"/etc/pdproxy": dir,
	} {
		text = strings.ReplaceAll(text, from, to)
	}
	text = strings.Replace(text, "[[discovery.kubernetes.engine]]",
		fmt.Sprintf("[health]\ninterval = \"100ms\"\n[discovery.kubernetes]\napi = %q\nnamespace = \"llm\"\n[[discovery.kubernetes.engine]]", apiServer(t, hosts, port)), 1)
	text = strings.Replace(text, "[server]", "[server]\nexpose_placement = true", 1)
	write(t, filepath.Join(dir, "config/config.toml"), text, 0o644)
	write(t, filepath.Join(dir, "admin/token"), "secret\n", 0o600)
	simulated := manifests(t, "simulated.yaml")
	for role, host := range hosts {
		var args []string
		for _, arg := range find(t, simulated, "Deployment", role).Spec.Template.Spec.Containers[0].Args {
			args = append(args, strings.Replace(arg, "$(POD_IP):8000", net.JoinHostPort(host, strconv.Itoa(port)), 1))
		}
		start(t, nil, pdproxy, args...)
	}
	decodes := "decode@decode-0"
	if file == "sidecar.yaml" {
		decodes = "local"
		start(t, nil, pdproxy, "sim", "--role", "decode", "--listen", fmt.Sprintf("127.0.0.1:%d", port+3))
	}
	c := spec.Containers[0]
	args := slices.Clone(c.Args)
	for i := range args {
		args[i] = strings.Replace(args[i], "/etc/pdproxy", dir, 1)
	}
	p := start(t, []string{"XDG_CACHE_HOME=" + t.TempDir()}, pdproxy, args...)
	url, admin := fmt.Sprintf("http://127.0.0.1:%d", port+1), fmt.Sprintf("http://127.0.0.1:%d", port+2)
	for _, probe := range []probe{c.LivenessProbe, c.ReadinessProbe} {
		eventually(t, "probe "+probe.HTTPGet.Path, func() bool { return status(admin+probe.HTTPGet.Path) == 200 })
	}
	if status(admin+"/metrics") != 401 {
		t.Error("the admin endpoints require no token")
	}
	ready(t, url)
	named := net.JoinHostPort(hosts["prefill"], strconv.Itoa(port))
	eventually(t, "both legs are served", func() bool {
		if status(url+"/health") != 200 || !known(url, named) {
			return false
		}
		_, prefill, decode := chat(t, url, "x-prefiller-host-port", named)
		return prefill == "prefill@prefill-0" && decode == decodes
	})
	p.signal(syscall.SIGTERM)
	if status := p.ended(); status != 0 {
		t.Errorf("exit status %d, want 0", status)
	}
}

// known reports whether a request that names the engine is accepted.
func known(url, engine string) bool {
	req, err := http.NewRequest(http.MethodPost, url+"/v1/chat/completions", strings.NewReader(`{"model":"sim","messages":[{"role":"user","content":"x"}],"max_tokens":1}`))
	if err != nil {
		return false
	}
	req.Header.Set("x-prefiller-host-port", engine)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == 200
}
