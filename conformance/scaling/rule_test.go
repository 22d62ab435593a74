package scaling

import (
	"math"
	"testing"
	"time"
)

// rule decides the number of replicas of one role, as the horizontal pod autoscaler does for
// a metric of the type AverageValue.
type rule struct {
	target      float64       // of the metric, for each replica
	least, most int           // replicas
	window      time.Duration // a scale down uses the largest number wanted in this time
	wanted      []want
}

type want struct {
	at       time.Time
	replicas int
}

// tolerance is the change of the ratio of metric and target that the autoscaler ignores.
const tolerance = 0.1

// replicas returns the number of replicas for the sum of the metric over all of them.
func (r *rule) replicas(now time.Time, present int, sum float64) int {
	n := present
	if present == 0 || math.Abs(sum/(r.target*float64(present))-1) > tolerance {
		n = int(math.Ceil(sum / r.target))
	}
	n = min(max(n, r.least), r.most)
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
	return min(n, present)
}

func TestRule(t *testing.T) {
	r := rule{target: 4, least: 1, most: 5, window: 10 * time.Second}
	start := time.Unix(0, 0)
	for i, tt := range []struct {
		after         time.Duration
		present       int
		sum           float64
		want          int
		wantedBecause string
	}{
		{0, 1, 0, 1, "the least"},
		{1, 1, 4.3, 1, "within the tolerance"},
		{2, 1, 4.5, 2, "above the tolerance"},
		{3, 2, 100, 5, "the most"},
		{5, 5, 4, 5, "2 s ago the rule required 5 replicas"},
		{13, 5, 4, 5, "10 s ago the rule required 5 replicas"},
		{14, 5, 8, 2, "more than 10 s ago"},
		{15, 2, 0, 2, "2 were wanted 1 s ago"},
		{26, 2, 0, 1, "the least"},
		{30, 0, 0, 1, "the minimum, from 0 replicas"},
	} {
		if got := r.replicas(start.Add(tt.after*time.Second), tt.present, tt.sum); got != tt.want {
			t.Errorf("step %d: %d replicas, want %d: %s", i, got, tt.want, tt.wantedBecause)
		}
	}
}
