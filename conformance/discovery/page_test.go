//go:build kubernetes

package discovery

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// realKubectl is the variable with the path of kubectl for the commands of the page.
const realKubectl = "PDPROXY_KUBECTL"

// The test program is kubectl for the page, except for two commands: port-forward, for which kubectl needs
// the streams of a kubelet, and apply of a URL, because the test has no network.
func init() {
	if filepath.Base(os.Args[0]) == "kubectl" {
		fmt.Fprintln(os.Stderr, "kubectl:", kubectl(os.Args[1:]))
		os.Exit(1)
	}
}

// kubectl runs a command of kubectl. It returns only an error.
func kubectl(args []string) error {
	real := os.Getenv(realKubectl)
	if len(args) == 3 && args[0] == "port-forward" {
		return forward(real, args[1], args[2])
	}
	run := []string{"kubectl"}
	for _, arg := range args {
		switch {
		case strings.HasPrefix(arg, "https://github.com/kubernetes-sigs/gateway-api/releases/"):
			arg = os.Getenv("PDPROXY_GATEWAY_CRDS")
		case strings.HasPrefix(arg, "https://github.com/kubernetes-sigs/gateway-api-inference-extension/releases/"):
			arg = os.Getenv("PDPROXY_POOL_CRD")
		}
		run = append(run, arg)
	}
	return syscall.Exec(real, run, os.Environ())
}

// forward takes connections to a local port to a pod, as kubectl port-forward does.
func forward(kubectl, object, ports string) error {
	local, remote, ok := strings.Cut(ports, ":")
	kind, name, named := strings.Cut(object, "/")
	if !ok || !named {
		return fmt.Errorf("port-forward %s %s: want KIND/NAME LOCAL:REMOTE", object, ports)
	}
	ask := func(args ...string) (string, error) {
		out, err := exec.Command(kubectl, args...).Output()
		return strings.TrimSpace(string(out)), err
	}
	var ip string
	var err error
	switch kind {
	case "service":
		slice := []string{"get", "endpointslices", "--selector=kubernetes.io/service-name=" + name, "--output"}
		if ip, err = ask(append(slice, "jsonpath={.items[0].endpoints[0].addresses[0]}")...); err == nil {
			remote, err = ask(append(slice, "jsonpath={.items[0].ports[0].port}")...)
		}
	case "deployment":
		ip, err = ask("get", "pods", "--selector=app.kubernetes.io/instance="+name, "--output=jsonpath={.items[0].status.podIP}")
	default:
		return fmt.Errorf("port-forward of a %s", kind)
	}
	if err != nil || ip == "" {
		return fmt.Errorf("%s has no pod: %v", object, err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:"+local)
	if err != nil {
		return err
	}
	for {
		near, err := l.Accept()
		if err != nil {
			return err
		}
		far, err := net.Dial("tcp", net.JoinHostPort(ip, remote))
		if err != nil {
			return err
		}
		for _, pair := range [][2]net.Conn{{near, far}, {far, near}} {
			go func() { // ends with the connection
				_, _ = io.Copy(pair[0], pair[1]) // its end is the client's or the pod's
				pair[0].Close()
			}()
		}
	}
}

// page is the shell blocks of docs/howto/kubernetes.md.
type page struct {
	t    *testing.T
	dir  string
	env  []string
	text string
}

var clusterBlock = regexp.MustCompile("(?ms)^(?:<!-- not run: ([^\n]+) -->\n)?```sh\n(.*?)^```$")

// script returns the blocks from a text of the page to another one. The API server only validates the
// blocks that need GPUs.
func (p *page) script(from, to string) string {
	p.t.Helper()
	start, end := strings.Index(p.text, from), strings.Index(p.text, to)
	if start < 0 || end < start {
		p.t.Fatalf("the page has no %q before %q", from, to)
	}
	var script strings.Builder
	for _, m := range clusterBlock.FindAllStringSubmatch(p.text[start:end], -1) {
		block := m[2]
		switch m[1] {
		case "", "needs a cluster":
		case "needs GPUs":
			block = regexp.MustCompile(`(?m)^kubectl rollout .*\n`).ReplaceAllString(block, "")
			block = strings.ReplaceAll(block, "kubectl apply", "kubectl apply --dry-run=server --validate=strict")
		default:
			p.t.Fatalf("a block %s", m[1])
		}
		script.WriteString(block)
	}
	return script.String()
}

// run runs a script in one shell. Each command must succeed.
func (p *page) run(script string) string {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), 5*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, "bash", "-euxo", "pipefail", "-c", script)
	c.Dir, c.Env, c.WaitDelay = p.dir, p.env, 5*time.Second
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	kill := func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGKILL) } // kubectl port-forward too
	c.Cancel = kill
	var out testbed.Log
	c.Stdout, c.Stderr = &out, &out
	if err := c.Start(); err != nil {
		p.t.Fatal(err)
	}
	state, err := c.Process.Wait() // not c.Wait, which also waits for kubectl port-forward
	_ = kill()
	_ = c.Wait() // the process has been waited for
	if err != nil || !state.Success() {
		p.t.Fatalf("%v %v\n%s", state, err, out.String())
	}
	return out.String()
}

// TestKubernetesPage runs the commands of docs/howto/kubernetes.md, from an empty cluster to the first
// token, upgrade and removal, with real kubectl and Helm, a real API server and real controllers.
// The pods are processes of this machine.
func TestKubernetesPage(t *testing.T) {
	c := newCluster(t)
	c.prepareChart("gateway.networking.k8s.io", "inference.networking.k8s.io")
	c.do(http.MethodDelete, "/api/v1/namespaces/llm", fields{}) // the page makes it
	p := newPage(c)
	m := newMachine(c, os.Getenv("PDPROXY_PROGRAM"), filepath.Join(p.dir, "kubeconfig"))
	c.isEmpty()

	out := p.run(p.script("# Run on Kubernetes", "## Clients outside"))
	if n := strings.Count(out, "data: {"); n < 16 || !strings.Contains(out, "data: [DONE]") {
		t.Errorf("%d events\n%s", n, out)
	}
	for _, want := range []string{`"name":"prefill@prefill-`, `"name":"decode@decode-`, `"flow":"prefill_first"`, `"phase":"decode"`} {
		if !strings.Contains(strings.ReplaceAll(out, `": "`, `":"`), want) {
			t.Errorf("no %s in\n%s", want, out)
		}
	}
	p.run("cd pdproxy\n" + p.script("## Clients outside", "## Remove"))
	testbed.Eventually(t, "three proxies and two decode engines", func() bool {
		return len(m.addresses("pdproxy-")) == 3 && len(m.addresses("decode-")) == 2 // the picker has no engine at port 8200
	})
	if text := c.get("ConfigMap", "pdproxy")["data"].(fields)["config.toml"].(string); !strings.Contains(text, "kv_aware") {
		t.Errorf("the upgraded configuration is\n%s", text)
	}
	serves(t, m)

	// An upgrade to an invalid configuration changes no pod that serves.
	p.run("cd pdproxy\nhelm upgrade pdproxy deploy/helm/pdproxy --reset-then-reuse-values --set-string 'config=server.lissen = 1'")
	testbed.Eventually(t, "the log has the reason", func() bool {
		return strings.Contains(p.run("kubectl logs --selector app.kubernetes.io/instance=pdproxy --container check"), "server.lissen")
	})
	serves(t, m)
	p.run("helm rollback pdproxy --wait")
	serves(t, m)
	p.run("cd pdproxy\n" + p.script("## Remove", "## Without Helm"))
	c.isEmpty()

	p.run("cd pdproxy\nkubectl create namespace llm\n" + p.script("## 1. Start", "## 2. Write") + p.script("## Without Helm", "## Your own image"))
	if len(m.addresses("pdproxy-")) != 1 {
		t.Error("proxy.yaml starts no proxy")
	}
	serves(t, m)
}

// isEmpty waits until the namespace of the page is gone.
func (c *cluster) isEmpty() {
	c.t.Helper()
	testbed.Eventually(c.t, "the cluster is empty", func() bool {
		status, _ := c.call(http.MethodGet, "/api/v1/namespaces/llm", "application/json", nil)
		return status == http.StatusNotFound
	})
}

// newPage returns the page, with kubectl and helm for the cluster.
func newPage(c *cluster) *page {
	c.t.Helper()
	text, err := os.ReadFile("../../docs/howto/kubernetes.md")
	if err != nil {
		c.t.Fatal(err)
	}
	repository, err := filepath.Abs("../..")
	if err != nil {
		c.t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		c.t.Fatal(err)
	}
	real, err := exec.LookPath("kubectl")
	if err != nil {
		c.t.Fatal(err)
	}
	p := &page{t: c.t, dir: c.t.TempDir(), text: string(text)}
	bin := filepath.Join(p.dir, "bin")
	for _, err := range []error{
		os.Mkdir(bin, 0o755),
		os.Symlink(self, filepath.Join(bin, "kubectl")),
		// The test has no network for a clone, and no page may write into the repository.
		os.WriteFile(filepath.Join(bin, "git"), []byte("#!/bin/sh\nset -e\ntest \"$1\" = clone\nmkdir pdproxy\nln -s "+repository+"/deploy pdproxy/deploy\n"), 0o755),
		os.WriteFile(filepath.Join(p.dir, "kubeconfig"), fmt.Appendf(nil, `{"apiVersion": "v1", "kind": "Config", "current-context": "test",
			"clusters": [{"name": "test", "cluster": {"server": "https://%s", "certificate-authority": %q}}],
			"users": [{"name": "test", "user": {"token": %q}}],
			"contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}]}`, c.server.addr(), c.certs.ca, adminToken), 0o600),
	} {
		if err != nil {
			c.t.Fatal(err)
		}
	}
	p.env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "HOME="+p.dir, "KUBECONFIG="+filepath.Join(p.dir, "kubeconfig"), realKubectl+"="+real)
	return p
}

// serves checks that each ready proxy serves through two legs.
func serves(t *testing.T, m *machine) {
	t.Helper()
	for _, ip := range m.addresses("pdproxy-") {
		body := []byte(`{"model": "sim", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}`)
		resp, err := http.Post("http://"+ip+":8080/v1/chat/completions", "application/json", bytes.NewReader(body))
		if err != nil {
			t.Error(err)
			continue
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Errorf("%s: status %d\n%s", ip, resp.StatusCode, text)
		}
	}
}
