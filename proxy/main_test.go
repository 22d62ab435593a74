package proxy_test

import (
	"net/http"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/proxytest"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

func TestMain(m *testing.M) { proxytest.Main(m) }

// newWorld is world.New. The end of the test also asserts that the proxy reads no body any more.
func newWorld(t *testing.T, o world.Setup) (w *world.World) {
	t.Helper()
	t.Cleanup(func() { readsNothing(t, w) })
	w = world.New(t, o)
	return w
}

// eachProtocol is world.EachProtocol. Each subtest also ends with the assertion of newWorld.
func eachProtocol(t *testing.T, f func(t *testing.T, proto string, open func(world.Setup) (*world.World, *http.Client))) {
	world.EachProtocol(t, func(t *testing.T, proto string, open func(world.Setup) (*world.World, *http.Client)) {
		f(t, proto, func(o world.Setup) (w *world.World, c *http.Client) {
			t.Cleanup(func() { readsNothing(t, w) })
			w, c = open(o)
			return w, c
		})
	})
}

func readsNothing(t *testing.T, w *world.World) {
	if w == nil { // it did not start
		return
	}
	if n := w.Reading(); n != 0 {
		t.Errorf("got %d bodies in progress", n)
	}
}
