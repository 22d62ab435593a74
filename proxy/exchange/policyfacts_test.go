package exchange_test

import (
	"slices"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// Policies that need the prompt get it as raw JSON. The others do not get it.
func TestPromptOnRequest(t *testing.T) {
	for _, tt := range []struct {
		needs abi.Needs
		want  string
	}{{0, ""}, {abi.NeedPrompt, `"héllo \n"`}} {
		synctest.Test(t, func(t *testing.T) {
			w := world.New(t, world.Setup{Needs: tt.needs, Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}})
			if a := w.Post(world.CompletionsPath, `{"model":"m","prompt":"héllo \n","max_tokens":3}`); a.Status != 200 {
				t.Fatalf("%+v", a)
			}
			if got := w.Decider.Asked.Load().(abi.RequestFacts).Prompt; got != tt.want {
				t.Errorf("needs %d: got prompt %q, want %q", tt.needs, got, tt.want)
			}
		})
	}
}

// TestIdentityForPolicies: policies that need the identity learn the client, the tenant and the
// class of a request. The others get none of them.
func TestIdentityForPolicies(t *testing.T) {
	for _, tt := range []struct {
		name   string
		needs  abi.Needs
		config func(*config.Config)
		want   abi.Identity
	}{
		{"not needed", 0, classes(true), abi.Identity{}},
		{"without classes", abi.NeedIdentity, nil, abi.Identity{Client: abi.ClientID("b"), Tenant: abi.LabelID("a")}},
		{"with classes", abi.NeedIdentity, classes(true), abi.Identity{Client: abi.ClientID("b"), Tenant: abi.LabelID("a"), Class: abi.LabelID("batch")}},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			w := world.New(t, world.Setup{Needs: tt.needs, Config: tt.config, Engines: []*world.Engine{e}, Keys: world.TenantLine("a", "rpm=9") + world.TenantLine("b", "tenant=a")})
			if a := w.Post(world.CompletionsPath, world.Completions(false), "Authorization", "Bearer b-key", "X-Priority", "batch"); a.Status != 200 {
				t.Fatalf("%+v", a)
			}
			if got := w.Decider.Asked.Load().(abi.RequestFacts).Identity; got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}

// TestTraitsForPolicies: policies that need the traits learn the adapter, the cache salt, tools and
// media of a request. The salt's text is not among them.
func TestTraitsForPolicies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
		w := world.New(t, world.Setup{Needs: abi.NeedTraits, Engines: []*world.Engine{e}})
		traits := func(body string) abi.Traits {
			if a := w.Post("/v1/chat/completions", body); a.Status != 200 {
				t.Fatalf("%+v", a)
			}
			return w.Decider.Asked.Load().(abi.RequestFacts).Traits
		}
		if got := traits(`{"model":"m","messages":[{"role":"user","content":"x"}]}`); got != (abi.Traits{}) {
			t.Errorf("without traits: %+v", got)
		}
		got := traits(`{"model":"m","cache_salt":"s","lora_path":"l","tools":[{}],"messages":[{"role":"user","content":[{"type":"image_url"},{"type":"input_audio"}]}]}`)
		if got.Salt == 0 || got.Adapter != "l" || !got.Tools || !got.Images || !got.Audio {
			t.Errorf("with all traits: %+v", got)
		}
		if other := traits(`{"model":"m","cache_salt":"t","messages":[{"role":"user","content":"x"}]}`); other.Salt == 0 || other.Salt == got.Salt {
			t.Errorf("two salts have the hashes %x and %x", got.Salt, other.Salt)
		}
	})
}

// TestHeadersForPolicies: a request carries the headers that policies declare, and no other,
// if a policy needs headers.
func TestHeadersForPolicies(t *testing.T) {
	for _, needs := range []abi.Needs{0, abi.NeedTraits, abi.NeedHeaders} {
		synctest.Test(t, func(t *testing.T) {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			w := world.New(t, world.Setup{Needs: needs, Engines: []*world.Engine{e}})
			if a := w.Post(world.CompletionsPath, world.Completions(false), "X-Tier", "gold", "X-Other", "1", "Authorization", "Bearer key"); a.Status != 200 {
				t.Fatalf("%+v", a)
			}
			var want []abi.RequestHeader
			if needs == abi.NeedHeaders {
				want = []abi.RequestHeader{{Name: "x-tier", Value: "gold", Present: true}}
			}
			if got := w.Decider.Asked.Load().(abi.RequestFacts).Headers; !slices.Equal(got, want) {
				t.Errorf("needs %v: got %+v, want %+v", needs.Names(), got, want)
			}
		})
	}
}
