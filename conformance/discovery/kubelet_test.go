//go:build kubernetes

package discovery

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/kubelet"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// machine is the only node of a cluster. It takes the place of the scheduler, the kubelet and the
// network plugin: each pod has a network namespace, an address and the processes of its
// containers, and its object has the status of these. Controllers are those of Kubernetes.
type machine struct {
	c    *cluster
	node kubelet.Node

	mu   sync.Mutex
	pods map[string]*hosted // by uid
	last int                // number of the last address
}

// hosted is a pod of the machine.
type hosted struct {
	ip      string
	pause   *exec.Cmd // holds the network namespace
	running *kubelet.Running
	ready   string // the last reported condition
	stopped bool
}

// apiPod is the object of a pod.
type apiPod struct {
	Metadata struct{ Name, Namespace, UID, DeletionTimestamp string }
	Spec     struct{ NodeName string }
}

// newMachine starts the controllers and the node. The program takes the place of all images.
func newMachine(c *cluster, program, kubeconfig string) *machine {
	c.t.Helper()
	_, port, err := net.SplitHostPort(c.server.addr())
	if err != nil {
		c.t.Fatal(err)
	}
	m := &machine{c: c, pods: map[string]*hosted{}, last: 1}
	m.node = kubelet.Node{Program: program, Content: m.content, Account: m.account, System: true, Env: []string{"KUBERNETES_SERVICE_HOST=" + nodeHost, "KUBERNETES_SERVICE_PORT=" + port}}
	run(c.t, "ip", "link", "add", "pods", "type", "bridge")
	c.t.Cleanup(func() { run(c.t, "ip", "link", "delete", "pods") })
	run(c.t, "ip", "address", "add", nodeHost+"/24", "dev", "pods")
	run(c.t, "ip", "link", "set", "pods", "up")
	m.serveLogs()
	log, err := os.Create(filepath.Join(c.t.TempDir(), "controllers"))
	if err != nil {
		c.t.Fatal(err)
	}
	controllers := exec.Command("kube-controller-manager", "--kubeconfig="+kubeconfig, "--leader-elect=false", "--secure-port=0",
		"--controllers=deployment-controller,replicaset-controller,endpointslice-controller,namespace-controller,garbage-collector-controller,disruption-controller,serviceaccount-controller")
	controllers.Stdout, controllers.Stderr = log, log
	if err := controllers.Start(); err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { m.work(ctx) })
	c.t.Cleanup(func() {
		cancel()
		wg.Wait()
		_ = controllers.Process.Kill()
		_ = controllers.Wait() // killed, it says
		if text, err := os.ReadFile(log.Name()); c.t.Failed() {
			c.t.Logf("controllers: %v ...%s", err, text[max(0, len(text)-2000):])
		}
	})
	return m
}

// run runs a program of the system.
func run(t testing.TB, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Errorf("%s %q: %v\n%s", name, args, err, out)
	}
}

// serveLogs makes the object of the node, and serves the logs of its pods to the API server.
func (m *machine) serveLogs() {
	m.c.t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(nodeHost, "0"))
	if err != nil {
		m.c.t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /containerLogs/{namespace}/{pod}/{container}", func(w http.ResponseWriter, r *http.Request) {
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, h := range m.pods {
			if h.running != nil && h.running.Pod.Metadata.Name == r.PathValue("pod") {
				fmt.Fprint(w, h.running.Log(r.PathValue("container")))
			}
		}
	})
	s := &http.Server{Handler: mux}
	go func() { _ = s.ServeTLS(l, m.c.certs.cert, m.c.certs.key) }() // ends with Close
	m.c.t.Cleanup(func() { s.Close() })
	m.c.do(http.MethodPost, "/api/v1/nodes", fields{"apiVersion": "v1", "kind": "Node", "metadata": fields{"name": "node"}})
	_, port, _ := net.SplitHostPort(l.Addr().String())
	number, _ := strconv.Atoi(port)
	m.c.do(http.MethodPatch, "/api/v1/nodes/node/status", fields{"status": fields{
		"addresses": []fields{{"type": "InternalIP", "address": nodeHost}}, "daemonEndpoints": fields{"kubeletEndpoint": fields{"Port": number}},
	}})
}

// work moves all pods to the state that their objects ask for.
func (m *machine) work(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for ctx.Err() == nil {
		status, text, err := m.c.try(http.MethodGet, "/api/v1/pods", "application/json", nil)
		var list struct{ Items []json.RawMessage }
		if err == nil && status == http.StatusOK {
			err = json.Unmarshal(text, &list)
		}
		if err != nil {
			m.c.t.Error("pods: ", err)
			return
		}
		for _, object := range list.Items {
			var p apiPod
			if err := json.Unmarshal(object, &p); err != nil {
				m.c.t.Error(err)
				continue
			}
			m.mu.Lock()
			h := m.pods[p.Metadata.UID]
			isNew := h == nil && p.Metadata.DeletionTimestamp == ""
			if isNew {
				m.last++
				h = &hosted{ip: fmt.Sprint("10.77.1.", m.last)}
				m.pods[p.Metadata.UID] = h
			}
			stops := h != nil && !isNew && p.Metadata.DeletionTimestamp != "" && !h.stopped
			if stops {
				h.stopped = true
			}
			m.mu.Unlock()
			switch {
			case isNew:
				wg.Go(func() { m.report(p, m.start(p, object, h)) })
			case stops:
				wg.Go(func() { m.report(p, m.stop(p, h)) })
			case h != nil:
				m.report(p, m.observe(p, h))
			}
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

func (m *machine) report(p apiPod, err error) {
	if err != nil {
		m.c.t.Logf("pod %s: %v", p.Metadata.Name, err)
	}
}

func (p apiPod) path(rest string) string {
	return "/api/v1/namespaces/" + p.Metadata.Namespace + "/pods/" + p.Metadata.Name + rest
}

// start binds a pod to the node and starts its network and its containers.
func (m *machine) start(p apiPod, object json.RawMessage, h *hosted) error {
	var pod kubelet.Pod
	if err := json.Unmarshal(object, &pod); err != nil {
		return err
	}
	if err := m.send(http.MethodPost, p.path("/binding"), fields{
		"apiVersion": "v1", "kind": "Binding", "metadata": fields{"name": p.Metadata.Name}, "target": fields{"apiVersion": "v1", "kind": "Node", "name": "node"},
	}); err != nil {
		return err
	}
	pause, network, err := m.network(h.ip)
	if err != nil {
		m.c.t.Error(err)
		return err
	}
	running, err := m.node.Run(m.c.t, pod, h.ip, network)
	m.mu.Lock()
	h.pause, h.running = pause, running
	m.mu.Unlock()
	return err
}

// network makes the network namespace of a pod. It ends with the process that it returns.
func (m *machine) network(ip string) (*exec.Cmd, string, error) {
	pause := exec.Command("unshare", "--net", "sleep", "infinity")
	if err := pause.Start(); err != nil {
		return nil, "", err
	}
	m.c.t.Cleanup(func() {
		_ = pause.Process.Kill() // it may have ended with its pod
		_ = pause.Wait()
	})
	path := fmt.Sprintf("/proc/%d/ns/net", pause.Process.Pid)
	own, err := os.Readlink("/proc/thread-self/ns/net")
	for err == nil {
		var now string
		if now, err = os.Readlink(path); now != own {
			break
		}
		time.Sleep(time.Millisecond)
	}
	number := ip[strings.LastIndexByte(ip, '.')+1:]
	for _, command := range []string{
		"ip link add pod" + number + " type veth peer name eth0 netns " + strconv.Itoa(pause.Process.Pid),
		"ip link set pod" + number + " master pods up",
		"nsenter --net=" + path + " ip link set lo up",
		"nsenter --net=" + path + " ip address add " + ip + "/24 dev eth0",
		"nsenter --net=" + path + " ip link set eth0 up",
	} {
		words := strings.Fields(command)
		if out, runErr := exec.Command(words[0], words[1:]...).CombinedOutput(); runErr != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w\n%s", command, runErr, out))
		}
	}
	return pause, path, err
}

// observe reports the status of a pod if it has changed.
func (m *machine) observe(p apiPod, h *hosted) error {
	m.mu.Lock()
	running := h.running
	m.mu.Unlock()
	if running == nil {
		return nil
	}
	ready, phase := "False", "Pending"
	if running.Started() {
		phase = "Running"
		if running.Ready() {
			ready = "True"
		}
	}
	if h.ready == ready+phase {
		return nil
	}
	var containers []fields
	for _, c := range running.Pod.Spec.Containers {
		state := fields{"waiting": fields{"reason": "PodInitializing"}}
		if phase == "Running" {
			state = fields{"running": fields{"startedAt": time.Now().UTC().Format(time.RFC3339)}}
		}
		containers = append(containers, fields{"name": c.Name, "image": c.Image, "imageID": "", "restartCount": 0, "ready": ready == "True", "state": state})
	}
	err := m.send(http.MethodPatch, p.path("/status"), fields{"status": fields{
		"phase": phase, "podIP": h.ip, "podIPs": []fields{{"ip": h.ip}}, "containerStatuses": containers,
		"conditions": []fields{{"type": "Ready", "status": ready}, {"type": "ContainersReady", "status": ready}},
	}})
	if err == nil {
		h.ready = ready + phase
	}
	return err
}

// stop ends the containers of a pod, and removes its object.
func (m *machine) stop(p apiPod, h *hosted) error {
	testbed.Eventually(m.c.t, "the pod has started", func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return h.running != nil
	})
	h.running.Stop()
	_ = h.pause.Process.Kill()
	return m.send(http.MethodDelete, p.path(""), fields{"gracePeriodSeconds": 0})
}

// send changes an object.
func (m *machine) send(method, path string, object fields) error {
	body, err := json.Marshal(object)
	if err != nil {
		return err
	}
	contentType := "application/json"
	if method == http.MethodPatch {
		contentType = "application/merge-patch+json"
	}
	status, answer, err := m.c.try(method, path, contentType, body)
	if err == nil && status/100 != 2 {
		err = fmt.Errorf("%s %s: status %d\n%s", method, path, status, answer)
	}
	return err
}

// content returns the data of a ConfigMap or Secret.
func (m *machine) content(kind, namespace, name string) (map[string][]byte, error) {
	path := strings.Replace(chartPaths[kind], "NAMESPACE", namespace, 1) + "/" + name
	status, text, err := m.c.try(http.MethodGet, path, "application/json", nil)
	var o struct{ Data map[string]string }
	if err = errors.Join(err, json.Unmarshal(text, &o)); err != nil || status != http.StatusOK {
		return nil, fmt.Errorf("%s: status %d %w", path, status, err)
	}
	files := map[string][]byte{}
	for key, value := range o.Data {
		files[key] = []byte(value)
		if kind == "Secret" {
			if files[key], err = base64.StdEncoding.DecodeString(value); err != nil {
				return nil, err
			}
		}
	}
	return files, nil
}

// account returns the files of a ServiceAccount, with a token that has its rights.
func (m *machine) account(namespace, name string) (map[string][]byte, error) {
	if name == "" {
		name = "default"
	}
	ca, err := os.ReadFile(m.c.certs.ca)
	if err != nil {
		return nil, err
	}
	path := "/api/v1/namespaces/" + namespace + "/serviceaccounts/" + name + "/token"
	body := []byte(`{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest","spec":{"expirationSeconds":3600}}`)
	status, text, err := m.c.try(http.MethodPost, path, "application/json", body)
	var o struct{ Status struct{ Token string } }
	if err = errors.Join(err, json.Unmarshal(text, &o)); err != nil || status != http.StatusCreated {
		return nil, fmt.Errorf("%s: status %d %w", path, status, err)
	}
	return map[string][]byte{"token": []byte(o.Status.Token), "ca.crt": ca, "namespace": []byte(namespace)}, nil
}

// addresses returns the addresses of the ready pods whose names have a prefix.
func (m *machine) addresses(prefix string) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var list []string
	for _, h := range m.pods {
		if h.running != nil && !h.stopped && h.ready == "TrueRunning" && strings.HasPrefix(h.running.Pod.Metadata.Name, prefix) {
			list = append(list, h.ip)
		}
	}
	return slices.Sorted(slices.Values(list))
}
