package journal

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
)

// record has the events of one request. It is the source of the request's explanation,
// its spans and its row of /perf_metrics. Its memory is reused. Both legs of a request
// may call leg, fallback, timed and timing at the same time.
type record struct {
	RequestID string
	DisaggID  uint64
	Model     string // that serves the request
	Requested string // the client's name for it, if that is a name of [[model]]; else ""
	Stream    bool
	Flow      abi.Flow
	Policy    string
	Start     time.Time
	Placing   time.Time // start of the last placement
	Placed    time.Time // time of the first placement
	FirstByte time.Time // when the client got the first event or the whole answer
	End       time.Time
	Status    int
	Outcome   telemetry.Outcome
	Usage     openai.Usage

	coordination    string            // the sidecar's policy; "" on a proxy that is no sidecar
	pick            *Pick             // of an ext_proc picker; nil: none was asked
	turn            conversation.Turn // zero: no policy needs conversations
	prefill, decode string            // engine names of the last placement
	candidates      []candidate
	scored          bool       // the policy gave the candidates scores
	notes           []string   // notes of policies, then notes of filters
	mu              sync.Mutex // guards rows, legs, fallbacks while two legs run
	rows            []*Leg     // reused memory
	legs            int        // how many of rows are those of this request
	fallbacks       []coordinator.Fallback
}

// candidate is one target that the last placement could choose.
type candidate struct {
	engine string
	rank   int
	facts  abi.Candidate
}

// Leg is the row of one leg. The goroutine that runs the leg owns it until the leg has
// ended; the journal writes it.
type Leg struct {
	Phase abi.Phase // does not change
	Start time.Time // does not change

	id        string // the leg's request id as the engine got it; "" if the protocol has none
	engine    string
	rank      int
	attempt   int
	head      time.Time
	firstByte time.Time
	ended     time.Time
	status    int
	reason    string           // why it failed; "" for success
	failed    bool             // by the engine's or the network's fault
	timing    connector.Timing // the engine's report of the leg's timing
}

func (r *record) open(id string, now time.Time) {
	r.RequestID, r.Start = id, now
}

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
func (r *record) leg(phase abi.Phase, t engine.Target, attempt int, id string) *Leg {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.legs == len(r.rows) {
		r.rows = append(r.rows, new(Leg))
	}
	row := r.rows[r.legs]
	r.legs++
	*row = Leg{Phase: phase, id: id, engine: t.Name(), rank: t.Rank, attempt: attempt, Start: time.Now()}
	return row
}

func (r *record) fallback(what, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fallbacks = append(r.fallbacks, coordinator.Fallback{What: what, Reason: reason})
}

func (r *record) firstByte(row *Leg, now time.Time) {
	r.FirstByte = now
	if row != nil {
		row.firstByte = now
	}
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
		*row = Leg{}
	}
	*r = record{rows: r.rows, candidates: r.candidates[:0], fallbacks: r.fallbacks[:0]}
}

func (l *Leg) answered(now time.Time, status int) { l.head, l.status = now, status }

func (l *Leg) end(now time.Time, reason string) { l.ended, l.reason = now, reason }
