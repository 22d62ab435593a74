package journal

import "sync"

// RingSize is how many ended requests can be explained and appear in /perf_metrics.
const RingSize = 4096

// Ring keeps the records of the requests that ended last. It reuses its memory. The zero
// value is empty. It is safe for concurrent use.
type Ring struct {
	mu   sync.Mutex
	ring [RingSize]record // guarded by mu
	puts uint64           // number of calls of put; guarded by mu
}

// at returns the record of the put with that number, counted from 0. Numbers that differ by
// a multiple of RingSize have the same record. The caller holds mu.
func (s *Ring) at(n uint64) *record { return &s.ring[n%RingSize] }

// put copies the record of a request that has ended.
func (s *Ring) put(r *record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at(s.puts).copyFrom(r)
	s.puts++
}

// copyFrom copies o into the memory of r.
func (r *record) copyFrom(o *record) {
	rows, candidates, fallbacks := r.rows, r.candidates[:0], r.fallbacks[:0]
	*r = record{
		RequestID: o.RequestID, DisaggID: o.DisaggID, Model: o.Model, Requested: o.Requested, Stream: o.Stream, Flow: o.Flow,
		Policy: o.Policy, Start: o.Start, Placing: o.Placing, Placed: o.Placed, FirstByte: o.FirstByte,
		End: o.End, Status: o.Status, Outcome: o.Outcome, Usage: o.Usage, coordination: o.coordination, pick: o.pick, turn: o.turn, prefill: o.prefill, decode: o.decode,
		candidates: append(candidates, o.candidates...), rows: rows, legs: o.legs,
		fallbacks: append(fallbacks, o.fallbacks...), scored: o.scored, notes: o.notes,
	}
	for len(r.rows) < o.legs {
		r.rows = append(r.rows, new(Leg))
	}
	for i, row := range o.rows[:o.legs] {
		*r.rows[i] = *row
		r.rows[i].keepTiming()
	}
}

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
