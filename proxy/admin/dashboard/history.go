package dashboard

import (
	"slices"
	"sync"
	"time"
)

// Step is the time between two calls of History.Add.
const Step = 2 * time.Second

// Point is the traffic of one moment of a History.
type Point struct {
	Time    float64 `json:"time"`    // end of the traffic, in seconds since the Unix epoch
	Seconds float64 `json:"seconds"` // the traffic has begun so long before Time
	Figures
}

// History keeps the traffic of the last three hours. Older points are further apart. A full History
// has about 0.3 MB (TestHistoryMemory). Safe for concurrent use.
type History struct {
	mu     sync.Mutex
	levels [3]level // the finest first; guarded by mu
	meter  Meter    // as of the last Add; guarded by mu
}

// level is a ring of points with one distance.
type level struct {
	every  time.Duration // between two points
	points []Point       // a ring when it is full
	next   int           // place of the oldest point of a full ring
	last   sample        // of the last point; zero before the first moment
	most   Gauges        // since the last point
}

// NewHistory returns an empty History.
func NewHistory() *History {
	ring := func(every, keep time.Duration) level {
		return level{every: every, points: make([]Point, 0, keep/every)}
	}
	return &History{levels: [...]level{ring(Step, 10*time.Minute), ring(Window, time.Hour), ring(3*Window, 3*time.Hour)}}
}

// Add adds the moment of the last sample of m.
func (h *History) Add(m *Meter, now Gauges) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.levels {
		h.levels[i].add(m, now)
	}
	h.meter = m.Clone()
}

// Meter returns a copy of the Meter of the last Add. The copy has the traffic of the last Window, so that
// the first rates of a new viewer are those of the history. Before the first Add, the copy is empty.
func (h *History) Meter() Meter {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.meter.Clone()
}

// add adds a point if it is due. The traffic of a point begins with the point before it, but Window
// before at the latest.
func (l *level) add(m *Meter, now Gauges) {
	at := m.samples[len(m.samples)-1]
	if l.most = l.most.most(now); l.last.at.IsZero() {
		l.last = at
		return
	}
	since := at.at.Sub(l.last.at)
	if since < l.every-late {
		return
	}
	t, took := m.Traffic()
	if since > took {
		t, took = traffic(l.last.sum, at.sum, since.Seconds()), since
	}
	point := Point{Time: float64(at.at.UnixMilli()) / 1e3, Seconds: took.Seconds(), Figures: t.Figures}
	point.Gauges = l.most
	l.last, l.most = at, Gauges{}
	if len(l.points) < cap(l.points) {
		l.points = append(l.points, point)
		return
	}
	l.points[l.next] = point
	l.next = (l.next + 1) % len(l.points)
}

// Points returns all points, the oldest first: of each time those with the smallest distance.
func (h *History) Points() []Point {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := []Point{}
	for i := len(h.levels) - 1; i >= 0; i-- {
		l := &h.levels[i]
		points := slices.Concat(l.points[l.next:], l.points[:l.next])
		if len(points) > 0 {
			finer := points[0].Time
			list = slices.DeleteFunc(list, func(p Point) bool { return p.Time >= finer })
		}
		list = append(list, points...)
	}
	return list
}
