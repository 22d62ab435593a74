//go:build kubernetes

package discovery

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
)

const chart = "../../deploy/helm/pdproxy"

// chartPaths are the paths of the kinds that the chart makes.
var chartPaths = map[string]string{
	"ConfigMap":               "/api/v1/namespaces/NAMESPACE/configmaps",
	"Secret":                  "/api/v1/namespaces/NAMESPACE/secrets",
	"Service":                 "/api/v1/namespaces/NAMESPACE/services",
	"ServiceAccount":          "/api/v1/namespaces/NAMESPACE/serviceaccounts",
	"Role":                    "/apis/rbac.authorization.k8s.io/v1/namespaces/NAMESPACE/roles",
	"RoleBinding":             "/apis/rbac.authorization.k8s.io/v1/namespaces/NAMESPACE/rolebindings",
	"Deployment":              "/apis/apps/v1/namespaces/NAMESPACE/deployments",
	"HorizontalPodAutoscaler": "/apis/autoscaling/v2/namespaces/NAMESPACE/horizontalpodautoscalers",
	"PodDisruptionBudget":     "/apis/policy/v1/namespaces/NAMESPACE/poddisruptionbudgets",
	"NetworkPolicy":           "/apis/networking.k8s.io/v1/namespaces/NAMESPACE/networkpolicies",
	"Ingress":                 "/apis/networking.k8s.io/v1/namespaces/NAMESPACE/ingresses",
	"HTTPRoute":               "/apis/gateway.networking.k8s.io/v1/namespaces/NAMESPACE/httproutes",
	"InferencePool":           "/apis/inference.networking.k8s.io/v1/namespaces/NAMESPACE/inferencepools",
	"PrometheusRule":          "/apis/monitoring.coreos.com/v1/namespaces/NAMESPACE/prometheusrules",
	"ServiceMonitor":          "/apis/monitoring.coreos.com/v1/namespaces/NAMESPACE/servicemonitors",
	"ScaledObject":            "/apis/keda.sh/v1alpha1/namespaces/NAMESPACE/scaledobjects",
}

// call sends a request as an administrator and returns the status and the answer.
func (c *cluster) call(method, path, contentType string, body []byte) (int, []byte) {
	c.t.Helper()
	status, answer, err := c.try(method, path, contentType, body)
	if err != nil {
		c.t.Fatal(err)
	}
	return status, answer
}

// try is call for goroutines that may not end the test.
func (c *cluster) try(method, path, contentType string, body []byte) (int, []byte, error) {
	req, err := http.NewRequest(method, "https://"+c.server.addr()+path, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Authorization", "Bearer "+adminToken)
	req.Header.Set("Content-Type", contentType)
	resp, err := c.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, text, err
}

// helm runs a command of helm against the API server.
func (c *cluster) helm(args ...string) (string, error) {
	c.t.Helper()
	dir := c.t.TempDir()
	cmd := exec.Command("helm", append(args, "--namespace=llm", "--kube-apiserver=https://"+c.server.addr(), "--kube-token="+adminToken, "--kube-ca-file="+c.certs.ca)...)
	cmd.Env = append(os.Environ(), "HOME="+dir, "HELM_CACHE_HOME="+dir, "HELM_CONFIG_HOME="+dir, "HELM_DATA_HOME="+dir, "KUBECONFIG=")
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	if err := cmd.Run(); err != nil {
		return out.String() + log.String(), err
	}
	return out.String(), nil // without Helm's notes about links in the chart
}

func (c *cluster) mustHelm(args ...string) string {
	c.t.Helper()
	out, err := c.helm(args...)
	if err != nil {
		c.t.Fatalf("helm %q: %v\n%s", args, err, out)
	}
	return out
}

// prepareChart makes the definitions of the custom resources that the chart can make, whose files
// conformance/kubernetes/run.sh names, and the namespace of the chart's second Role. It leaves out the groups in
// without.
func (c *cluster) prepareChart(without ...string) {
	c.t.Helper()
	files := strings.Fields(os.Getenv("PDPROXY_CRDS"))
	if len(files) == 0 {
		c.t.Fatal("PDPROXY_CRDS must name files: run conformance/kubernetes/run.sh")
	}
	for _, file := range files {
		if group, _, _ := strings.Cut(filepath.Base(file), "_"); slices.Contains(without, group) {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			c.t.Fatal(err)
		}
		if status, answer := c.call(http.MethodPost, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "application/yaml", text); status != http.StatusCreated {
			c.t.Fatalf("%s: status %d\n%s", file, status, answer)
		}
	}
	for kind, path := range chartPaths {
		if slices.Contains(without, strings.Split(path, "/")[2]) {
			continue
		}
		testbed.Eventually(c.t, kind+" is served", func() bool {
			status, _ := c.call(http.MethodGet, strings.Replace(path, "NAMESPACE", "llm", 1), "application/json", nil)
			return status == http.StatusOK
		})
	}
	c.do(http.MethodPost, "/api/v1/namespaces", fields{"apiVersion": "v1", "kind": "Namespace", "metadata": fields{"name": "models"}})
}

// documents splits a file with several YAML documents.
func documents(t *testing.T, text string) []fields {
	t.Helper()
	var all []fields
	for d := yaml.NewDecoder(strings.NewReader(text)); ; {
		var o fields
		err := d.Decode(&o)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
		if o != nil {
			all = append(all, o)
		}
	}
}

// accepts checks every object of a rendered chart against the API server's own schemas and
// rules. It returns the number of objects of each kind.
func (c *cluster) accepts(rendered string) map[string]int {
	c.t.Helper()
	kinds := map[string]int{}
	for _, o := range documents(c.t, rendered) {
		kind, namespace := o["kind"].(string), "llm"
		if n, ok := o["metadata"].(fields)["namespace"].(string); ok {
			namespace = n
		}
		body, err := json.Marshal(o)
		if err != nil {
			c.t.Fatal(err)
		}
		path := strings.Replace(chartPaths[kind], "NAMESPACE", namespace, 1) + "?dryRun=All&fieldValidation=Strict"
		if status, answer := c.call(http.MethodPost, path, "application/json", body); status != http.StatusCreated {
			c.t.Errorf("%s: status %d\n%s", kind, status, answer)
		}
		kinds[kind]++
	}
	return kinds
}

// TestKubernetesChart: the API server accepts every object that the chart can make, and Helm
// installs, upgrades and removes a release.
func TestKubernetesChart(t *testing.T) {
	c := newCluster(t)
	c.prepareChart()
	seen := map[string]int{}
	sets, err := filepath.Glob(chart + "/ci/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, values := range append(sets, chart+"/values.yaml") {
		for kind, n := range c.accepts(c.mustHelm("template", "chart", chart, "-f", values)) {
			seen[kind] += n
		}
	}
	for kind := range chartPaths {
		if seen[kind] == 0 {
			t.Errorf("no set of values makes a %s", kind)
		}
	}

	// The schemas of the custom resources refuse wrong fields, so the check above has a meaning.
	for kind, wrong := range map[string]struct {
		spec fields
		want string
	}{
		"ServiceMonitor": {fields{"selector": fields{}, "endpoints": []any{}, "endpoint": []any{}}, `unknown field \"spec.endpoint\"`},
		"PrometheusRule": {fields{"groups": []any{fields{"name": "x", "rules": []any{fields{"alert": "X"}}}}}, "spec.groups[0].rules[0].expr"},
		"HTTPRoute":      {fields{"rules": []any{fields{"timeouts": fields{"request": "0"}}}}, "spec.rules[0].timeouts.request"},
		"InferencePool":  {fields{"selector": fields{"matchLabels": fields{}}}, "spec.endpointPickerRef"},
		"ScaledObject":   {fields{"scaleTargetRef": fields{"name": "x"}, "triggers": []any{fields{"type": "prometheus"}}}, "spec.triggers[0].metadata"},
	} {
		group := strings.Split(chartPaths[kind], "/")
		body, err := json.Marshal(fields{"apiVersion": group[2] + "/" + group[3], "kind": kind, "metadata": fields{"name": "wrong"}, "spec": wrong.spec})
		if err != nil {
			t.Fatal(err)
		}
		path := strings.Replace(chartPaths[kind], "NAMESPACE", "llm", 1) + "?dryRun=All&fieldValidation=Strict"
		if status, answer := c.call(http.MethodPost, path, "application/json", body); status < 400 || !strings.Contains(string(answer), wrong.want) {
			t.Errorf("a wrong %s: status %d\n%s", kind, status, answer)
		}
	}

	c.mustHelm("install", "chart", chart)
	token := c.get("Secret", "chart-pdproxy-admin")["data"].(fields)["token"]
	before := c.get("Deployment", "chart-pdproxy")
	text := c.get("ConfigMap", "chart-pdproxy")["data"].(fields)["config.toml"].(string)
	if _, err := config.Parse([]byte(text)); err != nil {
		t.Errorf("the installed configuration: %v\n%s", err, text)
	}
	c.mustHelm("upgrade", "chart", chart, "--reuse-values", "--set-string", "config="+strings.Replace(text, "60s", "30s", 1))
	after := c.get("Deployment", "chart-pdproxy")
	if checksum(before) == checksum(after) {
		t.Error("a new configuration starts no new pods")
	}
	if grace(before) != 85.0 || grace(after) != 55.0 {
		t.Errorf("the pods have %v and %v s to end", grace(before), grace(after))
	}
	if now := c.get("Secret", "chart-pdproxy-admin")["data"].(fields)["token"]; now != token || token == "" {
		t.Error("the upgrade changed the token")
	}
	c.mustHelm("install", "full", chart, "-f", chart+"/ci/full.yaml")
	for _, release := range []string{"chart", "full"} {
		c.mustHelm("uninstall", release)
		if status, _ := c.call(http.MethodGet, strings.Replace(chartPaths["Deployment"], "NAMESPACE", "llm", 1)+"/"+release+"-pdproxy", "application/json", nil); status != http.StatusNotFound {
			t.Errorf("got status %d of a removed Deployment", status)
		}
	}
}

// TestKubernetesManifests: the API server accepts the manifests of deploy/. make test-manifests checks the
// objects that only some gateways know.
func TestKubernetesManifests(t *testing.T) {
	c := newCluster(t)
	c.prepareChart()
	for _, kind := range []string{"Role", "RoleBinding"} { // those of the other tests have the names of proxy.yaml
		c.do(http.MethodDelete, strings.Replace(chartPaths[kind], "NAMESPACE", "llm", 1)+"/pdproxy", fields{})
	}
	for pattern, kinds := range map[string]int{"kubernetes/*.yaml": 6, "keda/*.yaml": 1, "gateway/picker.yaml": 7, "gateway/inferencepool.yaml": 2} {
		files, err := filepath.Glob("../../deploy/" + pattern)
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for kind := range c.accepts(string(text)) {
				seen[kind] = true
			}
		}
		if len(seen) != kinds {
			t.Errorf("%s: %d kinds, want %d: %v", pattern, len(seen), kinds, seen)
		}
	}
}

// get reads an object of the release's namespace.
func (c *cluster) get(kind, name string) fields {
	c.t.Helper()
	status, text := c.call(http.MethodGet, strings.Replace(chartPaths[kind], "NAMESPACE", "llm", 1)+"/"+name, "application/json", nil)
	var o fields
	if err := json.Unmarshal(text, &o); err != nil || status != http.StatusOK {
		c.t.Fatalf("%s %s: status %d, %v\n%s", kind, name, status, err, text)
	}
	return o
}

// template returns the pod template of a Deployment.
func template(deployment fields) fields {
	return deployment["spec"].(fields)["template"].(fields)
}

func checksum(deployment fields) any {
	return template(deployment)["metadata"].(fields)["annotations"].(fields)["checksum/config"]
}

func grace(deployment fields) any {
	return template(deployment)["spec"].(fields)["terminationGracePeriodSeconds"]
}
