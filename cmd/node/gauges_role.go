package node

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/proxy/engine/saturation"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// collectRoles sends the gauges by model and role.
func (g *fleetGauges) collectRoles(ch chan<- prometheus.Metric) {
	for key, l := range saturation.Roles(g.registry.Snapshot(), time.Now()) {
		if len(key.Model) > telemetry.MaxModelName {
			continue
		}
		gauge := func(d *prometheus.Desc, v float64) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, key.Model, key.Role.String())
		}
		gauge(readyDesc, float64(l.Ready))
		gauge(roleRunDesc, float64(l.Running))
		gauge(roleWaitDesc, float64(l.Waiting))
		gauge(saturateDesc, l.Seconds())
	}
}
