package conformance

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/journal"
)

// announcing describes a fleet whose engines publish their KV events at ephemeral ports, and a
// proxy whose configuration names only the engines' URLs.
func announcing(ranks int) fleetOptions {
	return fleetOptions{
		prefill: 2, decode: 1,
		engine: func(_ string, _ int, c *enginesim.Config) {
			c.Ranks = ranks
			c.KVEvents.Endpoint, c.KVEvents.Replay = "tcp://*:0", "tcp://*:0"
			if c.Connector == enginesim.ConnectorSGLang { // SGLang announces consecutive ports
				c.KVEvents.Endpoint, c.KVEvents.Replay = "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"
			}
		},
		config: func(c *config.Config) {
			c.Policy.Place = "kv_aware"
			for i := range c.Engines {
				c.Engines[i].KVEvents, c.Engines[i].KVReplay, c.Engines[i].Ranks = "", "", ranks
			}
		},
	}
}

// TestEventsWithoutConfiguration: the second request of a prefix goes where the events of the first
// one say that the blocks are, although the configuration names no address of events.
func TestEventsWithoutConfiguration(t *testing.T) {
	for _, tt := range []struct {
		connector string
		ranks     int
	}{
		{enginesim.ConnectorVLLMNixl, 1}, {enginesim.ConnectorVLLMNixl, 2}, {enginesim.ConnectorVLLMMooncake, 1},
		{enginesim.ConnectorSGLang, 1}, {enginesim.ConnectorSGLang, 2},
	} {
		t.Run(fmt.Sprintf("%s, %d ranks", tt.connector, tt.ranks), func(t *testing.T) {
			startFleet(t, tt.connector, announcing(tt.ranks)).eventsPlace("first", 0)
		})
	}
}

// eventsPlace sends two requests with a common prefix, and checks that the index has the blocks of the
// first one by events, and that they decide where the second one goes.
func (f *fleet) eventsPlace(id string, first int) {
	f.t.Helper()
	applied := func(engine string) float64 {
		return f.metric("pdproxy_kv_events_total", fmt.Sprintf("engine=%q", engine), `kind="applied"`)
	}
	before := map[string]float64{}
	for n := range f.prefill {
		before[fmt.Sprint("p", n)] = applied(fmt.Sprint("p", n))
	}
	home := prefillTarget(f.explained(id, prompt(first, 20*16)))
	engine, _, _ := strings.Cut(home, " ")
	f.eventually("the events of the home are in", func() bool { return applied(engine) >= before[engine]+20 })
	next := f.explained(id+"-next", prompt(first, 24*16))
	tokens := 0
	for _, c := range next.Candidates {
		if c.Facts["role"] == "prefill" && fmt.Sprint(c.Engine, " ", c.Rank) == home {
			blocks, _ := c.Facts["blocks_gpu"].(float64)
			size, _ := c.Facts["block_tokens"].(float64)
			tokens = int(blocks * size)
		}
	}
	if tokens < 20*16 {
		f.t.Errorf("according to the index %s holds %d tokens, want at least 320", home, tokens)
	}
	if got := prefillTarget(next); got != home {
		f.t.Errorf("a prompt that %s holds was placed on %s", home, got)
	}
}

// prefillTarget returns the engine and rank that computed the request's prompt.
func prefillTarget(e journal.Explanation) string {
	for _, l := range e.Legs {
		if l.Phase == "prefill" && l.Error == "" {
			return fmt.Sprint(l.Engine, " ", l.Rank)
		}
	}
	return ""
}

// TestEventsMove: an engine that restarts with other ports is followed there, and the blocks of its
// former process are forgotten. Another process has taken the former port.
func TestEventsMove(t *testing.T) {
	o := announcing(1)
	o.prefill = 1
	f := startFleet(t, enginesim.ConnectorVLLMNixl, o)
	f.eventsPlace("first", 0)
	old := f.prefill[0]
	c := enginesim.Config{Connector: f.connector, Role: enginesim.RolePrefill, Listen: old.Addr(), Lease: time.Minute}
	o.engine("", 0, &c)
	former := strings.TrimPrefix(old.KVEventsEndpoint(), "tcp://")
	old.Kill()
	old.Close()
	taken, err := net.Listen("tcp", former)
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	f.prefill[0] = startEngine(t, c)
	f.eventually("the restart has been noticed", func() bool { return f.metric("pdproxy_engine_restarts_total") > 0 })
	f.waitReady()
	if tokens := held(f.explained("again", prompt(0, 20*16)))["p0"]; tokens != 0 {
		t.Errorf("according to the index the new process holds %d tokens", tokens)
	}
	f.eventsPlace("second", 100)
}

// TestOlderEngineWithoutSources: a vLLM release without the list is asked once, and serves.
func TestOlderEngineWithoutSources(t *testing.T) {
	o := announcing(1)
	engine := o.engine
	o.engine = func(role string, n int, c *enginesim.Config) {
		engine(role, n, c)
		c.Version = "0.31.0"
	}
	f := startFleet(t, enginesim.ConnectorVLLMNixl, o)
	if a := f.post(t.Context(), f.url, completionsPath, prompt(0, 40*16)); a.status != http.StatusOK {
		t.Fatalf("got status %d: %s", a.status, a.body)
	}
	if n := f.byEvents(); n != 0 {
		t.Errorf("%v blocks by events of engines that announce none", n)
	}
}
