package node

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// registered is a source of the engines that a test sends.
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

// TestRegistrationsAfterReload: a reload removes a registered engine if the new
// configuration has an engine with its URL. A later reload without that engine brings the
// registered one back, although it did not register again.
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
