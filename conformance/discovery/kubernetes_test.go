package discovery

import (
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
)

func TestKubernetes(t *testing.T) {
	c := newCluster(t)
	c.run("p0", "prefill", 0)
	d0 := c.run("d0", "decode", 0)
	n := c.node()
	n.is(podName("p0"), "ready")
	n.is(podName("d0"), "ready")
	if p, d := n.ask(); p != podName("p0") || d != podName("d0") {
		t.Errorf("served by %q and %q", p, d)
	}
	d1 := c.run("d1", "decode", 0)
	n.is(podName("d1"), "ready")
	d0.leaves()
	n.is(podName("d0"), "")
	if _, d := n.ask(); d != podName("d1") {
		t.Errorf("served by %q", d)
	}
	d1.becomes(false, false, false) // its readiness probe fails
	n.is(podName("d1"), "")
	if resp := n.open(8, false); resp.StatusCode != 503 {
		t.Errorf("got status %d without a decode engine", resp.StatusCode)
	}
	d1.becomes(true, true, false)
	n.is(podName("d1"), "ready")
	n.ask()
}

// A terminating pod gets no new requests; its transfers and streams continue.
func TestTerminatingPodDrains(t *testing.T) {
	c := newCluster(t)
	p0, d0 := c.run("p0", "prefill", 0), c.run("d0", "decode", 50*time.Millisecond)
	n := c.node()
	n.is(podName("p0"), "ready")
	n.is(podName("d0"), "ready")
	stream := n.open(120, true) // six seconds
	c.run("p1", "prefill", 0)
	c.run("d1", "decode", 0)
	n.is(podName("p1"), "ready")
	n.is(podName("d1"), "ready")
	p0.becomes(false, true, true)
	d0.becomes(false, true, true)
	n.is(podName("d0"), "draining")
	n.is(podName("p0"), "")
	for range 5 {
		if p, d := n.ask(); p != podName("p1") || d != podName("d1") {
			t.Errorf("served by %q and %q", p, d)
		}
	}
	n.whole(stream, 120)
	n.is(podName("d0"), "")
}

// An engine's role is the present value of the pod's label.
func TestRoleIsChanged(t *testing.T) {
	c := newCluster(t)
	c.run("p0", "prefill", 0)
	c.run("d0", "decode", 0)
	flips := c.run("x", "both", 0)
	flips.plays("decode")
	n := c.node()
	for _, name := range []string{"p0", "d0", "x"} {
		n.is(podName(name), "ready")
	}
	if got := n.role(podName("x")); got != "decode" {
		t.Errorf("the role is %q", got)
	}
	flips.plays("prefill")
	testbed.Eventually(t, "the role is the new one", func() bool { return n.role(podName("x")) == "prefill" && n.states()[podName("x")] == "ready" })
	n.ask()
}

// The ready pods of an InferencePool are engines with the roles of their labels. All of them
// have the port of the pool.
func TestInferencePool(t *testing.T) {
	c := newCluster(t)
	c.server.definePools()
	port := testbed.Ports(t, 1, engineHost, secondHost)
	prefill := c.poolPod("p0", "prefill", engineHost, port)
	c.poolPod("d0", "decode", secondHost, port)
	c.do("POST", poolsPath, fields{
		"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": fields{"name": "vllm", "namespace": "llm"},
		"spec": fields{
			"selector": fields{"matchLabels": fields{"app": "vllm"}}, "targetPorts": []fields{{"number": port}},
			"endpointPickerRef": fields{"name": "picker", "port": fields{"number": 9002}, "failureMode": "FailOpen"},
		},
	})
	n := startNode(t, func(d *config.Discovery) {
		c.configure(d)
		d.Kubernetes.Pools, d.Kubernetes.Engines, d.Kubernetes.Pods = d.Kubernetes.Engines, nil, ""
		d.Allow = []string{engineHost, secondHost}
	})
	n.is(podName("p0"), "ready")
	n.is(podName("d0"), "ready")
	if p, d := n.ask(); p != podName("p0") || d != podName("d0") {
		t.Errorf("served by %q and %q", p, d)
	}
	prefill.ready("False")
	n.is(podName("p0"), "")
	prefill.ready("True")
	n.is(podName("p0"), "ready")
	c.do("PATCH", poolsPath+"/vllm", fields{"spec": fields{"selector": fields{"matchLabels": fields{"app": "other"}}}})
	n.is(podName("p0"), "")
	n.is(podName("d0"), "")
	c.do("PATCH", poolsPath+"/vllm", fields{"spec": fields{"selector": fields{"matchLabels": fields{"app": "vllm"}}}})
	n.is(podName("p0"), "ready")
	n.is(podName("d0"), "ready")
	n.ask()
	c.do("DELETE", poolsPath+"/vllm", fields{})
	n.is(podName("d0"), "")
}

// While the API server is unavailable or unreachable, nothing changes.
// Afterwards the proxy applies all missed changes.
func TestAPIServerAway(t *testing.T) {
	c := newCluster(t)
	c.run("p0", "prefill", 0)
	d0 := c.run("d0", "decode", 0)
	n := c.node()
	n.is(podName("p0"), "ready")
	n.is(podName("d0"), "ready")
	c.server.kill()
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		n.ask()
		if s := n.states(); s[podName("p0")] != "ready" || s[podName("d0")] != "ready" {
			t.Fatalf("engines are %v", s)
		}
	}
	c.server.start()
	testbed.Eventually(t, "it is found again", func() bool { return n.log.contains("discovery of engines works again") })
	c.run("d1", "decode", 0)
	n.is(podName("d1"), "ready")
	c.wire.Cut(true)
	d0.leaves()
	c.run("d2", "decode", 0)
	if s := n.states(); s[podName("d0")] != "ready" || s[podName("d2")] != "" {
		t.Errorf("cut off, engines are %v", s)
	}
	c.wire.Cut(false)
	n.is(podName("d2"), "ready")
	n.is(podName("d0"), "")
	if s := n.states(); s[podName("p0")] != "ready" || s[podName("d1")] != "ready" {
		t.Errorf("engines are %v", s)
	}
	if n.log.contains(`msg="engine is draining" engine=vllm@p0`) || n.log.contains(`msg="engine is draining" engine=vllm@d1`) {
		t.Error("a live engine was dropped")
	}
}

// Without a valid token no engine is found, and the log says so. With a valid
// one from the same file, all are found.
func TestTokenIsReadAgain(t *testing.T) {
	c := newCluster(t)
	c.run("p0", "prefill", 0)
	c.tell("nonsense")
	n := c.node()
	testbed.Eventually(t, "it is said", func() bool { return n.log.contains("status 401") })
	c.tell(readerToken)
	n.is(podName("p0"), "ready")
	if n.log.contains("nonsense") || n.log.contains(readerToken) {
		t.Error("a token is in the log")
	}
}
