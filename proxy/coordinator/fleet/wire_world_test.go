package fleet

import (
	"context"
	"net"
	"path/filepath"
	"sync"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/access"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// world is a World that may be behind a Server and a Client.
type world struct {
	*placetest.World
	client *Client // nil before connect
	server *Server
}

func newWorld(t testing.TB, specs ...string) *world {
	return &world{World: placetest.NewWorld(t, specs...)}
}

// use makes the tests call c.
func (w *world) use(c *Client) { w.client, w.Remote = c, c }

// connect puts a socket between the tests and the world's Local.
func (w *world) connect(t testing.TB) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	w.server = NewServer(ServerOptions{Local: w.Local, Log: placetest.Quiet(), Epoch: 1})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := w.server.Serve(ctx, l); err != nil {
			t.Error(err)
		}
	})
	w.use(w.newClient(t, "unix", path))
	running.Go(func() { w.client.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	w.connected(t)
}

// newClient returns a client of the server at an address.
func (w *world) newClient(t testing.TB, network, address string) *Client {
	t.Helper()
	mint, err := disaggid.New(1, 3)
	if err != nil {
		t.Fatal(err)
	}
	certs, err := access.NewCredentials(access.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if network == "unix" {
		address = "unix:" + address
	}
	c := NewClient(ClientOptions{
		Dial:     func(ctx context.Context) (net.Conn, error) { return certs.Dial(ctx, address) },
		Fallback: placetest.Uncounted{Local: coordinator.NewLocal(w.Reg, placetest.Stub{}, placetest.Builtin(t, "auto", "least_load"), coordinator.State{}, mint, w.Counts)},
		Mirror:   placetest.Same{Reg: w.Reg}, Log: placetest.Quiet(), Observer: w.Counts, Patience: patience,
	})
	return c
}

// connected waits until the client is connected.
func (w *world) connected(t testing.TB) {
	for !w.client.Connected() {
		placetest.Pause(t)
	}
}

// unused reports whether no lease is open and no engine has load.
func (w *world) unused() bool {
	for _, i := range w.Reg.Snapshot().Instances {
		for r := range i.Load {
			if i.Load[r].Requests() != 0 || i.Load[r].Tokens() != 0 {
				return false
			}
		}
	}
	return w.Open() == 0 && w.LiveIDs() == 0
}

// patience of tests is so long that no answer is late unless a test delays it.
const patience = 1 << 40
