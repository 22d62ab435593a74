package discovery

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// status sends a request for a model with the name of an InferenceObjective, and returns the status.
func (n *node) status(model, objective string) int {
	n.t.Helper()
	req, err := http.NewRequestWithContext(n.t.Context(), http.MethodPost, n.url+"/v1/completions", strings.NewReader(`{"model":"`+model+`","prompt":"tide","max_tokens":2}`))
	if err != nil {
		n.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Llm-D-Inference-Objective", objective)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		n.t.Fatal(err)
	}
	resp.Body.Close()
	return resp.StatusCode
}

// becomes waits until a request gets that status.
func (n *node) becomes(model, objective string, want int) {
	n.t.Helper()
	testbed.Eventually(n.t, model+" "+objective+" gets the status", func() bool { return n.status(model, objective) == want })
}

// shows waits until the object at path has a text in its status.
func (c *cluster) shows(path, want string) {
	c.t.Helper()
	testbed.Eventually(c.t, path+" shows "+want, func() bool {
		req, err := http.NewRequestWithContext(c.t.Context(), http.MethodGet, "https://"+c.server.addr()+path, nil)
		if err != nil {
			c.t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+adminToken)
		resp, err := c.client.Do(req)
		if err != nil {
			c.t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		return err == nil && resp.StatusCode == http.StatusOK && strings.Contains(strings.Join(strings.Fields(string(text)), ""), want)
	})
}

// TestPoolObjects: the objects of a pool apply to requests while they exist, and their status says
// whether they do. The picker has an entry in the status of the pool. While the API server is away, the
// objects stay.
func TestPoolObjects(t *testing.T) {
	c := newCluster(t)
	c.server.definePools()
	c.server.defineObjects()
	c.run("p0", "prefill", 0)
	c.run("d0", "decode", 0)
	n := startNodeWith(t, func(cfg *config.Config) {
		c.configure(&cfg.Discovery)
		cfg.EPP.Pool, cfg.EPP.Status = "vllm.llm", true
	})
	n.is(podName("p0"), "ready")
	n.is(podName("d0"), "ready")
	object := func(kind, name string, spec fields) fields {
		version := "llm-d.ai/v1alpha2"
		if kind == "InferencePool" {
			version = "inference.networking.k8s.io/v1"
		}
		return fields{"apiVersion": version, "kind": kind, "metadata": fields{"name": name, "namespace": "llm"}, "spec": spec}
	}
	ref := fields{"name": "vllm"}
	c.do("POST", poolsPath, object("InferencePool", "vllm", fields{
		"selector": fields{"matchLabels": fields{"app": "vllm"}}, "targetPorts": []fields{{"number": 8000}},
		"endpointPickerRef": fields{"name": "picker", "port": fields{"number": 9002}},
	}))
	c.shows(poolsPath+"/vllm", `"reason":"InvalidExtensionRef"`)
	c.do("POST", servicesPath, fields{"apiVersion": "v1", "kind": "Service", "metadata": fields{"name": "picker"}, "spec": fields{"ports": []fields{{"port": 9002}}}})
	c.shows(poolsPath+"/vllm", `"reason":"ResolvedRefs"`)

	if got := n.status("sim", "premium"); got != 200 {
		t.Errorf("an unknown objective: status %d", got)
	}
	c.do("POST", objectivesPath, object("InferenceObjective", "premium", fields{"priority": 10, "poolRef": ref}))
	n.becomes("sim", "premium", 400) // more urgent than the client's own class
	c.shows(objectivesPath+"/premium", `"reason":"Accepted"`)
	if got := n.status("sim", "unknown"); got != 200 {
		t.Errorf("an unknown objective: status %d", got)
	}

	if got := n.status("chat", ""); got != 404 {
		t.Errorf("a name without a rewrite: status %d", got)
	}
	rules := func(name string, targets ...fields) fields {
		return fields{"poolRef": ref, "rules": []fields{{"matches": []fields{{"model": fields{"value": name}}}, "targets": targets}}}
	}
	c.do("POST", rewritesPath, object("InferenceModelRewrite", "chat", rules("chat", fields{"modelRewrite": "sim"})))
	n.becomes("chat", "", 200)
	c.do("POST", rewritesPath, object("InferenceModelRewrite", "bad", rules("other", fields{"modelRewrite": "sim", "weight": 1}, fields{"modelRewrite": "sim"})))
	c.shows(rewritesPath+"/bad", `"status":"False"`)
	if got := n.status("other", ""); got != 404 {
		t.Errorf("a name of an invalid rewrite: status %d", got)
	}

	c.server.kill()
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if chat, premium := n.status("chat", ""), n.status("sim", "premium"); chat != 200 || premium != 400 {
			t.Fatalf("while the API server is away: status %d and %d", chat, premium)
		}
	}
	c.server.start()
	c.do("DELETE", rewritesPath+"/chat", fields{})
	n.becomes("chat", "", 404)
	c.do("DELETE", objectivesPath+"/premium", fields{})
	n.becomes("sim", "premium", 200)
}
