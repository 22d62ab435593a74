package clients

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"sync"
	"testing"
	"time"
)

// Clients read streams whose decode process is killed in the middle. Another engine continues the
// streams whose events have token ids; the others end with an error event.
func TestContinuedNode(t *testing.T)   { continued(t, nodeScript(t, "continued.test.mjs")) }
func TestContinuedPython(t *testing.T) { continued(t, pythonScript(t, "python/continued_test.py")) }

// killed is the connector of the engines that a script kills.
const killed = "vllm-nixl"

// continued runs a script against decode engines that the script may kill.
func continued(t *testing.T, s script) {
	f := &fleet{alone: startEngine(t, killed, "both")}
	f.add("p0", startEngine(t, killed, "prefill"), "prefill", killed)
	k := new(killer)
	for n := range 2 {
		v := &victim{addr: fmt.Sprintf("127.0.0.1:%d", freePort(t))}
		if err := v.start(); err != nil {
			t.Fatalf("pdproxy does not start (make build builds it): %v", err)
		}
		t.Cleanup(v.end)
		k.victims = append(k.victims, v)
		f.add(fmt.Sprint("d", n), "http://"+v.addr, "decode", killed)
	}
	k.front = startProxy(t, f, setup{retry: "continue = \"on\"\nbudget = 1.0"})
	control := httptest.NewServer(k)
	defer control.Close()
	s.run(t, k.front, "PDPROXY_CONTROL="+control.URL)
	t.Run("nothing left", k.front.waitIdle)
}

// killer kills and restarts decode engines for a script. POST /ready answers when the proxy uses
// all engines, and POST /kill when the engine that decodes has been killed.
type killer struct {
	front   *front
	mu      sync.Mutex // one request at a time
	victims []*victim
}

func (k *killer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	k.mu.Lock()
	defer k.mu.Unlock()
	err := errors.New("unknown path")
	switch r.URL.Path {
	case "/ready":
		for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
			if err = k.ready(); err == nil || time.Now().After(end) {
				break
			}
		}
	case "/kill":
		err = k.kill()
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusConflict)
	}
}

// ready returns nil if the proxy uses all engines.
func (k *killer) ready() error {
	var rows []struct{ Name, State string }
	if err := k.front.getJSON(k.front.Admin+"/v1/engines", &rows); err != nil {
		return err
	}
	for _, r := range rows {
		if r.State != "ready" {
			return fmt.Errorf("engine %s is %s", r.Name, r.State)
		}
	}
	return nil
}

// kill kills the engine that decodes, and starts another one in its place.
func (k *killer) kill() error {
	for _, v := range k.victims {
		var s struct {
			Running int `json:"requests_running"`
		}
		if err := k.front.getJSON("http://"+v.addr+"/sim/state", &s); err != nil {
			return err
		}
		if s.Running > 0 {
			v.end()
			return v.start()
		}
	}
	return errors.New("no engine decodes")
}

// victim is a decode engine that a script kills.
type victim struct {
	addr string
	cmd  *exec.Cmd
}

func (v *victim) start() error {
	v.cmd = exec.Command("../../bin/pdproxy", simArgs(killed, "decode", v.addr)...)
	return v.cmd.Start()
}

// end kills the process as kill -9 does.
func (v *victim) end() {
	v.cmd.Process.Kill()
	v.cmd.Wait()
}
