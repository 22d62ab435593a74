package proxy_test

import (
	"testing"

	"github.com/pdproxy/pdproxy/proxy/proxytest"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

func TestMain(m *testing.M) { proxytest.Main(m) }

// newWorld is world.New. The end of the test also asserts that the proxy reads no body any more.
func newWorld(t *testing.T, o world.Setup) *world.World {
	t.Helper()
	var w *world.World
	t.Cleanup(func() {
		if w == nil {
			return
		}
		if n := w.Reading(); n != 0 {
			t.Errorf("got %d bodies in progress", n)
		}
	})
	w = world.New(t, o)
	return w
}
