package engine

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

const (
	// reportEvery is how often a mirror sends reports that change no circuit and no pair.
	reportEvery = 100 * time.Millisecond
	// maxReports bounds the number of unsent reports. Further ones are dropped: other
	// processes measure too, and a failing engine will fail again.
	maxReports = 4096
	// maxKind bounds the kind of a failure, in bytes.
	maxKind = 64
)

// report is one observation in a mirror's process.
type report struct {
	kind   fleetpb.Observed
	p, d   Target // a report about a target has only p
	tokens int64
	took   time.Duration
	label  string
}

// reports holds the unsent reports.
type reports struct {
	home *atomic.Pointer[numbering] // of the mirrored registry

	mu      sync.Mutex
	send    func(report []byte) // nil: nothing takes reports now; guarded by mu
	waiting []report            // guarded by mu
	warming map[*Pair]int       // number of attempts that wait for the handshake; guarded by mu
	changed bool                // warming has changed since the last report; guarded by mu
}

func newReports(home *atomic.Pointer[numbering]) *reports {
	return &reports{home: home, warming: make(map[*Pair]int)}
}

func (r *reports) measure(x report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(x)
}

// tell queues x and sends all waiting reports before it returns. So the coordinator counts a
// failure before it places the retry.
func (r *reports) tell(x report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(x)
	r.flush()
}

// add queues x. The caller holds r.mu.
func (r *reports) add(x report) {
	if len(r.waiting) < maxReports {
		r.waiting = append(r.waiting, x)
	}
}

// breaker notes a leg's failure, or a success after failures.
func (r *reports) breaker(i *Instance, failed bool) {
	kind := fleetpb.Observed_OBSERVED_SUCCESS
	if failed {
		kind = fleetpb.Observed_OBSERVED_FAILURE
	}
	r.tell(report{kind: kind, p: Target{Instance: i}})
}

// transfer notes the end of a transfer. kind is that of Pair.set.
func (r *reports) transfer(p *Pair, kind string) {
	x := report{kind: fleetpb.Observed_OBSERVED_TRANSFER, p: p.Prefill, d: p.Decode}
	if kind != "" {
		x.kind, x.label = fleetpb.Observed_OBSERVED_NO_TRANSFER, kind
	}
	r.tell(x)
}

// warms adds more to the number of attempts that wait for the pair's handshake.
func (r *reports) warms(p *Pair, more int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	was := r.warming[p]
	if r.warming[p] = was + more; was+more <= 0 {
		delete(r.warming, p)
	}
	r.changed = r.changed || was == 0 || was+more <= 0
}

// resend queues the reports that a new registry needs from this process.
func (r *reports) resend(ready []*Pair) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.changed = len(r.warming) > 0
	for _, p := range ready {
		r.add(report{kind: fleetpb.Observed_OBSERVED_TRANSFER, p: p.Prefill, d: p.Decode})
	}
}

// sendBy sets the function that takes the reports. nil: reports wait.
func (r *reports) sendBy(send func(report []byte)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.send = send
	r.flush()
}

// sendWaiting sends the waiting reports.
func (r *reports) sendWaiting() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.flush()
}

// flush sends the waiting reports. The caller holds r.mu.
func (r *reports) flush() {
	if r.send == nil {
		return
	}
	if b := r.encode(); b != nil {
		r.send(b)
	}
}

// encode takes the unsent reports and encodes them with the numbers of the mirrored
// registry; nil if there are none. It leaves out instances without a number. The caller
// holds r.mu.
func (r *reports) encode() []byte {
	n := r.home.Load()
	if n.mark == 0 || len(r.waiting) == 0 && !r.changed {
		return nil
	}
	out := &fleetpb.Observations{Mark: n.mark}
	for i := range r.waiting {
		if m := r.waiting[i].message(n); m != nil {
			out.List = append(out.List, m)
		}
	}
	clear(r.waiting)
	r.waiting = r.waiting[:0]
	if r.changed {
		r.changed = false
		out.Warming = new(fleetpb.Warming)
		for p := range r.warming {
			if key, ok := n.pair(p.Prefill, p.Decode); ok {
				prefill, decode := key.targets()
				out.Warming.Prefill, out.Warming.Decode = append(out.Warming.Prefill, prefill), append(out.Warming.Decode, decode)
			}
		}
	}
	return fleetpb.Append(nil, &fleetpb.Report{Observations: out})
}

// pair returns the key of a pair by its instances' numbers.
func (n *numbering) pair(p, d Target) (key pairKey, ok bool) {
	key = pairKey{n.byInstance[p.Instance], n.byInstance[d.Instance], p.Rank, d.Rank}
	return key, key.prefill != 0 && key.decode != 0
}

// message returns the report; nil if its instance has no number.
func (x *report) message(n *numbering) *fleetpb.Observation {
	m := &fleetpb.Observation{
		What: x.kind, Failure: x.label[:min(len(x.label), maxKind)], Tokens: max(0, x.tokens), TookUs: int64(max(0, x.took) / time.Microsecond),
	}
	if x.d.IsZero() {
		number := n.byInstance[x.p.Instance]
		if number == 0 {
			return nil
		}
		m.Prefill = numberOf(number, x.p.Rank)
		return m
	}
	key, ok := n.pair(x.p, x.d)
	if !ok {
		return nil
	}
	m.Prefill, m.Decode = key.targets()
	return m
}

// learned holds the mirrors' reports about attempts in progress.
type learned struct {
	mu      sync.Mutex
	warming map[int]map[pairKey]*Pair // by mirror; guarded by mu
}

// Learn applies the observations of a mirror. mirror is a number that the caller has chosen for
// the mirror. An error means that an observation is malformed. Learn applies the observations
// before it. Learn ignores a report for another registry, and what a later version observes.
func (r *Registry) Learn(mirror int, in *fleetpb.Observations) error {
	if in.GetMark() != r.mark {
		return nil
	}
	home := &numbering{byNumber: make(map[uint32]*Instance)}
	for _, i := range r.Snapshot().Instances {
		home.byNumber[i.ID] = i
	}
	for _, one := range in.List {
		if err := r.learnOne(one, home); err != nil {
			return err
		}
	}
	if w := in.Warming; w != nil {
		now := make(map[pairKey]bool)
		for i := range min(len(w.Prefill), len(w.Decode)) {
			now[pairKeyOf(w.Prefill[i], w.Decode[i])] = true
		}
		r.warms(mirror, now, home)
	}
	return nil
}

// learnOne applies one observation.
func (r *Registry) learnOne(m *fleetpb.Observation, home *numbering) error {
	if m.Tokens < 0 || m.TookUs < 0 {
		return errors.New("read report: negative amount")
	}
	switch m.What {
	case fleetpb.Observed_OBSERVED_FAILURE, fleetpb.Observed_OBSERVED_SUCCESS, fleetpb.Observed_OBSERVED_OUTPUT_TIME, fleetpb.Observed_OBSERVED_NO_ROOM:
		t, ok := home.target(uint32(m.Prefill), rankOf(m.Prefill))
		switch {
		case !ok:
		case m.What == fleetpb.Observed_OBSERVED_FAILURE:
			t.Breaker.Failure()
			t.ProbeSoon()
		case m.What == fleetpb.Observed_OBSERVED_SUCCESS:
			t.Breaker.Success()
		case m.What == fleetpb.Observed_OBSERVED_NO_ROOM:
			r.NoRoom(t)
		default:
			r.MeasureOutput(t, m.Tokens, duration(m.TookUs))
		}
	case fleetpb.Observed_OBSERVED_TRANSFER, fleetpb.Observed_OBSERVED_NO_TRANSFER, fleetpb.Observed_OBSERVED_TRANSFER_TIME:
		failure := ""
		if m.What == fleetpb.Observed_OBSERVED_NO_TRANSFER {
			if failure = m.Failure; !isKind(failure) {
				return errors.New("read report: kind of a failure")
			}
		}
		p, d, ok := home.targets(pairKeyOf(m.Prefill, m.Decode))
		switch {
		case !ok:
		case m.What == fleetpb.Observed_OBSERVED_TRANSFER_TIME:
			r.MeasurePair(p, d, m.Tokens, duration(m.TookUs))
		default:
			r.Pair(p, d).set(failure)
		}
	}
	return nil
}

// isKind reports whether text can be the kind of a failure: lower-case letters, digits and _.
func isKind(text string) bool {
	for _, c := range []byte(text) {
		if c != '_' && (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return text != "" && len(text) <= maxKind
}

// duration converts µs, at most a day.
func duration(micros int64) time.Duration {
	return time.Duration(min(micros, 24*int64(time.Hour/time.Microsecond))) * time.Microsecond
}

// warms sets the pairs that a mirror reports as warming to those in now.
func (r *Registry) warms(mirror int, now map[pairKey]bool, home *numbering) {
	r.learned.mu.Lock()
	defer r.learned.mu.Unlock()
	was := r.learned.warming[mirror]
	for key, pair := range was {
		if !now[key] {
			pair.End()
			delete(was, key)
		}
	}
	for key := range now {
		if was[key] != nil {
			continue
		}
		if p, d, ok := home.targets(key); ok {
			if pair := r.Pair(p, d); pair.Begin() {
				if was == nil {
					was = make(map[pairKey]*Pair)
				}
				was[key] = pair
			}
		}
	}
	if r.learned.warming[mirror] = was; len(was) == 0 {
		delete(r.learned.warming, mirror)
	}
}

// Unlearn drops a mirror's reports about attempts in progress. Call it when the mirror
// has ended.
func (r *Registry) Unlearn(mirror int) { r.warms(mirror, nil, nil) }
