package node

import (
	"net"
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/takeover"
)

// TestShare: the limits of all workers of a host add up to the configured limits. A limit
// that is off stays off.
func TestShare(t *testing.T) {
	cfg := config.Default()
	cfg.Limits.MaxExchanges, cfg.Limits.Queue, cfg.Limits.PerClient = 10, 0, 5
	for _, tt := range []struct {
		role    Role
		workers int
		want    int
	}{{RoleSingle, 4, 10}, {RoleCoordinator, 4, 10}, {RoleWorker, 4, 3}, {RoleWorker, 0, 10}, {RoleWorker, 64, 1}} {
		p := Options{Role: tt.role}
		got := p.share(&cfg, tt.workers).Limits
		if got.MaxExchanges != tt.want || got.Queue != 0 || got.PerClient != 5 {
			t.Errorf("%s of %d: %+v", tt.role, tt.workers, got)
		}
		if n := p.shareEngine(config.Engine{MaxConns: 10}, tt.workers).MaxConns; n != tt.want {
			t.Errorf("%s of %d: %d connections", tt.role, tt.workers, n)
		}
		if n := p.shareEngine(config.Engine{}, tt.workers).MaxConns; n != 0 {
			t.Errorf("%s of %d: %d connections of no limit", tt.role, tt.workers, n)
		}
	}
}

// TestUseSockets: a process that does everything opens other addresses than those of its
// predecessor. A process of a fleet uses the sockets of its supervisor.
func TestUseSockets(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	socket, err := takeover.FromListener("server.listen 127.0.0.1:1", l)
	if err != nil {
		t.Fatal(err)
	}
	defer socket.File.Close()
	for _, tt := range []struct {
		role   Role
		listen string
		used   bool
	}{{RoleSingle, "127.0.0.1:1", true}, {RoleSingle, "127.0.0.1:2", false}, {RoleWorker, "127.0.0.1:2", true}, {RoleCoordinator, "127.0.0.1:1", false}} {
		cfg := config.Default()
		cfg.Server.Listen = tt.listen
		o := Options{Role: tt.role}
		if err := o.UseSockets(&cfg, []takeover.Socket{socket}); err != nil || (o.Sockets.Public != nil) != tt.used {
			t.Errorf("%s with %s: uses the socket: %v, %v", tt.role, tt.listen, o.Sockets.Public != nil, err)
		}
		o.CloseSockets()
	}
}

// TestFleetSockets: the supervisor opens the sockets of the configuration's processes, and
// no two processes accept registrations of engines.
func TestFleetSockets(t *testing.T) {
	public, admin := Socket{Name: "server.listen :1"}, Socket{Name: "admin.listen :2"}
	for name, tt := range map[string]struct {
		change func(*config.Config)
		want   []Socket
	}{
		"workers and a coordinator": {func(*config.Config) {}, []Socket{public, admin}},
		"workers of another host's coordinator": {func(c *config.Config) {
			c.Fleet.Coordinator = "10.0.0.1:7000"
			c.Discovery.MoRIIO.Listen = "tcp://127.0.0.1:5"
		}, []Socket{public}},
		"fleet.listen":           {func(c *config.Config) { c.Fleet.Listen = ":3" }, []Socket{public, admin, {Name: "fleet.listen :3"}}},
		"fleet.listen is a file": {func(c *config.Config) { c.Fleet.Listen = "unix:/run/x" }, []Socket{public, admin}},
		"engines register": {func(c *config.Config) {
			c.Discovery.MoRIIO.Listen = "tcp://127.0.0.1:5"
			c.Discovery.TRTLLM.ClusterURI, c.Discovery.TRTLLM.ClusterName = "http://127.0.0.1:6", "blue"
		}, []Socket{
			public, admin,
			{Name: "discovery.moriio.listen 127.0.0.1:5", Exclusive: true},
			{Name: "discovery.trtllm.cluster_uri 127.0.0.1:6", Exclusive: true},
		}},
	} {
		cfg := config.Default()
		cfg.Server.Listen, cfg.Admin.Listen = ":1", ":2"
		tt.change(&cfg)
		if got := FleetSockets(&cfg); !slices.Equal(got, tt.want) {
			t.Errorf("%s: FleetSockets(&cfg) = %+v, want %+v", name, got, tt.want)
		}
	}
}
