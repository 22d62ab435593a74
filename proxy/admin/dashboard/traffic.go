package dashboard

import (
	"maps"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// Window is the time over which the page shows rates and percentiles.
const Window = 10 * time.Second

// Figures are the traffic of all processes over some time. Rates are per second.
type Figures struct {
	Requests   float64     `json:"requests"` // that ended
	Failed     float64     `json:"failed"`   // of Requests, those that an engine or the proxy failed
	Prompt     float64     `json:"prompt_tokens"`
	Cached     float64     `json:"cached_tokens"`
	Output     float64     `json:"output_tokens"`
	Events     float64     `json:"events"` // of streams
	Retries    float64     `json:"retries"`
	Shed       float64     `json:"shed"`
	Evicted    float64     `json:"evicted"` // running requests that ended for waiting ones
	FailedLegs float64     `json:"failed_legs"`
	TTFT       Percentiles `json:"ttft_ms"`
	ITL        Percentiles `json:"itl_ms"` // time between two reads of a stream
	Gauges
}

// Gauges are the values of one moment, or the largest values of several moments.
type Gauges struct {
	Running     int `json:"running"`
	Waiting     int `json:"waiting"`
	EnginesDown int `json:"engines_down"` // engines that do not answer probes
}

// most returns the larger of each value.
func (g Gauges) most(o Gauges) Gauges {
	return Gauges{max(g.Running, o.Running), max(g.Waiting, o.Waiting), max(g.EnginesDown, o.EnginesDown)}
}

// Traffic is the traffic of all processes in the last Window.
type Traffic struct {
	Figures
	Outcomes  map[string]float64 `json:"outcomes"`   // Requests by outcome, without those that are 0
	LegErrors map[string]float64 `json:"leg_errors"` // FailedLegs by engine, without those that are 0
}

// Percentiles are estimates from the buckets of a histogram, in milliseconds; nil without an
// observation.
type Percentiles struct {
	P50 *float64 `json:"p50"`
	P95 *float64 `json:"p95"`
	P99 *float64 `json:"p99"`
}

// Meter computes Traffic from the totals of processes. A process that does not report adds
// nothing until it reports again; a new process counts from its first report. One goroutine
// uses a Meter. The zero value is ready for use.
type Meter struct {
	last    map[string]telemetry.Totals // by process
	sum     telemetry.Totals            // growth of all processes since the first report
	samples []sample                    // of the last Window and the one before it; oldest first
}

// late is how much later than its tick a sample may be.
const late = 500 * time.Millisecond

// sample is the sum at a time.
type sample struct {
	at  time.Time
	sum telemetry.Totals
}

// Report adds the present totals of a process.
func (m *Meter) Report(process string, now telemetry.Totals) {
	if m.last == nil {
		m.last = make(map[string]telemetry.Totals)
	}
	if before, ok := m.last[process]; ok {
		m.sum = grown(m.sum, before, now)
	} else if m.sum.InterEvent.Counts == nil {
		m.sum = grown(m.sum, now, now) // no growth: only the bounds
	}
	m.last[process] = now
}

// Clone returns a Meter that continues with the same samples.
func (m *Meter) Clone() Meter {
	return Meter{last: maps.Clone(m.last), sum: m.sum, samples: slices.Clone(m.samples)}
}

// Forget drops a process. If the process reports again, it counts as a new one.
func (m *Meter) Forget(process string) { delete(m.last, process) }

// Sample notes the sum of the reports. Call it after the reports of the moment now.
func (m *Meter) Sample(now time.Time) {
	m.samples = append(m.samples, sample{now, m.sum})
	for len(m.samples) > 2 && now.Sub(m.samples[1].at) >= Window-late {
		m.samples = m.samples[1:]
	}
}

// Traffic returns the traffic of the last Window until the last sample, or since the first sample,
// and the time between the two.
func (m *Meter) Traffic() (t Traffic, took time.Duration) {
	first, last := m.samples[0], m.samples[len(m.samples)-1]
	took = last.at.Sub(first.at)
	return traffic(first.sum, last.sum, took.Seconds()), took
}

// harmless are the outcomes that are no failure of an engine or of the proxy.
var harmless = []string{
	telemetry.OutcomeNone.String(), telemetry.OutcomeOK.String(), telemetry.OutcomeClientError.String(), telemetry.OutcomeCancelled.String(),
}

// traffic returns the traffic between two sums.
func traffic(from, to telemetry.Totals, took float64) Traffic {
	t := Traffic{Outcomes: rates(from.Outcomes, to.Outcomes, took), LegErrors: rates(from.LegErrors, to.LegErrors, took)}
	t.TTFT, t.ITL = percentiles(from.FirstToken, to.FirstToken), percentiles(from.InterEvent, to.InterEvent)
	for outcome, rate := range t.Outcomes {
		t.Requests += rate
		if !slices.Contains(harmless, outcome) {
			t.Failed += rate
		}
	}
	for _, rate := range t.LegErrors {
		t.FailedLegs += rate
	}
	if took > 0 {
		t.Retries, t.Shed = (to.Retries-from.Retries)/took, (to.Shed-from.Shed)/took
		t.Evicted = (to.Evicted - from.Evicted) / took
		t.Events = float64(count(to.InterEvent)-count(from.InterEvent)) / took
	}
	tokens := rates(from.Tokens, to.Tokens, took)
	t.Prompt, t.Cached, t.Output = tokens["prompt"], tokens["cached"], tokens["completion"]
	return t
}

// grown returns sum and the growth from before to now. It changes none of its arguments.
func grown(sum, before, now telemetry.Totals) telemetry.Totals {
	return telemetry.Totals{
		Outcomes:   grownMap(sum.Outcomes, before.Outcomes, now.Outcomes),
		Tokens:     grownMap(sum.Tokens, before.Tokens, now.Tokens),
		LegErrors:  grownMap(sum.LegErrors, before.LegErrors, now.LegErrors),
		Retries:    sum.Retries + max(0, now.Retries-before.Retries),
		Shed:       sum.Shed + max(0, now.Shed-before.Shed),
		Evicted:    sum.Evicted + max(0, now.Evicted-before.Evicted),
		FirstToken: grownBuckets(sum.FirstToken, before.FirstToken, now.FirstToken),
		InterEvent: grownBuckets(sum.InterEvent, before.InterEvent, now.InterEvent),
	}
}

func grownMap(sum, before, now map[string]float64) map[string]float64 {
	next := maps.Clone(sum)
	if next == nil {
		next = make(map[string]float64, len(now))
	}
	for key, v := range now {
		next[key] += max(0, v-before[key])
	}
	return next
}

// grownBuckets ignores a process whose bounds differ from those of sum: it has another
// version.
func grownBuckets(sum, before, now telemetry.Buckets) telemetry.Buckets {
	if sum.Counts == nil {
		sum = telemetry.Buckets{Bounds: now.Bounds, Counts: make([]uint64, len(now.Counts))}
	}
	if !slices.Equal(sum.Bounds, now.Bounds) || len(sum.Counts) != len(now.Counts) || len(before.Counts) != len(now.Counts) {
		return sum
	}
	next := telemetry.Buckets{Bounds: sum.Bounds, Counts: slices.Clone(sum.Counts)}
	for i := range next.Counts {
		if now.Counts[i] > before.Counts[i] {
			next.Counts[i] += now.Counts[i] - before.Counts[i]
		}
	}
	return next
}

// rates returns the growth of each value per second, without those that have not grown.
func rates(from, to map[string]float64, took float64) map[string]float64 {
	list := make(map[string]float64)
	for key, v := range to {
		if d := v - from[key]; d > 0 && took > 0 {
			list[key] = d / took
		}
	}
	return list
}

// count returns the number of observations.
func count(b telemetry.Buckets) uint64 {
	if len(b.Counts) == 0 {
		return 0
	}
	return b.Counts[len(b.Counts)-1]
}

// percentiles estimates from the observations between two states of a histogram.
func percentiles(from, to telemetry.Buckets) (p Percentiles) {
	for _, of := range []struct {
		share float64
		to    **float64
	}{{.5, &p.P50}, {.95, &p.P95}, {.99, &p.P99}} {
		if v, ok := quantile(from, to, of.share); ok {
			v *= 1000
			*of.to = &v
		}
	}
	return p
}

// quantile estimates a quantile as Prometheus' histogram_quantile does: within a bucket the
// observations are spread evenly, and those above the last bound count as that bound. ok is
// false without an observation.
func quantile(from, to telemetry.Buckets, share float64) (v float64, ok bool) {
	n := count(to) - count(from)
	if n == 0 || len(to.Bounds) == 0 {
		return 0, false
	}
	rank := share * float64(n)
	lower, below := 0.0, 0.0
	for i, upper := range to.Bounds {
		upTo := float64(to.Counts[i])
		if len(from.Counts) == len(to.Counts) {
			upTo -= float64(from.Counts[i])
		}
		if upTo >= rank && upTo > below {
			return lower + (upper-lower)*(rank-below)/(upTo-below), true
		}
		lower, below = upper, upTo
	}
	return lower, true
}
