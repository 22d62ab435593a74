// Package saturation computes how much work waits in the engines of a model. The gauges of a
// process show the work, and admission holds requests back while there is too much of it. The
// package does no I/O and has no clock. Its functions take no lock.
//
// The decisions behind this package are in docs/design/engines.md.
package saturation

import (
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// Limits are the values from which on an engine is saturated.
type Limits struct {
	QueueDepth int     // requests that wait in one target; 0: no target is saturated
	KVUsage    float64 // share of KV memory in use, 0 to 1, for targets that run decode; 0: KV memory does not count
}

// Load is the load of the ready engines of one role. The zero value has no engine.
type Load struct {
	Ready            int   // engines
	Running, Waiting int64 // requests: those of the proxy and of others, and those that wait as the engines report

	seconds float64 // sum over the engines of the mean of their ranks
	targets int     // ranks of the engines
	room    int64   // requests that would run at once, of all targets with a report
	score   float64 // sum over the targets; 1: the target is saturated
}

// Seconds estimates by how many seconds the present work delays a new request: the mean of the
// engines.
func (l *Load) Seconds() float64 { return l.seconds / float64(max(1, l.Ready)) }

// Score returns the mean of the targets' scores with so many further requests. From 1 on the
// engines are saturated. The score of a target is the larger of its waiting requests and its KV
// usage, each as a share of its limit. A target without a report has the score 0.
func (l *Load) Score(further int, limits Limits) float64 {
	if l.targets == 0 || limits.QueueDepth <= 0 {
		return 0
	}
	waiting := max(0, float64(int64(further)-l.room))
	return (l.score + waiting/float64(limits.QueueDepth)) / float64(l.targets)
}

// add adds the load of one ready engine. micros is the time per prompt token of ranks without
// a measurement.
func (l *Load) add(i *engine.Instance, micros float64, limits Limits, now time.Time) {
	l.Ready++
	seconds := 0.0
	for rank := range i.Load {
		c := &i.Load[rank]
		v := c.View(now)
		l.targets++
		l.Running += int64(max(0, v.Requests))
		if report, ok := c.Reported(); ok {
			l.Waiting += int64(max(0, report.Waiting))
		}
		if waiting, room, ok := c.Waiting(now); ok {
			l.room += int64(room)
			l.score += score(waiting, v.Usage, i.Role, limits)
		}
		seconds += cost(v.Queued, v.Decode, v.PrefillMicros, micros, i.Role)
	}
	l.seconds += seconds / float64(max(1, len(i.Load)))
}

// score returns the score of one target.
func score(waiting int32, usage float32, role abi.Role, limits Limits) float64 {
	if limits.QueueDepth <= 0 {
		return 0
	}
	s := float64(waiting) / float64(limits.QueueDepth)
	if limits.KVUsage > 0 && role&abi.RoleDecode != 0 {
		s = max(s, float64(usage)/limits.KVUsage)
	}
	return s
}

// These times in µs hold without a measurement. They have the values of the parameters
// token_micros and decode_micros that kv_aware has by default.
const (
	prefillMicros = 100 // prefill of one token
	decodeMicros  = 4   // delay of a stream by one token of the streams of its target
)

// cost returns the seconds of work of one target: prompt tokens in its queue by the measured
// time of a token, and tokens of streams by decodeMicros.
func cost(queued, decode int64, measured float32, micros float64, role abi.Role) float64 {
	if measured > 0 {
		micros = float64(measured)
	}
	sum := 0.0
	if role&abi.RolePrefill != 0 {
		sum += float64(max(0, queued)) * micros
	}
	if role&abi.RoleDecode != 0 {
		sum += float64(max(0, decode)) * decodeMicros
	}
	return sum / 1e6
}

// Of reports whether the engines of a model are saturated. If they are, delay is the time by
// which their present work delays a new request, and each the time by which one further request
// delays the requests after it. further is the number of requests of the model that will
// come to the engines and that the engines' loads do not have yet. Prefill and decode count
// separately: one saturated phase is enough. Only ready engines count. A phase without a ready
// engine, and an unknown model, is not saturated.
func Of(s *engine.Snapshot, model string, further int, limits Limits, now time.Time) (delay, each time.Duration, saturated bool) {
	pool, ok := s.Pool(model)
	if !ok {
		return 0, 0, false
	}
	var prefill, decode Load
	micros := fleetMicros(s)
	for n := range pool.Ready {
		r := &pool.Ready[n]
		if r.Rank != 0 {
			continue // add counts all ranks of an engine
		}
		if r.Role&abi.RolePrefill != 0 {
			prefill.add(r.Instance, micros, limits, now)
		}
		if r.Role&abi.RoleDecode != 0 {
			decode.add(r.Instance, micros, limits, now)
		}
	}
	seconds := 0.0
	for _, l := range [...]*Load{&prefill, &decode} {
		if l.Score(further, limits) >= 1 {
			saturated = true
			seconds = max(seconds, l.Seconds())
		}
	}
	if !saturated {
		return 0, 0, false
	}
	return duration(seconds, math.MaxInt64/2), duration(step(pool, micros, now), time.Hour), true
}

// step returns by how many seconds one further request delays the requests after it: the mean
// prefill of the requests of late, which all engines that run prefill compute at the same time.
// 0 if no request has come of late. micros is as in add.
func step(pool *engine.Pool, micros float64, now time.Time) float64 {
	tokens, requests, speed := 0.0, 0.0, 0.0
	for n := range pool.Ready {
		r := &pool.Ready[n]
		if r.Role&abi.RolePrefill == 0 {
			continue
		}
		c := &r.Load[r.Rank]
		uncached, placed, _ := c.Recent(now)
		tokens += float64(uncached)
		requests += float64(placed)
		if measured := c.Prefill.PerToken(); measured > 0 {
			speed += 1 / float64(measured)
		} else {
			speed += 1 / micros
		}
	}
	if requests == 0 {
		return 0
	}
	return tokens / requests / speed / 1e6
}

// duration returns the seconds as a duration of at most so much.
func duration(seconds float64, most time.Duration) time.Duration {
	return time.Duration(min(seconds*float64(time.Second), float64(most)))
}

// Pool returns the score of the phase with more work, over all ready engines: from 1 on the engines
// are saturated.
func Pool(s *engine.Snapshot, limits Limits, now time.Time) float64 {
	var prefill, decode Load
	micros := fleetMicros(s)
	for _, i := range s.Instances {
		if i.State() != engine.Ready {
			continue
		}
		if i.Role&abi.RolePrefill != 0 {
			prefill.add(i, micros, limits, now)
		}
		if i.Role&abi.RoleDecode != 0 {
			decode.add(i, micros, limits, now)
		}
	}
	return max(prefill.Score(0, limits), decode.Score(0, limits))
}

// Key identifies the load of one role.
type Key struct {
	Model string
	Role  abi.Role
}

// maxModels bounds the models of Roles: an engine chooses the names of its models.
const maxModels = 256

// Roles returns the loads of all roles that engines of a model have or had. An engine counts
// for each of its models, and a LoRA adapter is a model.
func Roles(s *engine.Snapshot, now time.Time) map[Key]*Load {
	all := make(map[Key]*Load)
	models := s.Known()
	for _, model := range models[:min(len(models), maxModels)] {
		if !utf8.ValidString(model) {
			continue // no Prometheus label may have such a value
		}
		for _, role := range s.Roles(model) {
			all[Key{strings.Clone(model), role}] = new(Load)
		}
	}
	micros := fleetMicros(s)
	for _, i := range s.Instances {
		if i.State() != engine.Ready {
			continue
		}
		for _, model := range i.Models() {
			if l := all[Key{model, i.Role}]; l != nil {
				l.add(i, micros, Limits{}, now)
			}
		}
	}
	return all
}

// fleetMicros returns the mean of the measured times per prompt token in µs, for ranks without
// a measurement.
func fleetMicros(s *engine.Snapshot) float64 {
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
		return prefillMicros
	}
	return sum / float64(n)
}
