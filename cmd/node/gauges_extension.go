package node

import (
	"cmp"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/engine/saturation"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// showAs makes the metrics of this process appear by the names of metrics.names, too. Only the
// process that knows the engines shows the gauges of the pool.
func (n *Node) showAs(cfg *config.Config, reg prometheus.Registerer) {
	names := cfg.Metrics.Names
	pool, _, _ := strings.Cut(cfg.EPP.Pool, ".")
	pool = cmp.Or(pool, cfg.Fleet.Name)
	n.metrics.ShowAs(reg, names, pool)
	if len(names) > 0 && n.options.Role != RoleWorker {
		reg.MustRegister(&poolGauges{registry: n.registry, limits: n.saturation, pool: pool, version: n.options.Version, gauges: telemetry.NewExtensionGauges(names)})
	}
}

// saturation returns the limits from which on engines are saturated; a reload may change them.
func (n *Node) saturation() saturation.Limits {
	l := n.cfg.Load().Limits
	return saturation.Limits{QueueDepth: l.SaturationQueueDepth, KVUsage: l.SaturationKVUsage}
}

// poolGauges are the gauges of the engines by the names of other endpoint pickers.
type poolGauges struct {
	registry      *engine.Registry
	limits        func() saturation.Limits
	pool, version string
	gauges        *telemetry.ExtensionGauges
}

// Describe implements prometheus.Collector.
func (g *poolGauges) Describe(ch chan<- *prometheus.Desc) { g.gauges.Describe(ch) }

// Collect implements prometheus.Collector. A rank without a report is left out of the means.
func (g *poolGauges) Collect(ch chan<- prometheus.Metric) {
	var usage, waiting, running spread
	ready := 0
	for _, i := range g.registry.Snapshot().Instances {
		if i.State() != engine.Ready || i.AllAsleep() {
			continue
		}
		ready++
		for rank := range i.Load {
			report, reported := i.Load[rank].Reported()
			if !reported {
				continue
			}
			usage.add(float64(report.Usage))
			waiting.add(float64(report.Waiting))
			running.add(float64(report.Running))
			name := i.Spec.Name
			if len(i.Load) > 1 {
				name += "-rank-" + strconv.Itoa(rank)
			}
			g.gauges.Send(ch, "per_pod_queue_size", float64(report.Waiting), g.pool, name)
			g.gauges.Send(ch, "per_endpoint_queue_size", float64(report.Waiting), g.pool, name)
		}
	}
	for end, s := range map[string]*spread{"kv_cache_utilization": &usage, "queue_size": &waiting, "running_requests": &running} {
		mean, deviation := s.values()
		g.gauges.Send(ch, "average_"+end, mean, g.pool)
		g.gauges.Send(ch, "std_dev_"+end, deviation, g.pool)
	}
	if limits := g.limits(); limits.QueueDepth > 0 {
		g.gauges.Send(ch, "pool_saturation", saturation.Pool(g.registry.Snapshot(), limits, time.Now()), g.pool, "effective")
	}
	g.gauges.Send(ch, "ready_pods", float64(ready), g.pool)
	g.gauges.Send(ch, "ready_endpoints", float64(ready), g.pool)
	g.gauges.Send(ch, "info", 1, "", g.version)
}

// spread computes the mean and the standard deviation of values.
type spread struct{ n, sum, squares float64 }

func (s *spread) add(v float64) { s.n, s.sum, s.squares = s.n+1, s.sum+v, s.squares+v*v }

// values returns 0 and 0 without a value.
func (s *spread) values() (mean, deviation float64) {
	if s.n == 0 {
		return 0, 0
	}
	mean = s.sum / s.n
	return mean, math.Sqrt(max(0, s.squares/s.n-mean*mean))
}
