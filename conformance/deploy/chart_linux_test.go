package deploy

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pdproxy/pdproxy/internal/dev/kubelet"
)

// inNetwork is the variable of a test that runs in a network of its own.
const inNetwork = "PDPROXY_DEPLOY_NETWORK"

// network runs the test in a network of its own, where the loopback device has further addresses.
// It reports whether the caller is in this network.
func network(t *testing.T, addresses ...string) bool {
	t.Helper()
	if os.Getenv(inNetwork) != "" {
		if err := loopback(addresses...); err != nil {
			t.Fatal(err)
		}
		return true
	}
	if _, err := helmProgram(); err != nil { // inside there is no network for the modules
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), inNetwork+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if uid := os.Getuid(); uid != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("in a network of its own: %v\n%s", err, out)
	}
	return false
}

// loopback starts the loopback device, and gives it addresses.
func loopback(addresses ...string) error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	for i, address := range append([]string{"127.0.0.1"}, addresses...) {
		name := "lo"
		if i > 0 {
			name = fmt.Sprint("lo:", i)
		}
		set, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		up, _ := unix.NewIfreq(name)
		up.SetUint16(unix.IFF_UP)
		if err := errors.Join(set.SetInet4Addr(net.ParseIP(address).To4()), unix.IoctlIfreq(s, unix.SIOCSIFADDR, set), unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, up)); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// TestChartServes: the pod of the chart with README's configuration, at the addresses that this
// configuration names, checks the configuration, becomes ready and serves. The ports of Services
// and probes are those at which the proxy listens, and only the probes need no token.
func TestChartServes(t *testing.T) {
	const ip = "10.0.0.9"
	if !network(t, "10.0.0.5", "10.0.0.6", ip) {
		return
	}
	start(t, nil, pdproxy, "sim", "--connector=vllm-nixl", "--role=prefill", "--listen=10.0.0.5:8100")
	start(t, nil, pdproxy, "sim", "--connector=vllm-nixl", "--role=decode", "--listen=10.0.0.6:8200")
	objects := render(t, "--set-file", "config="+write(t, t.TempDir()+"/my.toml", readmeConfig(t), 0o644))
	pod, err := kubelet.Read(at(objects["Deployment pdproxy"], "spec", "template").(map[string]any))
	if err != nil {
		t.Fatal(err)
	}
	node := kubelet.Node{Program: pdproxy, Content: objects.content}
	p, err := node.Run(t, pod, ip, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(p.Log("pdproxy"))
		}
	})
	if got := p.Log("check"); !strings.HasSuffix(got, "ok\n") {
		t.Errorf("the init container says %q", got)
	}
	eventually(t, "the pod is ready", p.Ready)
	proxy := pod.Spec.Containers[0]
	if got := p.Probe(proxy, proxy.LivenessProbe); got != 200 {
		t.Errorf("the liveness probe gets %d", got)
	}
	public, admin := objects.address(t, "pdproxy", "http", proxy, ip), objects.address(t, "pdproxy-admin", "admin", proxy, ip)
	eventually(t, "the engines are ready", func() bool { return status(public+"/health") == 200 })
	if text, _, _ := chat(t, public); text == "" {
		t.Error("the answer has no text")
	}
	if got := status(admin + "/metrics"); got != 401 {
		t.Errorf("without a token, the metrics get %d", got)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, admin+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := objects.content("Secret", "llm", "pdproxy-admin")
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+string(secret["token"]))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 200 {
		t.Errorf("with the token of the Secret, the metrics get %d", resp.StatusCode)
	}
	if got := p.Stop(); got != 0 {
		t.Errorf("the exit status is %d", got)
	}
}

// TestChartRefusedConfiguration: the init container of a pod with an invalid configuration ends with the reason.
func TestChartRefusedConfiguration(t *testing.T) {
	objects := render(t, "--set-string", "config=server.lissen = \"x\"")
	pod, err := kubelet.Read(at(objects["Deployment pdproxy"], "spec", "template").(map[string]any))
	if err != nil {
		t.Fatal(err)
	}
	node := kubelet.Node{Program: pdproxy, Content: objects.content}
	if p, err := node.Run(t, pod, "127.0.0.1", ""); err == nil || !strings.Contains(p.Log("check"), "server.lissen") || p.Log("pdproxy") != "" {
		t.Errorf("%v\n%s%s", err, p.Log("check"), p.Log("pdproxy"))
	}
}

// content returns the data of a ConfigMap or Secret.
func (r rendered) content(kind, _, name string) (map[string][]byte, error) {
	data, ok := at(r[kind+" "+name], "data").(map[string]any)
	if !ok {
		return nil, fmt.Errorf("no %s %s", kind, name)
	}
	files := map[string][]byte{}
	for key, value := range data {
		files[key] = []byte(value.(string))
		if kind == "Secret" {
			var err error
			if files[key], err = base64.StdEncoding.DecodeString(value.(string)); err != nil {
				return nil, err
			}
		}
	}
	return files, nil
}

// address returns the URL of a container behind the port of a Service.
func (r rendered) address(t *testing.T, service, port string, c kubelet.Container, ip string) string {
	t.Helper()
	ports, _ := at(r["Service "+service], "spec", "ports").([]any)
	i := slices.IndexFunc(ports, func(p any) bool { return at(p, "name") == port })
	if i < 0 {
		t.Fatalf("the Service %s has no port %s", service, port)
	}
	target, _ := at(ports[i], "targetPort").(string)
	return fmt.Sprintf("http://%s:%d", ip, c.Port(target))
}
