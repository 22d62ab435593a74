package scaling

import (
	"math"
	"testing"
	"time"
)

// rule decides the number of replicas of one role, as KEDA and Kubernetes' horizontal pod
// autoscaler do for a ScaledObject whose triggers have the type AverageValue.
type rule struct {
	triggers    []trigger
	least, most int           // replicas
	window      time.Duration // a scale down uses the largest number wanted in this time
	step        time.Duration // a scale down removes at most one replica in this time
	cooldown    time.Duration // without work, before the last replica ends

	wanted []want
	active time.Time // when a trigger last saw work
	shrunk time.Time // when the last replica was removed
}

// trigger is one query of a ScaledObject.
type trigger struct {
	query      string
	threshold  float64 // value for each replica
	activation float64 // a larger value is work
}

type want struct {
	at       time.Time
	replicas int
}

// tolerance is the change of the ratio of value and threshold that the autoscaler ignores.
const tolerance = 0.1

// replicas returns the number of replicas for the values of the triggers. Without replicas
// the autoscaler does nothing: KEDA starts and stops the last replica.
func (r *rule) replicas(now time.Time, present int, values []float64) int {
	for i, v := range values {
		if v > r.triggers[i].activation {
			r.active = now
		}
	}
	switch idle := now.Sub(r.active); {
	case r.least == 0 && idle > 0 && (present == 0 || idle >= r.cooldown):
		r.wanted = nil
		return 0
	case present == 0:
		return max(1, r.least)
	}
	n := 0
	for i, v := range values {
		n = max(n, r.triggers[i].replicas(present, v))
	}
	return r.slowly(now, present, min(max(n, 1, r.least), r.most))
}

// replicas returns the number of replicas that one trigger wants.
func (t *trigger) replicas(present int, value float64) int {
	if math.Abs(value/(t.threshold*float64(present))-1) <= tolerance {
		return present
	}
	return int(math.Ceil(value / t.threshold))
}

// slowly limits a scale down.
func (r *rule) slowly(now time.Time, present, n int) int {
	for len(r.wanted) > 0 && now.Sub(r.wanted[0].at) > r.window {
		r.wanted = r.wanted[1:]
	}
	r.wanted = append(r.wanted, want{now, n})
	if n >= present {
		return n
	}
	for _, w := range r.wanted {
		n = max(n, w.replicas)
	}
	if n >= present || now.Sub(r.shrunk) < r.step {
		return present
	}
	r.shrunk = now
	return present - 1
}

func TestRule(t *testing.T) {
	r := rule{
		triggers: []trigger{{threshold: 4}, {threshold: 100, activation: 1}},
		least:    0, most: 5, window: 10 * time.Second, step: 2 * time.Second, cooldown: 20 * time.Second,
	}
	start := time.Unix(0, 0)
	for i, tt := range []struct {
		after         int
		present       int
		value, other  float64
		want          int
		wantedBecause string
	}{
		{0, 0, 0, 1, 0, "the second trigger sees no work yet"},
		{1, 0, 0, 2, 1, "the second trigger sees work"},
		{2, 1, 0, 2, 1, "the least while there is work"},
		{3, 1, 4.3, 2, 1, "within the tolerance"},
		{4, 1, 4.5, 2, 2, "above the tolerance"},
		{5, 2, 8, 250, 3, "the second trigger wants more"},
		{6, 3, 100, 0, 5, "the most"},
		{8, 5, 4, 0, 5, "5 were wanted 2 s ago"},
		{16, 5, 4, 0, 5, "5 were wanted 10 s ago"},
		{17, 5, 4, 0, 4, "one at a time"},
		{18, 4, 4, 0, 4, "one was removed 1 s ago"},
		{19, 4, 4, 0, 3, "one was removed 2 s ago"},
		{21, 3, 0, 0, 2, "one was removed 2 s ago, without work"},
		{38, 2, 0, 1, 1, "no work for 19 s"},
		{39, 1, 0, 1, 0, "no work for 20 s"},
		{41, 0, 0.1, 0, 1, "the first trigger sees work"},
	} {
		if got := r.replicas(start.Add(time.Duration(tt.after)*time.Second), tt.present, []float64{tt.value, tt.other}); got != tt.want {
			t.Errorf("step %d: %d replicas, want %d: %s", i, got, tt.want, tt.wantedBecause)
		}
	}
}
