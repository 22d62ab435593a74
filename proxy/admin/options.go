package admin

import (
	"log/slog"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// Options are the parts of the process that operators see and change. The comment of a field states
// if the field may be nil. All functions must be safe for concurrent use.
type Options struct {
	Config   func() *config.Config // returns the configuration that is in force
	Registry *engine.Registry
	Gatherer prometheus.Gatherer // of GET /metrics: see WholeFleet
	Policies Policies
	Workers  Workers          // of a coordinator; nil: the process has none
	Ready    http.HandlerFunc // answers GET /readyz
	Drain    func()           // makes the readiness probe fail, so that load balancers send no more requests
	Running  *journal.Running
	Ended    *journal.Ring
	Sidecar  func() *sidecar.Sidecar // returns nil if the process is no sidecar

	// The following fields are for the dashboard.
	Metrics   *telemetry.Metrics
	Waiting   func() int        // returns how many requests of Running wait for a place or for an engine
	Knowledge coordinator.State // its fields are nil in a worker
	Version   string
	// Unwatch is closed when viewers must leave. Until then, the process records the history of the
	// traffic. nil: the process has no admin address, and records nothing.
	Unwatch <-chan struct{}

	Log *slog.Logger
}
