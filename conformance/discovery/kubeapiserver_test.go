//go:build kubernetes

package discovery

import (
	"bytes"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// engineHost is the address of the pods' engines: one of the network namespace
// that conformance/kubernetes/run.sh makes, because a real API server accepts
// no loopback address in an EndpointSlice.
const engineHost = "10.77.0.1"

// secondHost is the address of further pods.
const secondHost = "10.77.0.2"

// realServer is kube-apiserver, from PATH, over a real etcd.
type realServer struct {
	t      *testing.T
	listen string
	args   []string
	log    string
	cmd    *exec.Cmd
	c      *cluster
}

func newAPIServer(t *testing.T, c *cluster) apiServer {
	t.Helper()
	dir := t.TempDir()
	s := &realServer{t: t, c: c, listen: testbed.FreeAddr(t), log: filepath.Join(dir, "log")}
	tokens := filepath.Join(dir, "tokens.csv")
	if err := os.WriteFile(tokens, []byte(adminToken+",admin,1,system:masters\n"+readerToken+",pdproxy,2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(s.listen)
	if err != nil {
		t.Fatal(err)
	}
	s.args = []string{
		"--etcd-servers=" + startStore(t).URL(), "--bind-address=0.0.0.0", "--secure-port=" + port,
		"--tls-cert-file=" + c.certs.cert, "--tls-private-key-file=" + c.certs.key, "--cert-dir=" + dir,
		"--service-account-issuer=https://pdproxy.test", "--service-account-key-file=" + c.certs.key, "--service-account-signing-key-file=" + c.certs.key,
		"--token-auth-file=" + tokens, "--authorization-mode=RBAC", "--service-cluster-ip-range=10.88.0.0/24",
		"--disable-admission-plugins=ServiceAccount", "--advertise-address=" + engineHost,
	}
	t.Cleanup(func() {
		s.kill()
		if text, err := os.ReadFile(s.log); t.Failed() {
			t.Logf("kube-apiserver: %v ...%s", err, text[max(0, len(text)-4000):])
		}
	})
	s.start()
	s.prepare()
	return s
}

// prepare makes the namespace, and gives the proxy the permissions that
// docs/howto/discovery.md lists.
func (s *realServer) prepare() {
	s.t.Helper()
	do := func(path string, object fields) {
		s.t.Helper()
		s.c.server = s
		s.c.do(http.MethodPost, path, object)
	}
	do("/api/v1/namespaces", fields{"apiVersion": "v1", "kind": "Namespace", "metadata": fields{"name": "llm"}})
	do("/apis/rbac.authorization.k8s.io/v1/namespaces/llm/roles", fields{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": fields{"name": "pdproxy"},
		"rules": []fields{
			{"apiGroups": []string{"discovery.k8s.io"}, "resources": []string{"endpointslices"}, "verbs": []string{"list", "watch"}},
			{"apiGroups": []string{""}, "resources": []string{"pods"}, "verbs": []string{"list", "watch"}},
			{"apiGroups": []string{"inference.networking.k8s.io"}, "resources": []string{"inferencepools"}, "verbs": []string{"list", "watch"}},
			{"apiGroups": []string{"coordination.k8s.io"}, "resources": []string{"leases"}, "verbs": []string{"get", "list", "watch", "create", "patch"}},
			{"apiGroups": []string{"llm-d.ai", "inference.networking.x-k8s.io"}, "resources": []string{"inferenceobjectives", "inferencemodelrewrites"}, "verbs": []string{"list", "watch"}},
			{"apiGroups": []string{"llm-d.ai", "inference.networking.x-k8s.io"}, "resources": []string{"inferenceobjectives/status", "inferencemodelrewrites/status"}, "verbs": []string{"patch"}},
			{"apiGroups": []string{"inference.networking.k8s.io"}, "resources": []string{"inferencepools/status"}, "verbs": []string{"patch"}},
			{"apiGroups": []string{""}, "resources": []string{"services"}, "verbs": []string{"get"}},
		},
	})
	do("/apis/rbac.authorization.k8s.io/v1/namespaces/llm/rolebindings", fields{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": fields{"name": "pdproxy"},
		"roleRef":  fields{"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "pdproxy"},
		"subjects": []fields{{"kind": "User", "name": "pdproxy", "apiGroup": "rbac.authorization.k8s.io"}},
	})
}

// definePools makes the server serve InferencePools, with the definition of the Gateway API
// Inference Extension.
func (s *realServer) definePools() {
	s.t.Helper()
	s.define(os.Getenv("PDPROXY_POOL_CRD"), poolsPath, func(text []byte) []byte { return text })
}

// defineObjects makes the server serve the objects of a pool, with the definitions of the Gateway API
// Inference Extension. llm-d has moved them to another API group and has not changed their schemas.
func (s *realServer) defineObjects() {
	s.t.Helper()
	for resource, path := range map[string]string{"inferenceobjectives": objectivesPath, "inferencemodelrewrites": rewritesPath} {
		const group = "inference.networking.x-k8s.io"
		s.define(filepath.Join(filepath.Dir(os.Getenv("PDPROXY_POOL_CRD")), group+"_"+resource+".yaml"), path, func(text []byte) []byte {
			return bytes.ReplaceAll(text, []byte(group), []byte("llm-d.ai"))
		})
	}
}

// define makes the server serve the resource of a definition at path.
func (s *realServer) define(file, path string, edit func([]byte) []byte) {
	s.t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		s.t.Fatal(err, ": run conformance/kubernetes/run.sh")
	}
	text = edit(text)
	if status, answer := s.c.call(http.MethodPost, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "application/yaml", text); status != http.StatusCreated {
		s.t.Fatalf("status %d\n%s", status, answer)
	}
	testbed.Eventually(s.t, path+" is served", func() bool {
		status, _ := s.c.call(http.MethodGet, path, "application/json", nil)
		return status == http.StatusOK
	})
}

func (s *realServer) addr() string { return s.listen }

// start runs the server and waits until it is ready.
func (s *realServer) start() {
	s.t.Helper()
	log, err := os.OpenFile(s.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	defer log.Close()
	s.cmd = exec.Command("kube-apiserver", s.args...)
	s.cmd.Stderr = log
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	testbed.Eventually(s.t, "the API server is ready", func() bool {
		req, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, "https://"+s.listen+"/readyz", nil)
		if err != nil {
			return false
		}
		req.Header.Set("Authorization", "Bearer "+adminToken)
		resp, err := s.c.client.Do(req)
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
}

// kill ends the server as kill -9 does. It may be called twice.
func (s *realServer) kill() {
	if s.cmd.ProcessState != nil {
		return
	}
	if err := s.cmd.Process.Kill(); err != nil {
		s.t.Error(err)
	}
	_ = s.cmd.Wait() // killed, it says
}
