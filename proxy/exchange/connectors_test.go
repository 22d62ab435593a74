package exchange_test

import (
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// The tests of this file have engines of two connectors for one model.

// TestOnlyConnectorOfAnAPI: a request for an API that one connector serves never has a leg on the
// engines of the other, also if the engines of the first have failed the request.
func TestOnlyConnectorOfAnAPI(t *testing.T) {
	for failures := range 3 {
		t.Run(fmt.Sprint(failures, " failures"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				other := &world.Engine{Name: "s0", Connector: "sglang"}
				left := failures
				serving := &world.Engine{Name: "v0", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) {
					if left > 0 {
						left--
						c.JSON(500, `{}`)
						return
					}
					c.JSON(200, world.Unary)
				}}
				w := world.New(t, world.Setup{Engines: []*world.Engine{other, serving}, Config: func(c *config.Config) { c.Policy.Place = "round_robin" }})
				a := w.Post("/inference/v1/generate", `{"model":"m","token_ids":[1],"sampling_params":{}}`)
				if a.Status != 200 || len(other.Seen()) != 0 || len(serving.Seen()) != failures+1 {
					t.Errorf("status %d, %d legs, %d at the other connector: %s", a.Status, len(serving.Seen()), len(other.Seen()), a.Body)
				}
			})
		})
	}
}

// TestNoConnectorOfAnAPI: without an engine whose connector serves the API, the client learns it,
// also if engines of another model could.
func TestNoConnectorOfAnAPI(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := world.New(t, world.Setup{Engines: []*world.Engine{{Name: "s0", Connector: "sglang"}, {Name: "t0", Connector: "trtllm"}, {Name: "v0", Connector: "vllm-nixl", Models: "another"}}})
		if a := w.Post("/inference/v1/generate", `{"model":"m","token_ids":[1],"sampling_params":{}}`); a.Status != 501 {
			t.Errorf("status %d: %s", a.Status, a.Body)
		}
	})
}

// TestPairOfTheOtherConnector: a request that one connector cannot split is split by the other.
func TestPairOfTheOtherConnector(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		engines := []*world.Engine{
			{Name: "p0", Role: "prefill", Connector: "vllm-nixl"}, {Name: "d0", Role: "decode", Connector: "vllm-nixl"},
			{Name: "s0", Role: "prefill", Connector: "sglang"}, {Name: "s1", Role: "decode", Connector: "sglang"},
		}
		for _, e := range engines {
			e.Serve = func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }
		}
		w := world.New(t, world.Setup{Engines: engines, Config: func(c *config.Config) { c.Policy.Place = "round_robin" }})
		for i := range 4 {
			a := w.Post(world.CompletionsPath, `{"model":"m","prompt":["a","b"]}`)
			// The answers are none of sglang, so that the legs fail, and vllm-nixl's decode then answers alone.
			e, _ := w.Explain(a.Header.Get("X-Request-Id"))
			if len(e.Legs) == 0 || e.Legs[0].Engine != "s0" && e.Legs[0].Engine != "s1" {
				t.Errorf("request %d: status %d, legs %+v", i, a.Status, e.Legs)
			}
		}
	})
}
