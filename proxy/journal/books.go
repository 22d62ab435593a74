package journal

import (
	"context"
	"log/slog"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/accesslog"
	"github.com/pdproxy/pdproxy/proxy/balance"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// Books has the destinations to which the journals of all requests of a process write. It
// is safe for concurrent use.
type Books struct {
	Ended   Ring    // the requests that ended last
	Running Running // the requests that run

	metrics *telemetry.Metrics
	tracer  *telemetry.Tracer // nil: no spans
	access  *accesslog.Log    // nil: no access log
	log     *slog.Logger
}

// NewBooks returns books. tracer may be nil: then there are no spans. worker may be nil: then no
// other process needs the number of requests that run here.
func NewBooks(metrics *telemetry.Metrics, tracer *telemetry.Tracer, access *accesslog.Log, log *slog.Logger, worker *balance.Worker) *Books {
	return &Books{Running: Running{worker: worker}, metrics: metrics, tracer: tracer, access: access, log: log}
}

// LogsAccess reports whether ended requests go to the access log.
func (b *Books) LogsAccess() bool { return b.access != nil && b.access.On.Load() }

// Running is the set of requests that run now. It is safe for concurrent use.
type Running struct {
	mu     sync.Mutex
	views  []*view         // unordered; guarded by mu
	idle   chan struct{}   // closed when no request runs; nil: no goroutine waits; guarded by mu
	worker *balance.Worker // receives the number of running requests; nil: no other process needs the number
}

// view is the part of a running request that other goroutines may read. While the view is
// in the set, only the placement changes, and always as a whole.
type view struct {
	requestID string
	start     time.Time
	placed    atomic.Pointer[coordinator.Placement]
	place     int // in views, counted from 1; 0: not in the set; guarded by the set's mu
}

// RunningRow is one row of GET /v1/exchanges.
type RunningRow struct {
	RequestID string  `json:"request_id"`
	AgeMS     float64 `json:"age_ms"`
	Flow      string  `json:"flow"`
	Prefill   string  `json:"prefill"`
	Decode    string  `json:"decode"`
}

func (r *Running) add(v *view) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.views = append(r.views, v)
	v.place = len(r.views)
	if r.worker != nil {
		r.worker.Exchange(1)
	}
}

func (r *Running) remove(v *view) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if v.place == 0 {
		return
	}
	end := len(r.views) - 1
	last := r.views[end]
	r.views[v.place-1], last.place = last, v.place
	r.views[end], v.place = nil, 0
	r.views = r.views[:end]
	if r.worker != nil {
		r.worker.Exchange(-1)
	}
	if end == 0 && r.idle != nil {
		close(r.idle)
		r.idle = nil
	}
}

// Wait returns when no request runs, or when ctx ends.
func (r *Running) Wait(ctx context.Context) {
	r.mu.Lock()
	if len(r.views) == 0 {
		r.mu.Unlock()
		return
	}
	if r.idle == nil {
		r.idle = make(chan struct{})
	}
	idle := r.idle
	r.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
	}
}

// List returns the running requests, oldest first.
func (r *Running) List(now time.Time) []RunningRow {
	r.mu.Lock()
	rows := make([]RunningRow, 0, len(r.views))
	for _, v := range r.views {
		row := RunningRow{RequestID: v.requestID, AgeMS: millis(now.Sub(v.start))}
		if p := v.placed.Load(); p != nil {
			row.Flow, row.Prefill, row.Decode = p.Flow.String(), p.Prefill.Name(), p.Decode.Name()
		}
		rows = append(rows, row)
	}
	r.mu.Unlock()
	sort.Slice(rows, func(i, j int) bool { return rows[i].AgeMS > rows[j].AgeMS })
	return rows
}

// Len returns how many requests run.
func (r *Running) Len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.views)
}

// RingSize is how many ended requests can be explained and appear in /perf_metrics.
const RingSize = 4096

// Ring keeps the records of the requests that ended last. It reuses its memory. The zero
// value is empty. It is safe for concurrent use.
type Ring struct {
	mu   sync.Mutex
	ring [RingSize]Record // guarded by mu
	puts uint64           // number of calls of put; guarded by mu

	candidates int    // candidates for which the records have memory; guarded by mu
	dropped    uint64 // the records of so many first puts have no memory for candidates; guarded by mu
}

// maxCandidates limits the candidates that a Ring keeps, to about 27 MB: the candidates of a request
// are as many as the targets of its model. With more than 64 of them, only the later records have theirs.
const maxCandidates = 64 * RingSize

// maxKeptTiming limits the timing that an explanation keeps of a leg, in bytes.
const maxKeptTiming = 1 << 10

// put copies the record of a request that has ended into the memory of the oldest record.
func (s *Ring) put(r *Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := &s.ring[s.puts%RingSize]
	s.puts++
	rows, candidates, fallbacks := kept.rows, s.memoryFor(len(r.candidates), kept), kept.fallbacks[:0]
	*kept = *r
	kept.candidates, kept.fallbacks = append(candidates, r.candidates...), append(fallbacks, r.fallbacks...)
	kept.rows = slices.Grow(rows[:0], len(r.rows))[:len(r.rows)]
	for i, row := range r.rows {
		if kept.rows[i] == nil {
			kept.rows[i] = new(Leg)
		}
		*kept.rows[i] = *row
		t := &kept.rows[i].timing
		t.Steps, t.Chunks = "", "" // an explanation does not show these
		if len(t.ServerTiming)+len(t.StartEnd) > maxKeptTiming {
			*t = connector.Timing{}
		}
	}
}

// memoryFor returns the memory for n candidates of the last put: that of its slot, or that of the
// oldest records, which lose their candidates. The caller holds mu.
func (s *Ring) memoryFor(n int, slot *Record) []candidate {
	memory := slot.candidates[:0]
	if cap(memory) >= n {
		return memory
	}
	s.candidates -= cap(memory)
	if s.puts > RingSize {
		s.dropped = max(s.dropped, s.puts-RingSize)
	}
	for ; s.candidates+n > maxCandidates && s.dropped < s.puts-1; s.dropped++ {
		oldest := s.at(s.dropped)
		s.candidates -= cap(oldest.candidates)
		memory, oldest.candidates, oldest.incomplete = oldest.candidates[:0], nil, true
	}
	if cap(memory) < n {
		memory = make([]candidate, 0, n)
	}
	s.candidates += cap(memory)
	return memory
}

// at returns the record of the put with that number, counted from 0. Numbers that differ by
// a multiple of RingSize have the same record. The caller holds mu.
func (s *Ring) at(n uint64) *Record { return &s.ring[n%RingSize] }

// Get explains the request of that id: the last one, if several had it. Get looks at all
// records, because an index would cost every request more than the few lookups do.
func (s *Ring) Get(id string) (Explanation, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.ring {
		if r := s.at(s.puts + RingSize - 1 - uint64(i)); r.RequestID == id && id != "" {
			return r.explain(), true
		}
	}
	return Explanation{}, false
}

// PerfRows returns a row of each request, oldest first.
func (s *Ring) PerfRows() []PerfRow {
	s.mu.Lock()
	defer s.mu.Unlock()
	rows := []PerfRow{}
	for i := range s.ring {
		if r := s.at(s.puts + uint64(i)); r.RequestID != "" {
			rows = append(rows, r.perfRow())
		}
	}
	return rows
}
