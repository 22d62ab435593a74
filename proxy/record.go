package proxy

import (
	"net/http"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// record is what one exchange did: the source of its explain entry, its spans
// and its row of /perf_metrics. The exchange owns it and reuses its memory; only
// leg and fallback may be called by two legs at once.
type record struct {
	RequestID string
	DisaggID  uint64
	Model     string
	Stream    bool
	Flow      abi.Flow
	Policy    string
	Start     time.Time
	Placing   time.Time // when the last placement was asked for
	Placed    time.Time // when the first placement was there
	FirstByte time.Time // when the client got the first event or the whole answer
	End       time.Time
	Status    int
	Outcome   telemetry.Outcome
	Usage     openai.Usage

	coordination    string            // the sidecar's policy; "" on a proxy that is none
	turn            conversation.Turn // zero: nobody asked
	prefill, decode string            // engine names of the last placement
	candidates      []candidate
	scored          bool       // the policy gave the candidates scores
	notes           []string   // of policies, then of filters
	mu              sync.Mutex // guards rows, legs, fallbacks while two legs run
	rows            []*legRow  // reused memory
	legs            int        // how many of rows are this exchange's
	fallbacks       []coordinator.Fallback
}

// candidate is one target that the last placement could choose.
type candidate struct {
	engine string
	rank   int
	facts  abi.Candidate
}

// legRow is one leg. The goroutine that runs the leg owns it until the leg
// has ended.
type legRow struct {
	Phase     abi.Phase
	ID        string // as the engine was told it, where its protocol has one
	Engine    string
	Rank      int
	Attempt   int
	Start     time.Time
	Head      time.Time
	FirstByte time.Time
	End       time.Time
	Status    int
	Error     string

	timing  connector.Timing // what the engine said of it
	target  engine.Target
	a       *attempt  // whose leg it is, if that can be left
	grant   bool      // the retry budget has given a retry to whoever leaves it
	mute    time.Time // since when its engine is silent and there is nobody else; guarded by the client that asks (Leave)
	starved bool      // it was left because prefill is silent, from where its KV should come
	short   bool      // the plan policy's limit bounds its first byte

	// The request under way; its memory is reused.
	request upstream.Request
	fields  []upstream.Field
	body    [1][]byte
}

// free drops what the request that has been sent refers to.
func (l *legRow) free() {
	clear(l.fields)
	l.fields, l.body, l.request = l.fields[:0], [1][]byte{}, upstream.Request{}
}

func (r *record) open(id string, now time.Time) {
	r.RequestID, r.Start = id, now
}

func (r *record) placing(now time.Time) { r.Placing = now }

// place notes a placement and the table it was chosen from.
func (r *record) place(p *coordinator.Placement) {
	if r.Placed.IsZero() {
		r.Placed = time.Now()
	}
	r.DisaggID, r.Flow, r.Policy, r.turn = p.ID, p.Flow, p.Policy, p.Turn
	r.prefill, r.decode = p.Prefill.Name(), p.Decode.Name()
	r.candidates, r.scored = r.candidates[:0], p.Facts.Scored
	for i, c := range p.Facts.Candidates {
		t := p.Targets[i]
		r.candidates = append(r.candidates, candidate{engine: t.Name(), rank: t.Rank, facts: c})
	}
	r.notes = append(r.notes, p.Notes...)
}

// leg begins a row for one leg.
func (r *record) leg(phase abi.Phase, t engine.Target, attempt int, id string) *legRow {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.legs == len(r.rows) {
		r.rows = append(r.rows, new(legRow))
	}
	row := r.rows[r.legs]
	r.legs++
	*row = legRow{Phase: phase, ID: id, Engine: t.Name(), Rank: t.Rank, Attempt: attempt, Start: time.Now(), target: t, fields: row.fields}
	return row
}

// fallback counts a deviation from what was configured and shows it in the record.
// Both legs of an exchange may call it at the same time.
func (x *exchange) fallback(what, reason string) {
	x.s.deps.Metrics.Fallback(what, reason)
	x.rec.fallback(what, reason)
}

func (r *record) fallback(what, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fallbacks = append(r.fallbacks, coordinator.Fallback{What: what, Reason: reason})
}

// firstByte notes that the client's answer begins now. row is the leg that answers; nil
// if the answer is that of prefill alone.
func (x *exchange) firstByte(row *legRow) {
	now := time.Now()
	x.rec.firstByte(row, now)
	if x.warm {
		return
	}
	x.s.deps.Metrics.FirstToken(now.Sub(x.rec.Start))
	x.informFirstByte(now)
}

func (r *record) firstByte(row *legRow, now time.Time) {
	r.FirstByte = now
	if row != nil {
		row.FirstByte, row.short = now, false
	}
}

func (r *record) close(now time.Time, o telemetry.Outcome, u openai.Usage) {
	r.End, r.Outcome, r.Usage = now, o, u
}

// expose adds the placement to the client's answer.
func (r *record) expose(h http.Header) {
	if r.prefill != "" {
		h.Set("X-Pdproxy-Prefill", r.prefill)
	}
	h.Set("X-Pdproxy-Decode", r.decode)
	h.Set("X-Pdproxy-Flow", r.Flow.String())
}

// reset empties the record and keeps its memory.
func (r *record) reset() {
	clear(r.candidates)
	for _, row := range r.rows[:r.legs] {
		*row = legRow{fields: row.fields}
	}
	*r = record{rows: r.rows, candidates: r.candidates[:0], fallbacks: r.fallbacks[:0]}
}

func (l *legRow) head(now time.Time, status int) { l.Head, l.Status = now, status }

func (l *legRow) end(now time.Time, reason string) { l.End, l.Error = now, reason }
