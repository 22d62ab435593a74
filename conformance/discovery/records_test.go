package discovery

import (
	"fmt"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

const prefix = "/pdproxy/engines/"

// record is the JSON of an [[engine]].
func record(name, role string, e *enginesim.Engine) string {
	return fmt.Sprintf(`{"name":%q,"url":%q,"role":%q,"connector":"vllm-nixl"}`, name, e.URL(), role)
}

// world is an etcd with a prefill and a decode engine in it, and a proxy.
type world struct {
	*node
	store *store
	wire  *testbed.Wire
	p, d  *registration
}

func newWorld(t *testing.T, token time.Duration) *world {
	t.Helper()
	w := &world{store: startStore(t)}
	w.wire = testbed.NewWire(t, w.store.Addr)
	w.p = w.add("p0", "prefill", 0)
	w.d = w.add("d0", "decode", token)
	w.node = startNode(t, func(d *config.Discovery) {
		d.Etcd.Endpoints = []string{"http://" + w.wire.Addr()}
		d.Allow = []string{"127.0.0.0/8"}
	})
	w.is("p0", "ready")
	w.is("d0", "ready")
	return w
}

// leaseTTL is the lease of every registration, in seconds.
const leaseTTL = 2

func (w *world) add(name, role string, token time.Duration) *registration {
	w.store.t.Helper()
	e := startEngine(w.store.t, "vllm-nixl", role, token)
	return w.store.register(prefix+name, record(name, role, e), leaseTTL)
}

func TestEnginesComeAndGo(t *testing.T) {
	w := newWorld(t, 0)
	if p, d := w.ask(); p != "p0" || d != "d0" {
		t.Errorf("served by %q and %q", p, d)
	}
	d1 := w.add("d1", "decode", 0)
	w.is("d1", "ready")
	w.d.leave()
	w.is("d0", "")
	if _, d := w.ask(); d != "d1" {
		t.Errorf("served by %q", d)
	}
	d1.die()
	w.is("d1", "")
	if resp := w.open(8, false); resp.StatusCode != 503 {
		t.Errorf("got status %d without a decode engine", resp.StatusCode)
	}
}

// A decode engine whose lease has expired gets no new requests, and finishes
// its running ones. So does a prefill engine.
func TestLostLeaseDrains(t *testing.T) {
	w := newWorld(t, 50*time.Millisecond)
	stream := w.open(120, true) // six seconds
	w.add("p1", "prefill", 0)
	w.add("d1", "decode", 0)
	w.is("p1", "ready")
	w.is("d1", "ready")
	w.p.die()
	w.d.die()
	w.is("d0", "draining")
	testbed.Eventually(t, "p0 gets nothing new", func() bool { return w.states()["p0"] != "ready" }) // it may be gone already
	for range 5 {
		if p, d := w.ask(); p != "p1" || d != "d1" {
			t.Errorf("served by %q and %q", p, d)
		}
	}
	w.whole(stream, 120)
	w.is("d0", "")
	w.is("p0", "")
}

// A record in etcd that is not a valid engine affects no other engine.
func TestBadRecords(t *testing.T) {
	w := newWorld(t, 0)
	for key, value := range map[string]string{
		"junk":     "\x00\xff{",
		"file":     `{"name":"f","url":"http://127.0.0.1:1","role":"both","api_key_file":"/etc/passwd"}`,
		"metadata": `{"name":"m","url":"http://169.254.169.254","role":"both"}`,
		"twice":    `{"name":"p0","url":"http://127.0.0.1:1","role":"decode","connector":"vllm-nixl","max_conns":-1}`,
	} {
		if _, err := w.store.Client().Put(t.Context(), prefix+key, value); err != nil {
			t.Fatal(err)
		}
	}
	w.add("d1", "decode", 0)
	w.is("d1", "ready")
	states := w.states()
	if len(states) != 3 || states["p0"] != "ready" || states["d0"] != "ready" {
		t.Errorf("engines are %v", states)
	}
	for _, text := range []string{"key=/pdproxy/engines/junk ", "local files", "discovery.allow", "max_conns"} {
		if !w.log.contains(text) {
			t.Errorf("the log lacks %q", text)
		}
	}
}

// While etcd is unavailable nothing changes, whatever the leases. When it is
// back, the proxy applies the changes of the leases.
func TestEtcdKilled(t *testing.T) {
	w := newWorld(t, 0)
	gone := w.add("d1", "decode", 0)
	w.is("d1", "ready")
	w.store.Kill()
	gone.die()
	for end := time.Now().Add(2 * leaseTTL * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		w.ask()
		if s := w.states(); s["p0"] != "ready" || s["d0"] != "ready" || s["d1"] != "ready" {
			t.Fatalf("engines are %v", s)
		}
	}
	w.store.Start()
	w.add("d2", "decode", 0)
	w.is("d2", "ready")
	w.is("d1", "")
	if s := w.states(); s["p0"] != "ready" || s["d0"] != "ready" {
		t.Errorf("engines are %v", s)
	}
	if w.log.contains(`msg="engine is draining" engine=p0`) || w.log.contains(`msg="engine is draining" engine=d0`) {
		t.Error("a live engine was dropped")
	}
	w.ask()
}

// An etcd that restarts empty removes no live engine: the engines register again.
func TestEtcdEmptied(t *testing.T) {
	w := newWorld(t, 0)
	for n := range 100 { // so that the new history is much shorter
		if _, err := w.store.Client().Put(t.Context(), "/x", fmt.Sprint(n)); err != nil {
			t.Fatal(err)
		}
	}
	late := w.add("d1", "decode", 0)
	w.is("d1", "ready")
	w.store.Kill()
	late.die() // it does not register again until it restarts
	w.store.Empty()
	w.store.Start()
	testbed.Eventually(t, "the loss is noticed", func() bool {
		if s := w.states(); s["p0"] != "ready" || s["d0"] != "ready" || s["d1"] != "ready" {
			t.Fatalf("engines are %v", s)
		}
		w.ask()
		return w.log.contains("etcd has lost its data")
	})
	w.add("d2", "decode", 0)
	w.is("d2", "ready")
	if s := w.states(); s["p0"] != "ready" || s["d0"] != "ready" || s["d1"] != "ready" {
		t.Errorf("engines are %v", s)
	}
}

// A proxy was cut off, and the history that it has to read was compacted. It
// then reads everything anew.
func TestCompaction(t *testing.T) {
	w := newWorld(t, 0)
	w.wire.Cut(true)
	w.d.leave()
	w.add("d1", "decode", 0)
	var revision int64
	for n := range 50 {
		put, err := w.store.Client().Put(t.Context(), prefix+"noise", strings.Repeat("x", n+1))
		if err != nil {
			t.Fatal(err)
		}
		revision = put.Header.Revision
	}
	if _, err := w.store.Client().Compact(t.Context(), revision, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	if s := w.states(); s["p0"] != "ready" || s["d0"] != "ready" || len(s) != 2 {
		t.Errorf("cut off, engines are %v", s)
	}
	w.wire.Cut(false)
	w.is("d1", "ready")
	w.is("d0", "")
	if p, d := w.ask(); p != "p0" || d != "d1" {
		t.Errorf("served by %q and %q", p, d)
	}
}
