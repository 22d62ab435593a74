package engine

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/load"
	"github.com/pdproxy/pdproxy/proxy/state/predict"
)

// maxPairs bounds the pair table. If it is full, a new pair replaces one that is not
// broken.
const maxPairs = 1 << 16

// Pair is the state of the connection between a prefill and a decode target: the measured
// handshake, and whether transfers work. It has its own circuit, because a failure of the
// pair alone (decode could not load the KV) does not show which engine has failed. Safe
// for concurrent use.
type Pair struct {
	Prefill, Decode Target

	table    *pairTable
	transfer load.Speed  // of the pair's transfers; tokens are prompt tokens
	proven   atomic.Bool // a further success changes nothing: KV has come, no failure counts, and the proxy does not try the pair
	circuit  circuit.Breaker
	tried    atomic.Bool // a request of the proxy itself runs through the pair
	users    atomic.Bool // the engines refused the proxy's own trial: the next trial is a user's request
	doubted  atomic.Bool // no transfer has ended since doubt; requests without another pair need not wait for the trial
	mu       sync.Mutex
	state    abi.PairState // unknown, warming or ready; broken is a state of the circuit; guarded by mu
	failures int           // since the pair was created; guarded by mu
	last     string        // kind of the last failure; guarded by mu
	since    time.Time     // time of the last change of state; guarded by mu
	under    int           // attempts in progress that began before the pair was ready; guarded by mu
	warmUps  int           // since the pair was created; guarded by mu
	next     time.Time     // time from which it may be warmed up again; guarded by mu
	noted    bool          // a transfer has ended since the proxy's own request began; guarded by mu
}

// State returns the pair's present state.
func (p *Pair) State() abi.PairState {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stateAt(time.Now())
}

// stateAt is State at now; p.mu is held. A pair whose next trial is a user's request is
// unknown until this trial ends.
func (p *Pair) stateAt(now time.Time) abi.PairState {
	switch {
	case p.blocked(now):
		return abi.PairBroken
	case p.Trial():
		return abi.PairUnknown
	}
	return p.state
}

// Begin notes that an attempt begins on the pair. fresh: the pair has transferred no KV
// yet, so the attempt must wait for the engines' handshake. The pair is warming until it
// has transferred KV, or until the last such attempt has called End.
func (p *Pair) Begin() (fresh bool) {
	if p.proven.Load() {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state == abi.PairReady {
		return false
	}
	p.under++
	p.become(abi.PairWarming)
	if p.table.reports != nil {
		p.table.reports.warms(p, 1)
	}
	return true
}

// End notes the end of an attempt for which Begin returned true.
func (p *Pair) End() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.under--; p.under == 0 && p.state == abi.PairWarming {
		p.become(abi.PairUnknown)
	}
	if p.table.reports != nil {
		p.table.reports.warms(p, -1)
	}
}

// become sets the state that holds while the circuit is closed; p.mu is held.
func (p *Pair) become(state abi.PairState) {
	now := time.Now()
	before := p.stateAt(now)
	if p.state = state; p.stateAt(now) != before {
		p.since = now
	}
	p.table.version.Add(1)
}

// Success notes that KV has come, and closes the pair's circuit.
func (p *Pair) Success() {
	if !p.proven.Load() {
		p.set("")
	}
}

// Failure notes that a transfer failed and that the failure cannot be attributed to one
// engine. kind is a label, never text of an answer. It reports whether the circuit of the
// pair has opened. The first failure of a pair that the proxy itself tries opens the
// circuit.
func (p *Pair) Failure(kind string) (opened bool) { return p.set(kind) }

// Unmet is the kind of a failure whose prefill, at the same time as decode, did not answer in
// time. For a pair without a transfer since one of its processes started, the first such
// failure opens the circuit: every further request would wait as long. SGLang's decode keeps
// the addresses of a prefill process that was replaced between two heartbeats (SGLang pull
// request 36029).
const Unmet = "prefill_timeout"

// doubt makes the circuit half open: the next transfer of the pair may fail because decode keeps
// the ports of an ended prefill process. The proxy tries the pair at once, and users' requests
// that can take another pair wait for its success. The caller notes the pair in the table.
func (p *Pair) doubt() {
	p.doubted.Store(true)
	p.circuit.Trip()
	p.circuit.Halve()
	p.table.version.Add(1)
}

// Trial reports whether the circuit of the pair is not closed: an attempt on the pair is a
// trial.
func (p *Pair) Trial() bool { return !p.circuit.Closed() }

// set applies the end of a transfer: success for kind "", or else a failure of that
// kind. A pair whose circuit opens must prove again that it works.
func (p *Pair) set(kind string) (opened bool) {
	now := time.Now()
	p.mu.Lock()
	before := p.stateAt(now)
	news := kind != "" || before != abi.PairReady || p.circuit.Failures() != 0
	if kind == "" {
		p.state = abi.PairReady
		p.circuit.Success()
	} else {
		p.failures++
		p.last = kind
		if p.state != abi.PairReady && (kind == Unmet || p.tried.Load()) {
			p.circuit.Trip()
		} else {
			p.circuit.Failure()
		}
		if p.circuit.Circuit(now) != circuit.Closed {
			p.state, opened = abi.PairUnknown, before != abi.PairBroken
		}
	}
	p.noted = true
	p.users.Store(false)
	p.doubted.Store(false)
	if p.stateAt(now) != before {
		p.since = now
	}
	p.prove()
	p.mu.Unlock()
	p.table.note(p)
	if !news {
		return opened
	}
	p.table.version.Add(1)
	if p.table.reports != nil {
		p.table.reports.transfer(p, kind)
	}
	return opened
}

// prove sets proven after a change; p.mu is held.
func (p *Pair) prove() {
	p.proven.Store(p.state == abi.PairReady && p.circuit.Closed() && p.circuit.Failures() == 0 && !p.tried.Load())
}

// PairRow is one pair as GET /v1/pairs shows it.
type PairRow struct {
	Prefill     string `json:"prefill"`
	PrefillRank int    `json:"prefill_rank"`
	Decode      string `json:"decode"`
	DecodeRank  int    `json:"decode_rank"`
	State       string `json:"state"`
	// Refused is the reason, from the two engines' facts, why no request uses the pair.
	// The state is then broken.
	Refused string `json:"refused,omitempty"`
	// Unavailable names the engine of the pair that does not answer probes, and its state. The
	// state of the pair is then broken.
	Unavailable string    `json:"unavailable,omitempty"`
	Failures    int       `json:"failures"`
	LastError   string    `json:"last_error"`
	Since       time.Time `json:"since"`
	// The measured transfer: µs per prompt token, and additional fixed µs, of the pair,
	// or else of all transfers of its prefill; 0 before there is a measurement.
	TransferMicros float32 `json:"transfer_micros"`
	HandoverMicros float32 `json:"handover_micros"`
	PairSpeed
}

// PairSpeed is the result of the measured transfers of a pair alone.
type PairSpeed struct {
	Samples int `json:"samples"` // measured transfers
	// Bandwidth, in prompt tokens per second, and SetUpMS, the fixed time in ms, are null until there
	// are 16 samples whose prompts differ enough in length. AtLeast: the time hardly grows with the
	// prompt, and Bandwidth is only a lower bound.
	Bandwidth *float64 `json:"bandwidth"`
	SetUpMS   *float64 `json:"set_up_ms"`
	AtLeast   bool     `json:"bandwidth_at_least"`
}

func (p *Pair) row(now time.Time) PairRow {
	p.mu.Lock()
	defer p.mu.Unlock()
	speed := p.speed()
	row := PairRow{
		Prefill: p.Prefill.Name(), PrefillRank: p.Prefill.Rank,
		Decode: p.Decode.Name(), DecodeRank: p.Decode.Rank,
		State: p.stateAt(now).String(), Failures: p.failures, LastError: p.last, Since: p.since,
		TransferMicros: speed.PerToken(), HandoverMicros: speed.Fixed(),
	}
	line := p.transfer.Line()
	if row.Samples = line.Samples; line.Known {
		line.SetUp /= 1e3
		row.Bandwidth, row.SetUpMS, row.AtLeast = &line.Bandwidth, &line.SetUp, line.AtLeast
	}
	for _, i := range []*Instance{p.Decode.Instance, p.Prefill.Instance} {
		if !i.Answers() {
			row.State, row.Unavailable = abi.PairBroken.String(), i.Spec.Name+" is "+i.probed().String()
			if since := i.Since(); since.After(row.Since) {
				row.Since = since
			}
		}
	}
	return row
}

// speed returns the measured speed of the pair's transfers, or else that of all
// transfers of its prefill.
func (p *Pair) speed() *load.Speed {
	if p.transfer.PerToken() > 0 {
		return &p.transfer
	}
	return &p.Prefill.Transfers
}

type pairKey struct {
	prefill, decode         uint32 // instance ids
	prefillRank, decodeRank int
}

// pairSide is one target of a pair.
type pairSide struct {
	instance uint32
	rank     int
}

func keyOf(p, d Target) pairKey { return pairKey{p.ID, d.ID, p.Rank, d.Rank} }

// pairTable holds the pairs that have been used. Placement needs only the few pairs
// whose circuit is not closed: these are published separately and read without a lock.
type pairTable struct {
	rules   *atomic.Pointer[circuit.Rules]
	reports *reports      // nil: this is not a mirror
	version atomic.Uint64 // changes with everything that a mirror receives

	mu      sync.RWMutex
	pairs   map[pairKey]*Pair    // guarded by mu
	from    map[pairSide][]*Pair // the same by prefill; guarded by mu
	trouble atomic.Pointer[map[pairKey]*Pair]
}

func (t *pairTable) init(rules *atomic.Pointer[circuit.Rules]) {
	t.rules, t.pairs, t.from = rules, make(map[pairKey]*Pair), make(map[pairSide][]*Pair)
}

// add stores a new pair, unless another call has added the pair.
func (t *pairTable) add(key pairKey, p, d Target) *Pair {
	t.mu.Lock()
	defer t.mu.Unlock()
	if pair := t.pairs[key]; pair != nil {
		return pair
	}
	pair := &Pair{Prefill: p, Decode: d, table: t, since: time.Now()}
	pair.circuit.Init(circuit.Options{Rules: t.rules, Grows: true})
	if p.gone.Load() || d.gone.Load() {
		return pair
	}
	if len(t.pairs) >= maxPairs {
		t.evict()
	}
	t.pairs[key] = pair
	side := pairSide{key.prefill, key.prefillRank}
	t.from[side] = append(t.from[side], pair)
	return pair
}

// remove removes the pair of a key; t.mu is held.
func (t *pairTable) remove(key pairKey, pair *Pair) {
	delete(t.pairs, key)
	side := pairSide{key.prefill, key.prefillRank}
	if rest := slices.DeleteFunc(t.from[side], func(p *Pair) bool { return p == pair }); len(rest) > 0 {
		t.from[side] = rest
	} else {
		delete(t.from, side)
	}
}

// evict makes room for one pair; t.mu is held.
func (t *pairTable) evict() {
	for key, pair := range t.pairs {
		if pair.circuit.Closed() {
			t.remove(key, pair)
			return
		}
	}
	for key, pair := range t.pairs {
		t.remove(key, pair)
		t.publish(pair)
		return
	}
}

// note publishes whether the circuits of pairs are closed, after a change.
func (t *pairTable) note(pairs ...*Pair) {
	for i, pair := range pairs {
		if !t.outdated(pair) {
			continue
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		if slices.ContainsFunc(pairs[i:], func(p *Pair) bool { return t.pairs[keyOf(p.Prefill, p.Decode)] == p }) { // else all were dropped in the meantime
			t.publish(pairs...)
		}
		return
	}
}

// outdated reports whether the published map shows another state of the pair's circuit.
func (t *pairTable) outdated(pair *Pair) bool {
	return pair.circuit.Closed() == (t.troubled(keyOf(pair.Prefill, pair.Decode)) == pair)
}

// publish replaces the published map after a change of pairs: each is in the new map if the table has
// it and its circuit is not closed. The work grows with the map and with the pairs, so many pairs
// need one call; t.mu is held.
func (t *pairTable) publish(pairs ...*Pair) {
	next := make(map[pairKey]*Pair)
	if m := t.trouble.Load(); m != nil {
		maps.Copy(next, *m)
	}
	for _, pair := range pairs {
		key := keyOf(pair.Prefill, pair.Decode)
		switch here := t.pairs[key]; {
		case here == pair && !pair.circuit.Closed():
			next[key] = pair
		case here == pair, here == nil:
			delete(next, key)
		}
	}
	if len(next) == 0 {
		t.trouble.Store(nil)
		return
	}
	t.trouble.Store(&next)
}

// troubled returns the pair of key if its circuit is not closed, else nil.
func (t *pairTable) troubled(key pairKey) *Pair {
	if m := t.trouble.Load(); m != nil {
		return (*m)[key]
	}
	return nil
}

// drop removes every pair with instance id, because its handshakes are no longer valid, and
// returns these pairs.
func (t *pairTable) drop(id uint32) (dropped []*Pair) {
	t.mu.Lock()
	defer t.mu.Unlock()
	trouble := false
	for side, pairs := range t.from {
		rest := slices.DeleteFunc(pairs, func(pair *Pair) bool {
			if side.instance != id && pair.Decode.ID != id {
				return false
			}
			key := keyOf(pair.Prefill, pair.Decode)
			trouble = trouble || t.troubled(key) != nil
			delete(t.pairs, key)
			dropped = append(dropped, pair)
			return true
		})
		if t.from[side] = rest; len(rest) == 0 {
			delete(t.from, side)
		}
	}
	if len(dropped) > 0 {
		t.version.Add(1)
	}
	if trouble {
		t.publish(dropped...)
	}
	return dropped
}

// rows returns the row of each pair.
func (t *pairTable) rows() map[pairKey]PairRow {
	t.mu.RLock()
	pairs := maps.Clone(t.pairs)
	t.mu.RUnlock()
	now := time.Now()
	rows := make(map[pairKey]PairRow, len(pairs))
	for key, p := range pairs {
		rows[key] = p.row(now)
	}
	return rows
}

// comparePairs orders rows by name and rank.
func comparePairs(a, b PairRow) int {
	return cmp.Or(cmp.Compare(a.Prefill, b.Prefill), a.PrefillRank-b.PrefillRank,
		cmp.Compare(a.Decode, b.Decode), a.DecodeRank-b.DecodeRank)
}

// Pair returns the pair of prefill target p and decode target d, so that the caller can
// note the outcome of a transfer. It creates the pair if needed.
// A pair with an instance that has left is not stored.
func (r *Registry) Pair(p, d Target) *Pair {
	t, key := &r.pairs, pairKey{p.ID, d.ID, p.Rank, d.Rank}
	t.mu.RLock()
	pair := t.pairs[key]
	t.mu.RUnlock()
	if pair != nil {
		return pair
	}
	return t.add(key, p, d)
}

// PairState returns the present state of the pair of p and d. It creates no pair.
func (r *Registry) PairState(p, d Target) abi.PairState {
	r.pairs.mu.RLock()
	pair := r.pairs.pairs[keyOf(p, d)]
	r.pairs.mu.RUnlock()
	if pair == nil {
		return abi.PairUnknown
	}
	return pair.State()
}

// MeasurePair notes the time from the end of prefill on p, when the decode leg was sent,
// to the first token of d. promptTokens is the length of the prompt.
func (r *Registry) MeasurePair(p, d Target, promptTokens int64, took time.Duration) {
	r.Pair(p, d).transfer.Measure(promptTokens, took)
	p.Transfers.Measure(promptTokens, took)
	if r.reports != nil {
		r.reports.measure(report{kind: fleetpb.Observed_OBSERVED_TRANSFER_TIME, p: p, d: d, tokens: promptTokens, took: took})
	}
}

// StreamsOf returns the streams of a target for predictions. A target that only
// prefills has none.
func StreamsOf(t Target, now time.Time) predict.Streams {
	if t.Role&abi.RoleDecode == 0 {
		return predict.Streams{}
	}
	v := t.Load[t.Rank].View(now)
	return predict.Streams{Requests: int64(v.Requests), Tokens: v.Decode}
}

// MeasureOutput notes the time that decode target d took for a number of tokens of one
// stream after the first token.
func (r *Registry) MeasureOutput(d Target, tokens int64, took time.Duration) {
	d.Load[d.Rank].Output.Measure(tokens, took)
	if times := d.Times.Load(); times != nil {
		times.Streamed(StreamsOf(d, time.Now()), tokens, took)
	}
	if r.reports != nil {
		r.reports.measure(report{kind: fleetpb.Observed_OBSERVED_OUTPUT_TIME, p: d, tokens: tokens, took: took})
	}
}

// AppendPairs appends the pairs of prefill target p that have been used.
func (r *Registry) AppendPairs(pairs []*Pair, p Target) []*Pair {
	r.pairs.mu.RLock()
	defer r.pairs.mu.RUnlock()
	return append(pairs, r.pairs.from[pairSide{p.ID, p.Rank}]...)
}

// TransferMicros returns the measured time of a transfer for each prompt token, in µs. Without a
// measurement of the pair it is that of all pairs of its prefill, or 0.
func (p *Pair) TransferMicros() float32 { return p.speed().PerToken() }

// PairBlocked reports whether no user's request should use the pair at now: its circuit is
// open, or the next trial is the proxy's. It takes no lock.
func (r *Registry) PairBlocked(p, d Target, now time.Time) bool {
	pair := r.pairs.troubled(keyOf(p, d))
	return pair != nil && pair.blocked(now)
}

// AllowPair reports whether a user's request may use the pair now, and takes the trial of a
// half-open circuit. It takes no lock.
func (r *Registry) AllowPair(p, d Target) bool {
	pair := r.pairs.troubled(keyOf(p, d))
	return pair == nil || !pair.blocked(time.Now()) && pair.circuit.Allow()
}

// TryPair is AllowPair for a request that no other pair can take: the request need not leave
// the trial to the proxy. It returns false while a trial of the proxy runs, unless the pair is only
// doubted. It takes no lock.
func (r *Registry) TryPair(p, d Target) bool {
	pair := r.pairs.troubled(keyOf(p, d))
	return pair == nil || pair.doubted.Load() || !pair.tried.Load() && pair.circuit.Allow()
}

// PairsInTrouble reports whether any pair's circuit is not closed.
func (r *Registry) PairsInTrouble() bool { return r.pairs.trouble.Load() != nil }
