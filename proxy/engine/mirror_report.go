package engine

import (
	"encoding/binary"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/wire"
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

// The kinds of reports. On the wire the kind is followed by the listed fields.
const (
	reportFailed  = iota + 1 // target: a leg failed by the engine's fault
	reportWell               // target: a leg was served after failures
	reportCame               // pair: KV has come
	reportMissed             // pair, kind (uint8 length): a transfer failed
	reportMoved              // pair, tokens, µs: duration of a transfer
	reportOutput             // target, tokens, µs: duration of a stream
	reportWarming            // count (uint32), pairs: all pairs on which attempts wait for the handshake
)

// report is one observation in a mirror's process.
type report struct {
	kind   byte
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
	kind := byte(reportWell)
	if failed {
		kind = reportFailed
	}
	r.tell(report{kind: kind, p: Target{Instance: i}})
}

// transfer notes the end of a transfer. kind is that of Pair.set.
func (r *reports) transfer(p *Pair, kind string) {
	x := report{kind: reportCame, p: p.Prefill, d: p.Decode}
	if kind != "" {
		x.kind, x.label = reportMissed, kind
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
		r.add(report{kind: reportCame, p: p.Prefill, d: p.Decode})
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
	b := binary.LittleEndian.AppendUint64(nil, n.mark)
	for i := range r.waiting {
		b = r.waiting[i].append(b, n)
	}
	clear(r.waiting)
	r.waiting = r.waiting[:0]
	if r.changed {
		r.changed = false
		b = append(b, reportWarming)
		count, at := uint32(0), len(b)
		b = binary.LittleEndian.AppendUint32(b, 0)
		for p := range r.warming {
			if key, ok := n.pair(p.Prefill, p.Decode); ok {
				b = appendPairKey(b, key)
				count++
			}
		}
		binary.LittleEndian.PutUint32(b[at:], count)
	}
	return b
}

// pair returns the key of a pair by its instances' numbers.
func (n *numbering) pair(p, d Target) (key pairKey, ok bool) {
	key = pairKey{n.byInstance[p.Instance], n.byInstance[d.Instance], p.Rank, d.Rank}
	return key, key.prefill != 0 && key.decode != 0
}

// append appends the report, or nothing if its instance has no number.
func (x *report) append(b []byte, n *numbering) []byte {
	switch x.kind {
	case reportFailed, reportWell, reportOutput:
		number := n.byInstance[x.p.Instance]
		if number == 0 {
			return b
		}
		b = binary.LittleEndian.AppendUint32(append(b, x.kind), number)
		b = binary.LittleEndian.AppendUint16(b, uint16(x.p.Rank))
	default:
		key, ok := n.pair(x.p, x.d)
		if !ok {
			return b
		}
		b = appendPairKey(append(b, x.kind), key)
	}
	switch x.kind {
	case reportMissed:
		label := x.label[:min(len(x.label), maxKind)]
		b = append(append(b, byte(len(label))), label...)
	case reportMoved, reportOutput:
		b = binary.LittleEndian.AppendUint64(b, uint64(max(0, x.tokens)))
		b = binary.LittleEndian.AppendUint64(b, uint64(max(0, x.took)/time.Microsecond))
	}
	return b
}

// learned holds the mirrors' reports about attempts in progress.
type learned struct {
	mu      sync.Mutex
	warming map[int]map[pairKey]*Pair // by mirror; guarded by mu
}

// Learn applies a report of a mirror. mirror is a number that the caller has chosen for
// the mirror. An error means that b is malformed. Learn applies the reports before the
// malformed one. Learn ignores a report for another registry.
func (r *Registry) Learn(mirror int, b []byte) error {
	w := &partReader{wire.Read(b)}
	if mark := w.Uint64(); !w.Failed() && mark != r.mark {
		return nil
	}
	home := &numbering{byNumber: make(map[uint32]*Instance)}
	for _, i := range r.Snapshot().Instances {
		home.byNumber[i.ID] = i
	}
	for w.Len() > 0 {
		r.learnOne(w, mirror, home)
	}
	if w.Failed() {
		return errors.New("read report: it is incomplete")
	}
	return nil
}

// learnOne reads and applies one report.
func (r *Registry) learnOne(w *partReader, mirror int, home *numbering) {
	switch kind := w.Uint8(); kind {
	case reportFailed, reportWell, reportOutput:
		t, ok := home.target(w.Uint32(), int(w.Uint16()))
		var tokens, micros int64
		if kind == reportOutput {
			tokens, micros = w.natural(), w.natural()
		}
		switch {
		case w.Failed() || !ok:
		case kind == reportFailed:
			t.Breaker.Failure()
			t.ProbeSoon()
		case kind == reportWell:
			t.Breaker.Success()
		default:
			r.MeasureOutput(t, tokens, duration(micros))
		}
	case reportCame, reportMissed, reportMoved:
		p, d, ok := home.targets(w.pairKey())
		var tokens, micros int64
		var label string
		switch kind {
		case reportMissed:
			label = w.label()
		case reportMoved:
			tokens, micros = w.natural(), w.natural()
		}
		switch {
		case w.Failed() || !ok:
		case kind == reportMoved:
			r.MeasurePair(p, d, tokens, duration(micros))
		default:
			r.Pair(p, d).set(label)
		}
	case reportWarming:
		now := make(map[pairKey]bool)
		for range w.Uint32() {
			if now[w.pairKey()] = true; w.Failed() {
				return
			}
		}
		r.warms(mirror, now, home)
	default:
		w.Fail()
	}
}

// label reads the kind of a failure: lower-case letters, digits and _.
func (r *partReader) label() string {
	b := r.Bytes(uint64(r.Uint8()))
	if len(b) == 0 || len(b) > maxKind {
		r.Fail()
	}
	for _, c := range b {
		if c != '_' && (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			r.Fail()
		}
	}
	return string(b)
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
