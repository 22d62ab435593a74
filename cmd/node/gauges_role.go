package node

import (
	"strings"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/kvaware"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// mostRoleModels bounds the models with gauges of roles: an engine chooses the names of its
// models.
const mostRoleModels = 256

// roleKey identifies the gauges of one role.
type roleKey struct {
	model string
	role  abi.Role
}

// roleLoad is the load of the ready engines of one role.
type roleLoad struct {
	ready            int
	running, waiting int64
	seconds          float64 // sum over the engines of the mean of their ranks
}

// collectRoles sends the gauges by model and role. A LoRA adapter is a model, and its
// engine counts for each of its models.
func (g *fleetGauges) collectRoles(ch chan<- prometheus.Metric) {
	for key, l := range roleLoads(g.registry.Snapshot(), time.Now()) {
		gauge := func(d *prometheus.Desc, v float64) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, key.model, key.role.String())
		}
		gauge(readyDesc, float64(l.ready))
		gauge(roleRunDesc, float64(l.running))
		gauge(roleWaitDesc, float64(l.waiting))
		gauge(saturateDesc, l.seconds/float64(max(1, l.ready)))
	}
}

// roleLoads returns the loads of all roles that engines of a model have or had.
func roleLoads(s *engine.Snapshot, now time.Time) map[roleKey]*roleLoad {
	all := make(map[roleKey]*roleLoad)
	models := s.Known()
	for _, model := range models[:min(len(models), mostRoleModels)] {
		if !utf8.ValidString(model) {
			continue // no Prometheus label may have such a value
		}
		for _, role := range s.Roles(model) {
			all[roleKey{strings.Clone(model), role}] = new(roleLoad)
		}
	}
	speed := fleetSpeed(s)
	for _, i := range s.Instances {
		if i.State() != engine.Ready {
			continue
		}
		var own roleLoad
		for rank := range i.Load {
			own.add(&i.Load[rank], i.Role, speed, now)
		}
		for _, model := range i.Models() {
			if l := all[roleKey{model, i.Role}]; l != nil {
				l.ready++
				l.running += own.running
				l.waiting += own.waiting
				l.seconds += own.seconds / float64(max(1, len(i.Load)))
			}
		}
	}
	return all
}

// add adds the load of one rank.
func (l *roleLoad) add(c *load.Counter, role abi.Role, speed float64, now time.Time) {
	v := c.View(now)
	l.running += int64(max(0, v.Requests))
	if report, ok := c.Reported(); ok {
		l.waiting += int64(max(0, report.Waiting))
	}
	micros := float64(v.PrefillMicros)
	if micros == 0 {
		micros = speed
	}
	cost := 0.0
	if role&abi.RolePrefill != 0 {
		cost += float64(max(0, v.Queued)) * micros
	}
	if role&abi.RoleDecode != 0 {
		cost += float64(max(0, v.Decode)) * costs.DecodeMicros
	}
	l.seconds += cost / 1e6
}

// costs are the costs that kv_aware uses without a measurement.
var costs = kvaware.Defaults()

// fleetSpeed returns the mean of the measured times per prompt token in µs, for ranks
// without a measurement.
func fleetSpeed(s *engine.Snapshot) float64 {
	sum, n := 0.0, 0
	for _, i := range s.Instances {
		for rank := range i.Load {
			if micros := i.Load[rank].Prefill.PerToken(); micros > 0 {
				sum += float64(micros)
				n++
			}
		}
	}
	if n == 0 {
		return costs.TokenMicros
	}
	return sum / float64(n)
}
