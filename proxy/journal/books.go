package journal

import (
	"context"
	"log/slog"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
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

	candidates memory[candidate]    // guarded by mu
	scores     memory[abi.RowScore] // guarded by mu
}

// maxCandidates limits the candidates that a Ring keeps, to about 27 MB: the candidates of a request
// are as many as the targets of its model. With more than 64 of them, only the later records have theirs.
const maxCandidates = 64 * RingSize

// maxScores limits the scores of single scorers that a Ring keeps, to 16 MB.
const maxScores = 512 * RingSize

// memory counts the memory of a Ring for one kind of entries of its records.
type memory[T any] struct {
	entries int    // for which the records have memory
	dropped uint64 // the records of so many first puts have no memory for entries
}

// maxKeptTiming limits the timing that an explanation keeps of a leg, in bytes.
const maxKeptTiming = 1 << 10

// put copies the record of a request that has ended into the memory of the oldest record.
func (s *Ring) put(r *Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := &s.ring[s.puts%RingSize]
	s.puts++
	rows, fallbacks, scorings, units := kept.rows, kept.fallbacks[:0], kept.scorings[:0], kept.units[:0]
	candidates := s.candidates.get(s, len(r.candidates), maxCandidates, kept, (*Record).dropCandidates)
	scores := s.scores.get(s, len(r.scores), maxScores, kept, (*Record).dropScores)
	*kept = *r
	kept.candidates, kept.fallbacks = append(candidates, r.candidates...), append(fallbacks, r.fallbacks...)
	kept.scorings, kept.scores, kept.units = append(scorings, r.scorings...), append(scores, r.scores...), append(units, r.units...)
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

// dropCandidates returns the memory of the record's candidates, and drops them.
func (r *Record) dropCandidates(oldest bool) []candidate {
	entries := r.candidates
	r.candidates, r.incomplete = nil, r.incomplete || oldest
	return entries
}

// dropScores returns the memory of the record's scores, and drops them.
func (r *Record) dropScores(bool) []abi.RowScore {
	entries := r.scores
	r.scores = nil
	return entries
}

// get returns the memory for n entries of the last put of s: that of its slot, or that of the oldest
// records, which lose their entries. drop takes the entries of a record; oldest is false for the slot.
// The caller holds s.mu.
func (m *memory[T]) get(s *Ring, n, most int, slot *Record, drop func(r *Record, oldest bool) []T) []T {
	entries := drop(slot, false)[:0]
	if cap(entries) >= n {
		return entries
	}
	m.entries -= cap(entries)
	if s.puts > RingSize {
		m.dropped = max(m.dropped, s.puts-RingSize)
	}
	for ; m.entries+n > most && m.dropped < s.puts-1; m.dropped++ {
		entries = drop(s.at(m.dropped), true)[:0]
		m.entries -= cap(entries)
	}
	if cap(entries) < n {
		entries = make([]T, 0, n)
	}
	m.entries += cap(entries)
	return entries
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
