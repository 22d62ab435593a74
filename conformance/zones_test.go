package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/journal"
)

// zoned is a fleet whose engines have the label zone, and whose pairs stay within a zone.
type zoned struct {
	*fleet
	zones map[string]string // of the engines, by name
}

// startZones starts a fleet with an engine for each letter, in the zone of that letter.
func startZones(t *testing.T, connector, prefill, decode string, o fleetOptions) *zoned {
	t.Helper()
	z := &zoned{zones: map[string]string{}}
	more := o.config
	o.prefill, o.decode = len(prefill), len(decode)
	o.config = func(c *config.Config) {
		c.Pairs.SameLabels = []string{"zone"}
		if more != nil {
			more(c)
		}
		for i := range c.Engines {
			e := &c.Engines[i]
			if n := int(e.Name[1] - '0'); e.Role == "prefill" {
				z.zones[e.Name] = prefill[n : n+1]
			} else {
				z.zones[e.Name] = decode[n : n+1]
			}
			e.Labels = config.LabelsOf(map[string]string{"zone": z.zones[e.Name]})
		}
	}
	z.fleet = startFleet(t, connector, o)
	return z
}

// ask sends requests at the same time, and returns how many pairs each zone has served. Each answer
// is right, and both of its engines are in one zone.
func (z *zoned) ask(tag string, n int) (served map[string]int) {
	z.t.Helper()
	answers, bodies := make([]answer, n), make([]string, n)
	var wg sync.WaitGroup
	for i := range n {
		bodies[i] = chat(fmt.Sprint(tag, " ", i, " ", long), 6, i%2 == 0)
		wg.Go(func() { answers[i] = z.try(chatPath, bodies[i]) })
	}
	wg.Wait()
	served = map[string]int{}
	for i, a := range answers {
		z.right(a, chatPath, bodies[i])
		p, d := a.header.Get("X-Pdproxy-Prefill"), a.header.Get("X-Pdproxy-Decode")
		if z.zones[p] == "" || z.zones[p] != z.zones[d] {
			z.t.Errorf("prefill on %q in zone %q, decode on %q in zone %q", p, z.zones[p], d, z.zones[d])
		}
		served[z.zones[p]]++
	}
	return served
}

// requests returns how many requests the engines of a role in a zone have received.
func (z *zoned) requests(role, zone string) (n int64) {
	list := z.prefill
	if role == "d" {
		list = z.decode
	}
	for i, e := range list {
		if z.zones[fmt.Sprint(role, i)] == zone {
			n += e.State().Requests
		}
	}
	return n
}

// kill kills the decode engines of a zone.
func (z *zoned) kill(zone string) {
	z.t.Helper()
	for i, e := range z.decode {
		name := fmt.Sprint("d", i)
		if z.zones[name] != zone {
			continue
		}
		e.Kill()
		z.eventually(name+" has ended, as its probes have found", func() bool { return z.engineState(name) == "unhealthy" })
	}
	z.awaitWorkers()
}

// refused asserts that a request gets the error for a missing engine, and that no engine has
// received a leg of it.
func (z *zoned) refused() {
	z.t.Helper()
	before := z.requests("p", "a") + z.requests("p", "b")
	a := z.try(chatPath, chat("nobody "+long, 6, true))
	var e struct {
		Error struct{ Message, Type, Code string }
	}
	if err := json.Unmarshal([]byte(a.body), &e); err != nil || a.status != 503 || a.header.Get("Retry-After") == "" ||
		e.Error.Code != "no_target" || e.Error.Message == "" || e.Error.Type == "" {
		z.t.Errorf("got status %d, Retry-After %q: %s", a.status, a.header.Get("Retry-After"), a.body)
	}
	if now := z.requests("p", "a") + z.requests("p", "b"); now != before {
		z.t.Errorf("prefill engines got %d requests without a decode engine of their zone", now-before)
	}
}

// TestSameZone: with pairs.same_labels no request crosses zones, with each order of the legs and
// each policy that chooses pairs. A zone without a decode engine gets no prefill, whether it never
// had one or lost it. Without a pair in any zone, clients get an error.
func TestSameZone(t *testing.T) {
	for _, connector := range strings.Split(modeConnectors, ",") {
		for place, lost := range map[string]string{"kv_aware": "b", "pair_aware": "a"} {
			t.Run(connector+" "+place, func(t *testing.T) {
				z := startZones(t, connector, "aabc", "abbd", fleetOptions{config: func(c *config.Config) { c.Policy.Place = place }})
				z.ask("both zones", 16) // the policies may send all of them to one zone
				z.kill(lost)
				before, left := z.requests("p", lost), map[string]string{"a": "b", "b": "a"}[lost]
				if served := z.ask("one zone", 8); served[left] != 8 {
					t.Errorf("without a decode engine in zone %s, the zones served %v", lost, served)
				}
				if now := z.requests("p", lost); now != before {
					t.Errorf("zone %s has no decode engine, and got %d prefills", lost, now-before)
				}
				z.kill(left)
				z.refused()
				if p, d := z.requests("p", "c"), z.requests("d", "d"); p+d != 0 {
					t.Errorf("the engines without a partner got %d and %d requests", p, d)
				}
			})
		}
	}
}

// TestSameZoneRetries: if decode fails before the first byte, the request runs on a pair of the
// other zone, because its own zone has no other decode engine. It never combines both zones.
func TestSameZoneRetries(t *testing.T) {
	for _, connector := range strings.Split(modeConnectors, ",") {
		t.Run(connector, func(t *testing.T) {
			z := startZones(t, connector, "ab", "ab", fleetOptions{config: func(c *config.Config) { c.Policy.Place = "round_robin" }})
			z.decode[0].SetFault("1:500", 0, "")
			failed := 0
			for n := 0; n < 20 && failed == 0; n++ {
				body := chat(fmt.Sprint("retry ", n, " ", long), 6, true)
				id := fmt.Sprint("retry-", n)
				a := z.post(context.Background(), z.url, chatPath, body, "X-Request-Id", id)
				z.right(a, chatPath, body)
				if p, d := a.header.Get("X-Pdproxy-Prefill"), a.header.Get("X-Pdproxy-Decode"); p != "p1" || d != "d1" {
					t.Errorf("request %d ran on %q and %q", n, p, d)
				}
				zones := map[int]string{} // of each attempt
				for _, l := range z.legs(id) {
					if zone := z.zones[l.Engine]; zones[l.Attempt] == "" {
						zones[l.Attempt] = zone
					} else if zone != zones[l.Attempt] {
						t.Errorf("attempt %d of request %d ran in two zones", l.Attempt, n)
					}
					if l.Engine == "d0" {
						failed++
					}
				}
			}
			if failed == 0 {
				t.Error("no request reached the decode engine that fails")
			}
			z.decode[0].SetFault("", 0, "") // only a decode engine of its zone makes a vLLM prefill free its blocks
		})
	}
}

// legs returns the legs of a request that has ended.
func (f *fleet) legs(id string) []journal.ExplainedLeg {
	f.t.Helper()
	var e journal.Explanation
	f.eventually("the request is explained", func() bool {
		e = journal.Explanation{}
		f.admin("/v1/explain/"+id, &e)
		return e.RequestID == id
	})
	return e.Legs
}

// TestSameZoneAlone: without a pair in any zone, an engine of role both answers alone.
func TestSameZoneAlone(t *testing.T) {
	both := startEngine(t, enginesim.Config{Connector: enginesim.ConnectorVLLMNixl, Role: enginesim.RoleBoth})
	z := startZones(t, enginesim.ConnectorVLLMNixl, "a", "b", fleetOptions{config: func(c *config.Config) {
		c.Policy.Place = "pair_aware"
	}})
	z.decode = append(z.decode, both)
	z.refused()
	next := z.cfg
	next.Engines = append(append([]config.Engine{}, next.Engines...), engineSpec("w0", "both", enginesim.ConnectorVLLMNixl, both))
	if err := z.reload(&next); err != nil {
		t.Fatal(err)
	}
	z.waitReady()
	body := chat("alone "+long, 6, true)
	a := z.try(chatPath, body)
	z.right(a, chatPath, body)
	if p, d := a.header.Get("X-Pdproxy-Prefill"), a.header.Get("X-Pdproxy-Decode"); p != "" || d != "w0" {
		t.Errorf("prefill on %q, decode on %q", p, d)
	}
	next.Pairs.SameLabels = []string{} // a reload ends the requirement
	if err := z.reload(&next); err != nil {
		t.Fatal(err)
	}
	body = chat("across "+long, 6, true)
	z.eventually("a pair of two zones serves", func() bool {
		a := z.try(chatPath, body)
		return a.status == 200 && a.header.Get("X-Pdproxy-Prefill") == "p0"
	})
}

// TestTurnStaysInItsZone: prefill pulls the KV of the previous turn only within its zone. The KV of
// another zone is freed.
func TestTurnStaysInItsZone(t *testing.T) {
	z := startZones(t, enginesim.ConnectorVLLMNixl, "ab", "ab", fleetOptions{
		engine: func(role string, _ int, c *enginesim.Config) { keepTurns(role, c) },
		config: func(c *config.Config) {
			for i := range c.Engines {
				c.Engines[i].Bidirectional = true
			}
		},
	})
	first := chatTurn("c", long)
	a := z.try(chatPath, first)
	z.right(a, chatPath, first)
	z.eventually("the first turn is kept", func() bool { return z.turns("kept") == 1 })
	home := int(a.header.Get("X-Pdproxy-Prefill")[1] - '0')
	z.prefill[home].Kill()
	z.eventually("prefill has ended, as its probes have found", func() bool { return z.engineState(fmt.Sprint("p", home)) == "unhealthy" })
	z.awaitWorkers()
	second := chatTurn("c", long, a.text, "go on")
	next := z.try(chatPath, second)
	z.right(next, chatPath, second)
	if p, d := next.header.Get("X-Pdproxy-Prefill"), next.header.Get("X-Pdproxy-Decode"); p != fmt.Sprint("p", 1-home) || d != fmt.Sprint("d", 1-home) {
		t.Errorf("the second turn ran on %q and %q", p, d)
	}
	if z.turns("pulled") != 0 || z.unusedTurns("other_labels") != 1 {
		t.Errorf("%v pulled, %v stayed in their zone", z.turns("pulled"), z.unusedTurns("other_labels"))
	}
	z.eventually("the KV of the first turn is freed", func() bool { return z.decode[home].State().BlocksPinned == 0 })
	if err := z.drain(); err != nil {
		t.Errorf("the drain was not clean: %v", err)
	}
	z.eventually("nothing is kept", func() bool { return z.kept() == 0 })
}
