package node

import (
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestShare: the workers of a host together are allowed what the configuration
// allows; a limit that is off stays off.
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
