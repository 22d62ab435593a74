package discovery

import (
	"fmt"
	"net"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// worker registers an engine as trtllm-serve does (disagg_auto_scaling.py):
// role 0 is context, 1 generation.
func worker(t *testing.T, s *store, e *enginesim.Engine, role, started int) (id string, r *registration) {
	t.Helper()
	host, port, err := net.SplitHostPort(e.Addr())
	if err != nil {
		t.Fatal(err)
	}
	id = fmt.Sprintf("%s-%s:%s-%d-%d-%03d", []string{"CONTEXT", "GENERATION"}[role], host, port, 1763690000000+started, 4711, 42)
	return id, s.register("/trtllm-disagg/blue/workers/"+id,
		fmt.Sprintf(`{"worker_id": %q, "host": %q, "port": %s, "role": %d}`, id, host, port, role), leaseTTL)
}

func TestTRTLLMWorkers(t *testing.T) {
	s := startStore(t)
	c, g := startEngine(t, "trtllm", "prefill", 0), startEngine(t, "trtllm", "decode", 0)
	cID, _ := worker(t, s, c, 0, 1)
	gID, first := worker(t, s, g, 1, 1)
	for key, value := range map[string]string{
		"/trtllm-disagg/green/workers/CONTEXT-h:1-1-1-001":     `{"host":"127.0.0.1","port":1,"role":0}`, // another cluster
		"/trtllm-disagg/blue/workers/MM_ENCODER-h:1-1-1-001":   `{"host":"127.0.0.1","port":1,"role":2}`,
		"/trtllm-disagg/blue/workers/GENERATION-junk-1-1-0001": `{"host":`,
	} {
		if _, err := s.Client().Put(t.Context(), key, value); err != nil {
			t.Fatal(err)
		}
	}
	n := startNode(t, func(d *config.Discovery) {
		d.TRTLLM.ClusterURI, d.TRTLLM.ClusterName = "etcd://"+s.Addr, "blue"
	})
	n.is(cID, "ready")
	n.is(gID, "ready")
	if got := n.states(); len(got) != 2 {
		t.Errorf("engines are %v", got)
	}
	if p, d := n.ask(); p != cID || d != gID {
		t.Errorf("served by %q and %q", p, d)
	}
	// Restarted at the same address, before the old lease expires.
	again, second := worker(t, s, g, 1, 2)
	n.is(again, "ready")
	n.is(gID, "")
	first.die()
	testbed.Eventually(t, "the old record is gone", func() bool {
		got, err := s.Client().Get(t.Context(), first.key)
		return err == nil && got.Count == 0
	})
	if _, d := n.ask(); d != again {
		t.Errorf("served by %q", d)
	}
	second.leave()
	n.is(again, "")
}

// TestTRTLLMMetadata: workers of the older layout have keys without a lease.
func TestTRTLLMMetadata(t *testing.T) {
	s := startStore(t)
	c, g := startEngine(t, "trtllm", "prefill", 0), startEngine(t, "trtllm", "decode", 0)
	put := func(id, value string) {
		t.Helper()
		if _, err := s.Client().Put(t.Context(), "trtllm/"+id, value); err != nil {
			t.Fatal(err)
		}
	}
	record := func(role string, e *enginesim.Engine) string {
		return fmt.Sprintf(`{"model": "sim", "version": "1.1.0", "timestamp": "2025-10-13T10:00:00.000001", "server_role": %q, "url": %q}`, role, e.URL())
	}
	put("ctx-1", record("CONTEXT", c))
	n := startNode(t, func(d *config.Discovery) { d.TRTLLM.MetadataURI = "etcd://" + s.Addr })
	n.is("ctx-1", "ready")
	put("gen-1", record("GENERATION", g))
	put("gen-1/more", "not a worker's")
	put("junk", "{")
	n.is("gen-1", "ready")
	if got := n.states(); len(got) != 2 {
		t.Errorf("engines are %v", got)
	}
	if p, d := n.ask(); p != "ctx-1" || d != "gen-1" {
		t.Errorf("served by %q and %q", p, d)
	}
	put("gen-2", record("GENERATION", g)) // restarted, and gen-1 was not deleted
	n.is("gen-2", "ready")
	n.is("gen-1", "")
	if _, d := n.ask(); d != "gen-2" {
		t.Errorf("served by %q", d)
	}
	s.Kill()
	n.ask() // etcd is unavailable: nothing changes
	s.Start()
	if _, err := s.Client().Delete(t.Context(), "trtllm/ctx-1"); err != nil {
		t.Fatal(err)
	}
	n.is("ctx-1", "")
	if got, err := s.Client().Get(t.Context(), "trtllm/junk"); err != nil || got.Count != 1 {
		t.Errorf("a key of another process was deleted: %v", err)
	}
}
