package fleet

import (
	"net"
	"os"
	"testing"

	pdnode "github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// TestSuccessorFails: a coordinator replaces another's socket and then ends.
// Workers that start afterwards find the other coordinator.
func TestSuccessorFails(t *testing.T) {
	f := start(t, enginesim.ConnectorVLLMNixl, 1)
	gone := f.dir.Path("fleet.sock.gone")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: gone})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	if err := os.Rename(gone, f.dir.Path("fleet.sock")); err != nil {
		t.Fatal(err)
	}
	f.workers = append(f.workers, f.node(pdnode.RoleWorker, 1))
	testbed.Eventually(t, "both workers are connected", func() bool { return f.metric(f.coordinator, "pdproxy_fleet_workers") == 2 })
	for _, w := range f.workers {
		testbed.Eventually(t, "the worker is ready", func() bool { return f.status(w.URL()+"/health") == 200 })
	}
	f.settled()
}
