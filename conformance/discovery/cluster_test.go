package discovery

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// The tokens that the API server knows: one of an administrator, and one of the
// proxy, which has the rights of docs/howto/discovery.md in the namespace llm.
const (
	adminToken  = "sesame"
	readerToken = "reader"
)

// nodeHost is the address of the API server and of the node for pods that are processes.
const nodeHost = "10.77.1.1"

const (
	slicesPath     = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
	poolsPath      = "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools"
	podsPath       = "/api/v1/namespaces/llm/pods"
	servicesPath   = "/api/v1/namespaces/llm/services"
	objectivesPath = "/apis/llm-d.ai/v1alpha2/namespaces/llm/inferenceobjectives"
	rewritesPath   = "/apis/llm-d.ai/v1alpha2/namespaces/llm/inferencemodelrewrites"
	leasesPath     = "/apis/coordination.k8s.io/v1/namespaces/llm/leases"
)

// apiServer is an API server: the simulated one, or with the build tag
// kubernetes a real one.
type apiServer interface {
	addr() string // host:port, the same after a restart
	start()
	kill()
	definePools()   // serves InferencePools
	defineObjects() // serves InferenceObjectives and InferenceModelRewrites
}

// cluster is an API server, with the content of a Service of engines.
type cluster struct {
	t      *testing.T
	server apiServer
	wire   *testbed.Wire
	certs  *certificates
	token  string // file of the reader's token
	client *http.Client
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{t: t, certs: newCertificates(t), token: filepath.Join(t.TempDir(), "token")}
	c.tell(readerToken)
	pem, err := os.ReadFile(c.certs.ca)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	c.client = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true}, Timeout: 30 * time.Second}
	c.server = newAPIServer(t, c)
	c.wire = testbed.NewWire(t, c.server.addr())
	return c
}

// tell writes the token that the proxy uses.
func (c *cluster) tell(token string) {
	c.t.Helper()
	if err := os.WriteFile(c.token, []byte(token+"\n"), 0o600); err != nil {
		c.t.Fatal(err)
	}
}

// do changes an object as an administrator and returns the object's uid.
func (c *cluster) do(method, path string, object any) string {
	c.t.Helper()
	body, err := json.Marshal(object)
	if err != nil {
		c.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(c.t.Context(), method, "https://"+c.server.addr()+path, bytes.NewReader(body))
	if err != nil {
		c.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+adminToken)
	req.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		req.Header.Set("Content-Type", "application/merge-patch+json")
	}
	resp, err := c.client.Do(req)
	if err != nil {
		c.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode/100 != 2 {
		c.t.Fatalf("%s %s: status %d %v\n%s", method, path, resp.StatusCode, err, text)
	}
	var o struct{ Metadata struct{ UID string } }
	if err := json.Unmarshal(text, &o); err != nil {
		c.t.Fatal(err)
	}
	return o.Metadata.UID
}

// fields is a JSON object.
type fields = map[string]any

// pod is an engine in a pod, behind the Service vllm.
type pod struct {
	c               *cluster
	name, uid, host string
}

// run starts an engine in a pod.
func (c *cluster) run(name, role string, token time.Duration) *pod {
	c.t.Helper()
	return c.pod(name, role, startEngineAt(c.t, engineHost, "vllm-nixl", role, token).Addr())
}

// pod makes a pod with llm-d's labels for the engine at an address, and an
// EndpointSlice in which the pod is ready.
func (c *cluster) pod(name, role, address string) *pod {
	c.t.Helper()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		c.t.Fatal(err)
	}
	number, err := strconv.Atoi(port)
	if err != nil {
		c.t.Fatal(err)
	}
	p := &pod{c: c, name: name, host: host}
	p.uid = c.do("POST", podsPath, fields{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": fields{"name": name, "namespace": "llm", "labels": fields{
			"llm-d.ai/inference-serving": "true", "llm-d.ai/role": role, "llm-d.ai/engine-type": "vllm"}},
		"spec": fields{"containers": []fields{{"name": "vllm", "image": "vllm"}}},
	})
	c.do("POST", slicesPath, fields{
		"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
		"metadata":    fields{"name": "vllm-" + name, "namespace": "llm", "labels": fields{"kubernetes.io/service-name": "vllm"}},
		"addressType": "IPv4",
		"ports":       []fields{{"name": "http", "port": number, "protocol": "TCP"}},
		"endpoints":   p.endpoints(true, true, false),
	})
	return p
}

// poolPod makes a ready pod of the application vllm, with an engine at an address.
func (c *cluster) poolPod(name, role, host string, port int) *pod {
	c.t.Helper()
	startEngineOn(c.t, net.JoinHostPort(host, strconv.Itoa(port)), "vllm-nixl", role, 0)
	p := &pod{c: c, name: name, host: host}
	p.uid = c.do("POST", podsPath, fields{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": fields{"name": name, "namespace": "llm", "labels": fields{"app": "vllm", "llm-d.ai/role": role}},
		"spec":     fields{"containers": []fields{{"name": "vllm", "image": "vllm"}}},
	})
	p.ready("True")
	return p
}

// ready sets the pod's address and its condition Ready, as the kubelet does.
func (p *pod) ready(status string) {
	p.c.t.Helper()
	p.c.do("PATCH", podsPath+"/"+p.name+"/status", fields{"status": fields{
		"podIP": p.host, "podIPs": []fields{{"ip": p.host}}, "phase": "Running",
		"conditions": []fields{{"type": "Ready", "status": status}},
	}})
}

func (p *pod) endpoints(ready, serving, terminating bool) []fields {
	return []fields{{
		"addresses": []string{p.host}, "conditions": fields{"ready": ready, "serving": serving, "terminating": terminating},
		"targetRef": fields{"kind": "Pod", "namespace": "llm", "name": p.name, "uid": p.uid},
	}}
}

// becomes changes the endpoint's conditions.
func (p *pod) becomes(ready, serving, terminating bool) {
	p.c.t.Helper()
	p.c.do("PATCH", slicesPath+"/vllm-"+p.name, fields{"endpoints": p.endpoints(ready, serving, terminating)})
}

// plays changes the role in the pod's label.
func (p *pod) plays(role string) {
	p.c.t.Helper()
	p.c.do("PATCH", podsPath+"/"+p.name, fields{"metadata": fields{"labels": fields{"llm-d.ai/role": role}}})
}

// leaves deletes the pod's EndpointSlice.
func (p *pod) leaves() {
	p.c.t.Helper()
	p.c.do("DELETE", slicesPath+"/vllm-"+p.name, fields{})
}

// configure makes a proxy discover the Service's engines.
func (c *cluster) configure(d *config.Discovery) {
	e := config.DefaultEngine()
	e.Name, e.URL, e.Role, e.Connector = "vllm", "http://vllm", config.RoleBoth, config.ConnectorVLLMNixl
	d.Kubernetes = config.DiscoveryKubernetes{
		API: "https://" + c.wire.Addr(), TokenFile: c.token, CA: c.certs.ca, Namespace: "llm",
		Pods: "llm-d.ai/inference-serving=true", Engines: []config.Engine{e},
	}
	d.Allow = []string{engineHost}
}

// node starts a proxy that discovers them.
func (c *cluster) node() *node {
	c.t.Helper()
	return startNode(c.t, c.configure)
}

// podName returns the name of the engine in a pod.
func podName(name string) string { return fmt.Sprintf("vllm@%s", name) }
