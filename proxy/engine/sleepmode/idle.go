package sleepmode

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// look puts the engines to sleep whose models no request has used for sleep.after, except encoders. It
// wakes an engine that a placement has used which began before the engine was taken out of placements.
func (m *Manager) look(now time.Time) {
	instances, leads := m.o.Registry.Snapshot().Instances, m.o.Leads()
	after := time.Duration(m.cfg.Load().After)
	var idle, needed []*engine.Instance
	m.mu.Lock()
	used := m.usedModels(instances, leads, now)
	for _, i := range instances {
		s := m.state(i)
		switch {
		case !leads:
		case s.ours && i.AllAsleep() && !i.Idle():
			needed = append(needed, i)
		case i.Role != abi.RoleEncode && i.ReportsSleep() && i.State() == engine.Ready && !busy(i, now) && !now.Before(s.rest) && now.Sub(latest(i, used)) >= after:
			idle = append(idle, i)
		}
	}
	for i := range m.engines {
		if i.Gone() {
			delete(m.engines, i)
		}
	}
	m.mu.Unlock()
	for _, i := range needed {
		m.Wake(i)
	}
	for _, i := range idle {
		if m.o.Registry.BeginSleep(i) {
			m.calls.Go(func() { m.rest(i) })
		}
	}
}

// usedModels returns when each model was last used: the latest use of any of its engines. m.mu is held.
func (m *Manager) usedModels(instances []*engine.Instance, leads bool, now time.Time) map[string]time.Time {
	used := make(map[string]time.Time)
	for _, i := range instances {
		s := m.state(i)
		if !i.AllAsleep() && (!leads || busy(i, now)) {
			s.used = now
		}
		for rank := range i.Load {
			if at := i.Load[rank].LastPlaced(); at.After(s.used) {
				s.used = at
			}
		}
		for _, model := range i.Models() {
			if s.used.After(used[model]) {
				used[model] = s.used
			}
		}
	}
	return used
}

// latest returns when a model of the engine was last used.
func latest(i *engine.Instance, used map[string]time.Time) (at time.Time) {
	for _, model := range i.Models() {
		if used[model].After(at) {
			at = used[model]
		}
	}
	return at
}

// busy reports whether the engine may have work: requests of this proxy, requests of others, or KV
// that it holds for another engine or for the next turn of a conversation. The last report of the
// engine shows requests of others and KV; a ready engine without a report counts as busy.
func busy(i *engine.Instance, now time.Time) bool {
	if !i.Idle() {
		return true
	}
	if i.State() != engine.Ready {
		return false // the engines of its model may sleep nevertheless
	}
	for rank := range i.Load {
		r, ok := i.Load[rank].Reported()
		if !ok || !r.Counts(now) || r.Running > 0 || r.Waiting > 0 || r.Usage > 0 {
			return true
		}
	}
	return false
}
