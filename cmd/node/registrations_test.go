package node

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// registered is a source of engines that a test tells.
type registered chan []config.Engine

func (registered) Name() string { return "zmq" }

func (r registered) Run(ctx context.Context, found func([]config.Engine)) {
	for {
		select {
		case <-ctx.Done():
			return
		case list := <-r:
			found(list)
		}
	}
}

// TestRegistrationsAfterReload: an engine that registered gives way to the one of the
// configuration that has its URL as soon as that is loaded, and comes back when the
// configuration names it no longer, although it said nothing new.
func TestRegistrationsAfterReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := new(Node)
		n.cfg.Store(new(config.Config))
		source := make(registered)
		r := n.newRegistrations(source)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		var got [][]string
		go func() {
			defer close(done)
			r.Run(ctx, func(list []config.Engine) {
				names := []string{}
				for _, e := range list {
					names = append(names, e.Name)
				}
				got = append(got, names)
			})
		}()
		want := func(names ...string) {
			t.Helper()
			synctest.Wait()
			if len(got) == 0 || !slices.Equal(got[len(got)-1], names) {
				t.Errorf("engines %v, want %v", got, names)
			}
		}
		n.reapplyRegistrations() // before anything has registered
		synctest.Wait()
		if len(got) > 0 {
			t.Errorf("engines %v before any registered", got)
		}
		list := []config.Engine{{Name: "a", URL: "http://a"}, {Name: "b", URL: "http://b"}}
		source <- list
		want("a", "b")
		n.cfg.Store(&config.Config{Engines: []config.Engine{{Name: "mine", URL: "http://a"}}})
		n.reapplyRegistrations()
		want("b")
		n.cfg.Store(new(config.Config))
		n.reapplyRegistrations()
		want("a", "b")
		if list[0].Name != "a" || list[1].Name != "b" {
			t.Errorf("the source's own list was changed: %v", list)
		}
		cancel()
		<-done
	})
}
