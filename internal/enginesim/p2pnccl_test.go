package enginesim

import (
	"context"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// p2pPair is a prefill and a decode engine, and a third without a connector.
type p2pPair struct {
	p, d, both *Engine
	serial     int
}

func startP2P(t *testing.T, change ...func(*Config)) *p2pPair {
	t.Helper()
	start := func(role string) *Engine {
		cfg := Config{Connector: ConnectorVLLMP2PNCCL, Role: role, KVBlocks: 256}
		for _, c := range change {
			c(&cfg)
		}
		return startEngine(t, cfg)
	}
	return &p2pPair{p: start(RolePrefill), d: start(RoleDecode), both: start(RoleBoth)}
}

// id is a request id that names both engines.
func (pd *p2pPair) id() string {
	pd.serial++
	return fmt.Sprintf("___prefill_addr_%s___decode_addr_%s_%032x", pd.p.KVAddress(), pd.d.KVAddress(), pd.serial)
}

func TestP2PEqualsDirect(t *testing.T) {
	pd := startP2P(t)
	for round := range 2 { // the second round finds prefixes in both caches
		for _, n := range lengths {
			prompt, id := words(n, n), pd.id()
			p := post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1`), "X-Request-Id", id)
			if p.status != http.StatusOK {
				t.Errorf("prefill: status %d", p.status)
			}
			eventually(t, "decode has the KV", func() bool { return pd.d.State().BlocksPinned == (n+15)/16 && pd.p.State().BlocksUsed == 0 })
			got := post(t, pd.d.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12`), "X-Request-Id", id)
			want := post(t, pd.both.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12`))
			if got.text(t) != want.text(t) {
				t.Errorf("round %d, %d tokens: text %q, direct %q", round, n, got.text(t), want.text(t))
			}
		}
	}
	eventually(t, "decode holds nothing", func() bool { return pd.d.State().BlocksUsed == 0 })
	if s := pd.d.State(); s.DuplicateIDs != 0 {
		t.Errorf("decode: %+v", s)
	}
}

// A request of the same id that needs no KV drops the KV in the buffer.
func TestP2PSameID(t *testing.T) {
	pd := startP2P(t)
	id := pd.id()
	post(t, pd.p.URL()+core.RouteCompletions, completion(words(5, 100), `"max_tokens":1`), "X-Request-Id", id)
	eventually(t, "decode has the KV", func() bool { return pd.d.State().BlocksPinned == 7 })
	if a := post(t, pd.d.URL()+core.RouteCompletions, `{"model":"sim","prompt":[0],"max_tokens":1}`, "X-Request-Id", id); a.status != http.StatusOK {
		t.Errorf("got status %d: %s", a.status, a.body)
	}
	eventually(t, "decode holds nothing", func() bool { return pd.d.State().BlocksUsed == 0 })
}

// Decode waits for KV that is never sent, and prefill for a decode that does
// not exist.
func TestP2PLegAlone(t *testing.T) {
	pd := startP2P(t, func(c *Config) { c.P2PNCCL.BufferTimeout = 300 * time.Millisecond })
	if a := post(t, pd.d.URL()+core.RouteCompletions, completion(words(5, 100), ""), "X-Request-Id", pd.id()); a.status != http.StatusInternalServerError {
		t.Errorf("decode: status %d", a.status)
	}
	id := pd.id()
	pd.d.Kill()
	if a := post(t, pd.p.URL()+core.RouteCompletions, completion(words(5, 100), `"max_tokens":1`), "X-Request-Id", id); a.status != http.StatusInternalServerError {
		t.Errorf("prefill: status %d", a.status)
	}
	eventually(t, "prefill holds nothing", func() bool { return pd.p.State().BlocksUsed == 0 })
}

// An aborted request that waits for KV has ended, so its id may come again.
func TestP2PAbortedWait(t *testing.T) {
	pd := startP2P(t)
	id := pd.id()
	ctx, leave := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		try(ctx, pd.d.URL()+core.RouteCompletions, completion(words(5, 100), ""), "X-Request-Id", id)
	}()
	eventually(t, "decode waits for KV", func() bool { return pd.d.State().RequestsWaiting == 1 })
	leave()
	<-ended
	eventually(t, "the request has ended", func() bool { return pd.d.State().RequestsWaiting == 0 })
	if a := post(t, pd.d.URL()+core.RouteCompletions, `{"model":"sim","prompt":[0],"max_tokens":1}`, "X-Request-Id", id); a.status != http.StatusOK {
		t.Errorf("got status %d: %s", a.status, a.body)
	}
	if s := pd.d.State(); s.DuplicateIDs != 0 {
		t.Errorf("decode: %+v", s)
	}
}

// An id without addresses ends either engine.
func TestP2PEnds(t *testing.T) {
	for _, role := range []string{RolePrefill, RoleDecode} {
		t.Run(role, func(t *testing.T) {
			pd := startP2P(t)
			e := pd.p
			if role == RoleDecode {
				e = pd.d
			}
			try(t.Context(), e.URL()+core.RouteCompletions, completion("one two three", ""), "X-Request-Id", "plain")
			select {
			case <-e.Died():
			case <-time.After(20 * time.Second):
				t.Error("the engine still runs")
			}
		})
	}
}
