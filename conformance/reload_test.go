package conformance

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// A reload that removes the engines of a running stream lets the stream end.
// New requests go to the new engines.
func TestReloadDropsNoStream(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		var cfg config.Config
		f := startFleet(t, connector, fleetOptions{
			prefill: 1, decode: 1,
			engine: slow(enginesim.RoleDecode, 300_000), // until the test ends the stream
			config: func(c *config.Config) { cfg = *c },
		})
		body := chat(long, 100, true)
		resp := f.open(context.Background(), body)

		next := cfg
		next.Policy.Place = "round_robin"
		next.Limits.MaxExchanges = 7
		next.Engines = nil
		for n, role := range []string{enginesim.RolePrefill, enginesim.RoleDecode} {
			e := startEngine(t, enginesim.Config{Connector: f.connector, Role: role})
			next.Engines = append(next.Engines, engineSpec("new"+role, role, f.connector, e))
			if n == 0 {
				f.prefill = append(f.prefill, e)
			} else {
				f.decode = append(f.decode, e)
			}
		}
		if err := f.reload(&next); err != nil {
			t.Fatal(err)
		}
		f.eventually("the new engines are ready", func() bool { return f.engineState("newdecode") == "ready" && f.engineState("newprefill") == "ready" })
		if s := f.engineState("d0"); s != "draining" {
			t.Errorf("the stream's engine is %q", s)
		}
		other := chat("after the reload", 8, true)
		a := f.try(chatPath, other)
		f.right(a, chatPath, other)
		if a.header.Get("X-Pdproxy-Decode") != "newdecode" {
			t.Errorf("served by %q", a.header.Get("X-Pdproxy-Decode"))
		}
		f.decode[0].SetDecodeUsPerToken(0)
		f.right(readRest(resp), chatPath, body)
		f.eventually("the drained engines have left", func() bool { return f.engineState("d0") == "" && f.engineState("p0") == "" })
		var policies []struct{ Name string }
		f.admin("/v1/policies", &policies)
		if len(policies) != 4 || policies[1].Name != "round_robin" {
			t.Errorf("policies are %v", policies)
		}
	})
}

// A configuration that cannot be used changes nothing.
func TestReloadRefusedChangesNothing(t *testing.T) {
	var cfg config.Config
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{config: func(c *config.Config) { cfg = *c }})
	next := cfg
	next.Engines = append([]config.Engine{}, cfg.Engines...)
	next.Engines[0].APIKeyFile = "/nonexistent/key"
	next.Limits.MaxExchanges, next.Limits.MaxReading = 1, 100
	if err := f.reload(&next); err == nil {
		t.Fatal("a missing key file was accepted")
	}
	body := chat("still here", 5, false)
	f.right(f.try(chatPath, body), chatPath, body)
	for _, name := range []string{"p0", "p1", "d0", "d1"} {
		if s := f.engineState(name); s != "ready" {
			t.Errorf("%s is %q", name, s)
		}
	}
}

// Operators add and drain engines without a configuration.
func TestEnginesByAdmin(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{prefill: 1, decode: 1, engine: slow(enginesim.RoleDecode, 5000)})
	e := startEngine(t, enginesim.Config{Connector: f.connector, Role: enginesim.RoleDecode})
	f.decode = append(f.decode, e)
	a := f.post(context.Background(), f.front.AdminURL(), "/v1/engines",
		`{"name":"extra","url":"`+e.URL()+`","role":"decode","connector":"vllm-nixl"}`, "Authorization", "Bearer "+f.front.AdminToken())
	if a.status != 201 {
		t.Fatalf("got status %d: %s", a.status, a.body)
	}
	for _, want := range []string{`"name":"extra"`, `"url":"` + e.URL() + `"`, `"role":"decode"`, `"source":"admin"`, `"state":"`} {
		if !strings.Contains(a.body, want) {
			t.Errorf("the answer has no %s: %s", want, a.body)
		}
	}
	f.eventually("the added engine is ready", func() bool { return f.engineState("extra") == "ready" })
	f.awaitWorkers()
	resp := f.open(context.Background(), chat(long, 100, true))
	busy := resp.Header.Get("X-Pdproxy-Decode")
	if status := f.delete("/v1/engines/" + busy + "?drain=30s"); status != 202 {
		t.Fatalf("DELETE answered %d", status)
	}
	for range 3 {
		body := chat("elsewhere", 4, true)
		b := f.try(chatPath, body)
		f.right(b, chatPath, body)
		if b.header.Get("X-Pdproxy-Decode") == busy {
			t.Errorf("a draining engine got a request")
		}
	}
	f.right(readRest(resp), chatPath, chat(long, 100, true))
	f.eventually("the drained engine has left", func() bool { return f.engineState(busy) == "" })
	if status := f.delete("/v1/engines/" + busy); status != 404 {
		t.Errorf("DELETE of an unknown engine answered %d", status)
	}
}

func (f *fleet) delete(path string) int {
	f.t.Helper()
	req, err := http.NewRequest(http.MethodDelete, f.front.AdminURL()+path, nil)
	if err != nil {
		f.t.Fatal(err)
	}
	testbed.Authorize(f.t, req)
	resp, err := f.client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	resp.Body.Close()
	return resp.StatusCode
}
