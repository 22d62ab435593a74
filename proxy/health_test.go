package proxy_test

import (
	"context"
	"log/slog"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// TestHealthAwaitsFirstProbes: the proxy is not ready before every engine has been looked at, also
// if requests may wait for engines.
func TestHealthAwaitsFirstProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := world.Answering("e", "m")
		late := engine.New(engine.Options{
			Health: config.Default().Health, Protocols: func(name string) (engine.Protocol, bool) { return connector.ByName(name) },
			NewClient: func(config.Engine) (upstream.Client, error) { return upstream.New(upstream.Options{}), nil },
			NewProbe:  func(config.Engine) (http.RoundTripper, error) { return world.Probes{e.Host(): e}, nil },
			Log:       slog.New(slog.DiscardHandler),
		})
		defer late.Close()
		late.Know([]engine.Known{{Model: "m"}})
		if err := late.Apply(engine.SourceStatic, []config.Engine{e.Spec()}, 0); err != nil {
			t.Fatal(err)
		}
		w := newWorld(t, world.Setup{
			Config: func(c *config.Config) { c.Limits.NoEngineTimeout = config.Duration(time.Minute) },
			Options: func(o *proxy.Options) {
				o.Registry, o.Coordinator = late, coordinator.NewLocal(late, &world.Decider{}, &world.Decider{}, coordinator.State{}, nil, nil)
			},
		})
		proceed := e.Stop()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { late.Run(ctx); close(done) }()
		defer func() { cancel(); <-done }()
		if got := w.Get("/health"); got.Status != 503 {
			t.Errorf("before the first probe: got %d %s", got.Status, got.Body)
		}
		proceed()
		synctest.Wait()
		if got := w.Get("/health"); got.Status != 200 {
			t.Errorf("after the first probe: got %d %s", got.Status, got.Body)
		}
	})
}
