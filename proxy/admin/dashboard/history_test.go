package dashboard

import (
	"encoding/json"
	"math"
	"runtime"
	"testing"
	"time"
)

// recorded returns a history of this length. Each second one request ends; from the second hour on,
// ten end in each second. One engine is down for four seconds after 2 h.
func recorded(length time.Duration) (h *History, m *Meter) {
	h, m = NewHistory(), new(Meter)
	n := 0.0
	for age := time.Duration(0); age <= length; age += Step {
		m.Report("a", totals(n))
		m.Sample(start.Add(age))
		now := Gauges{Running: 1}
		if age > 2*time.Hour && age <= 2*time.Hour+4*time.Second {
			now.EnginesDown = 1
		}
		h.Add(m, now)
		if n += 2; age >= time.Hour {
			n += 18
		}
	}
	return h, m
}

// TestHistory: the points cover three hours without a gap, the older the further apart, and each has
// the rates of the time before it. A short trouble is in the coarse points, too.
func TestHistory(t *testing.T) {
	const length = 4 * time.Hour
	h, _ := recorded(length)
	points := h.Points()
	end := float64(start.Add(length).Unix())
	if first, last := points[0], points[len(points)-1]; last.Time != end || math.Abs(end-first.Time-3*3600) > 30 {
		t.Fatalf("the points are from %v to %v before the end", end-first.Time, end-last.Time)
	}
	down := 0
	for i, p := range points {
		if i > 0 {
			age, distance, want := end-p.Time, p.Time-points[i-1].Time, 30.0
			if age < 590 {
				want = 2
			} else if age < 3580 {
				want = 10
			}
			// Where two distances meet, the distance is between the two.
			if distance != want && (age > 600 || age < 590) && (age > 3600 || age < 3580) || distance <= 0 || distance > 30 {
				t.Fatalf("%v s before the end, the distance is %v, want %v", age, distance, want)
			}
		}
		if p.Seconds != 10 && p.Seconds != 30 || p.Running != 1 {
			t.Fatalf("got %+v", p)
		}
		if math.Abs(p.Requests-10) > 1e-9 || math.Abs(p.Output-20) > 1e-9 || p.Failed != 0 || p.TTFT.P50 == nil {
			t.Fatalf("%v s before the end: %+v", end-p.Time, p)
		}
		down += p.EnginesDown
	}
	if down != 1 {
		t.Errorf("an engine that was down is in %d points", down)
	}
	text, err := json.Marshal(points)
	if err != nil || len(text) > 400_000 {
		t.Errorf("%d bytes, %v", len(text), err)
	}
	t.Logf("%d points, %d bytes of JSON", len(points), len(text))
}

// TestHistoryBegins: a new history has no point before it knows a rate.
func TestHistoryBegins(t *testing.T) {
	if h, _ := recorded(0); len(h.Points()) != 0 {
		t.Errorf("after the first sample: %+v", h.Points())
	}
	h, _ := recorded(3 * Step)
	points := h.Points()
	if len(points) != 3 || points[0].Seconds != Step.Seconds() || math.Abs(points[0].Requests-1) > 1e-9 {
		t.Errorf("got %+v", points)
	}
}

// TestHistoryMemory: the memory of a full history. A Point has no map, and so a fixed size.
func TestHistoryMemory(t *testing.T) {
	heap := func() uint64 {
		var stats runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&stats)
		return stats.HeapAlloc
	}
	before := heap()
	h, m := recorded(4 * time.Hour)
	size := int64(heap() - before)
	t.Logf("%d kB", size>>10)
	if size > 500<<10 {
		t.Errorf("a full history has %d kB", size>>10)
	}
	runtime.KeepAlive(h)
	runtime.KeepAlive(m)
}
