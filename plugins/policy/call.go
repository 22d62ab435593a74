package policy

import (
	"context"
	"errors"
	"math/bits"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
)

// The reasons why a call gives no decision. They are those of the coordinator,
// except Closed.
const (
	Absent   = "absent"   // the policy abstains
	Late     = "late"     // the time budget was used up
	Trap     = "trap"     // the guest failed: trap, exit, no memory left
	Parked   = "parked"   // the policy failed too often and is not called
	Nonsense = "nonsense" // the answer breaks the contract
	Closed   = "closed"   // the version was replaced: call its replacement
)

// Policy is one policy of a version: one hook, one name. Its methods return decisions.
// They are safe for concurrent use, take at most the version's budget and, in an
// unguarded module, do not allocate. A reason other than "" means that there is no
// decision.
type Policy struct {
	Hook  abi.Hook
	Name  string    // within the module; "" when the module gives no names
	Label string    // the name in the configuration, for metrics and operators
	Needs abi.Needs // needs in addition to those of its module

	version  *Version
	index    uint32
	layout   abi.Layout // of its frames
	sequence atomic.Uint64
	calls    Calls
	meter    Meter
}

// Version is the version whose policy this is.
func (p *Policy) Version() *Version { return p.version }

// Summary returns the figures of the policy's calls.
func (p *Policy) Summary() Summary { return p.calls.Summary() }

// Plan calls the plan hook.
func (p *Policy) Plan(f *abi.PlanFacts) (a abi.PlanAnswer, reason string) {
	var c call
	if c.begin(p, f.FrameSize(&p.layout)) {
		if answer, ok := c.run(abi.AppendPlan(c.scratch[:0], &c.header, f)); ok {
			if a, ok = abi.UnpackPlan(uint64(answer)); !ok {
				c.reason = Nonsense
			}
			f.Notes = c.notes
		}
	}
	return a, c.end()
}

// Place calls the place hook. It writes the policy's scores into the candidates.
func (p *Policy) Place(f *abi.PlaceFacts) (d abi.PlaceDecision, reason string) {
	var c call
	if c.begin(p, f.FrameSize(&p.layout)) {
		frame := abi.AppendPlace(c.scratch[:0], &c.header, f)
		c.vm.notes.show(f.Candidates)
		if answer, ok := c.run(frame); ok {
			c.vm.notes.show(nil)
			if d = abi.UnpackPlace(uint64(answer)); !f.Allows(d) {
				c.reason = Nonsense
			} else if frame, ok = c.vm.View(c.at, uint32(len(frame))); ok {
				abi.ReadScores(frame, &c.header, f)
			}
			f.Notes = c.notes
		}
	}
	return d, c.end()
}

// Mint calls the mint hook.
func (p *Policy) Mint(f *abi.MintFacts) (id uint64, reason string) {
	var c call
	if c.begin(p, abi.MintFrameSize) {
		if answer, ok := c.run(abi.AppendMint(c.scratch[:0], &c.header, f)); ok {
			switch id = uint64(answer); {
			case id == 0:
				c.reason = Absent
			case id < abi.MinDisaggID || id >= abi.MaxDisaggID:
				c.reason = Nonsense
			}
		}
	}
	return id, c.end()
}

// Leg calls the leg hook. It appends the edits of LegEdited to edits, in the
// encoding that abi.NextEdit reads, after it has checked them.
func (p *Policy) Leg(f *abi.LegFacts, edits []byte) (d abi.LegDecision, list []byte, reason string) {
	var c call
	list = edits
	if c.begin(p, f.FrameSize(&p.layout)) {
		frame := abi.AppendLeg(c.scratch[:0], &c.header, f)
		if answer, ok := c.run(frame); ok {
			d, ok = abi.UnpackLeg(uint64(answer), f.Event)
			if ok && d == abi.LegEdited && f.Event == abi.LegSend {
				list, ok = c.edits(len(frame), edits)
			}
			if !ok {
				d, list, c.reason = abi.LegPass, edits, Nonsense
			}
			f.Notes = c.notes
		}
	}
	return d, list, c.end()
}

// Finish calls the finish hook.
func (p *Policy) Finish(f *abi.FinishFacts) (reason string) {
	var c call
	if c.begin(p, f.FrameSize(&p.layout)) {
		c.run(abi.AppendFinish(c.scratch[:0], &c.header, f))
	}
	return c.end()
}

// Retain calls the retain hook.
func (p *Policy) Retain(f *abi.RetainFacts) (d abi.RetainDecision, reason string) {
	var c call
	if c.begin(p, abi.RetainFrameSize) {
		if answer, ok := c.run(abi.AppendRetain(c.scratch[:0], &c.header, f)); ok {
			if d, ok = abi.UnpackRetain(uint64(answer)); !ok {
				c.reason = Nonsense
			}
		}
	}
	return d, c.end()
}

// Evict calls the evict hook.
func (p *Policy) Evict(f *abi.EvictFacts) (row int32, reason string) {
	var c call
	if row = abi.EvictNone; c.begin(p, f.FrameSize()) {
		if answer, ok := c.run(abi.AppendEvict(c.scratch[:0], &c.header, f)); ok {
			if row, ok = abi.UnpackEvict(uint64(answer), f); !ok {
				c.reason = Nonsense
			}
		}
	}
	return row, c.end()
}

// call is one call of a hook, from taking a VM to returning it.
type call struct {
	p       *Policy
	vm      *vm // nil: none was free, or the request left the call
	began   time.Time
	header  abi.Header // of the frame
	scratch []byte
	at      uint32 // address of scratch in the guest
	notes   []string
	reason  string
}

// begin takes a VM with room for a frame. It returns false when there will be no
// decision; c.reason is the reason.
func (c *call) begin(p *Policy, frame int) bool {
	v := p.version
	c.p, c.began = p, time.Now()
	if v.parked.Load() {
		c.reason = Parked
		return false
	}
	if c.vm = v.pool.grab(); c.vm == nil {
		v.grow()
		if c.vm = v.pool.wait(v.opts.Budget); c.vm == nil {
			switch {
			case v.parked.Load():
				c.reason = Parked
			case v.pool.isClosed():
				c.reason = Closed
			default:
				c.reason = Late
			}
			return false
		}
	}
	room := uint32(scratchSize)
	if frame > scratchSize {
		room = roomFor(frame)
	}
	var err error
	if w := c.vm.worker; w != nil && room > c.vm.room {
		c.vm.room, w.p, w.room = 0, p, room
		if _, err = w.do(v, c.vm, c.until()); err != nil {
			c.fail(err)
			return false
		}
		c.vm.room = room
	}
	if c.scratch, c.at, err = c.vm.Scratch(context.Background(), room); err != nil { // does not call a guarded guest: the buffer is large enough
		c.fail(err)
		return false
	}
	c.header = p.header(c.began)
	return true
}

// header returns the header of the policy's next frame.
func (p *Policy) header(now time.Time) abi.Header {
	return abi.Header{
		Policy: p.index, Sequence: p.sequence.Add(1) - 1, Random: rand.Uint64(),
		UnixMilli: now.UnixMilli(), Seed: p.version.opts.Seed, Layout: p.layout,
	}
}

// until returns the time at which the call gives up.
func (c *call) until() time.Time { return c.began.Add(c.p.version.opts.Budget) }

// fail records why there is no decision.
func (c *call) fail(err error) {
	if errors.Is(err, errLeft) {
		c.reason, c.vm = Late, nil
		return
	}
	c.reason = reasonOf(err)
}

// roomFor returns the size of the scratch buffer for a frame. It is a power of
// two, so that larger buffers are rarely requested.
func roomFor(frame int) uint32 {
	size := scratchSize
	for size < frame {
		size *= 2
	}
	return uint32(size)
}

// run calls the hook with the frame in the scratch buffer. c.notes are the notes of the guest,
// prefixed with the policy's name.
func (c *call) run(frame []byte) (answer int64, ok bool) {
	book := c.vm.notes
	if book.notes != nil {
		book.Take() // drop notes of a call that gave no decision
	}
	var err error
	if w := c.vm.worker; w != nil {
		w.p, w.room, w.at, w.size = c.p, 0, c.at, uint32(len(frame))
		answer, err = w.do(c.p.version, c.vm, c.until())
	} else {
		answer, err = c.vm.hooks[c.p.Hook].Call(context.Background(), c.at, uint32(len(frame)))
	}
	if err != nil {
		c.fail(err)
		return 0, false
	}
	if book.notes != nil {
		c.notes = book.Take()
		for i, note := range c.notes {
			c.notes[i] = c.p.Label + ": " + note
		}
	}
	return answer, true
}

// end returns the VM to the pool, or replaces it, and counts the call.
func (c *call) end() string {
	p, v := c.p, c.p.version
	if c.reason == Closed {
		return Closed // the caller calls the replacement, which counts the call
	}
	took := time.Since(c.began)
	if c.reason != Parked {
		p.calls.Observe(took)
		p.meter.Observe(took)
	}
	switch c.reason {
	case "", Absent:
		v.pool.put(c.vm)
		return c.reason
	case Parked:
		p.meter.Fail(Parked)
		p.calls.Fail()
		return Parked
	}
	p.calls.Fail()
	p.meter.Fail(c.reason)
	if c.vm != nil { // else no VM was free, or aside handles the VM
		why := c.vm.Err()
		if v.blame(p, c.reason, why, c.began); why != nil {
			v.replace(c.vm)
		} else {
			v.pool.put(c.vm)
		}
	}
	return c.reason
}

// blame logs a failure of the guest and counts it. why is the failure that
// poisoned its VM, nil if none did.
func (v *Version) blame(p *Policy, reason string, why error, began time.Time) {
	attrs := []any{"policy", p.Label, "hook", p.Hook.String(), "reason", reason}
	if why != nil {
		attrs = append(attrs, "error", why)
	}
	var failure *host.Error
	if errors.As(why, &failure) {
		attrs = append(attrs, failure.Details(v.opts.Log)...)
	}
	v.opts.Log.Warn("policy failed; the built-in rule decides", attrs...)
	v.failed(timeoutOf(why, began))
}

// edits appends the list of edits that the guest left after its frame, if the
// list keeps the contract.
func (c *call) edits(frame int, to []byte) ([]byte, bool) {
	view, ok := c.vm.View(c.at, uint32(len(c.scratch)))
	if !ok {
		return to, false
	}
	offset, size := abi.EditsOf(view)
	if offset < frame || size < 0 || size > len(view) || offset > len(view)-size {
		return to, false
	}
	list := view[offset : offset+size]
	rest := list
	for n := 0; len(rest) > 0; n++ {
		if _, rest, ok = abi.NextEdit(rest); !ok || n == abi.MaxEdits {
			return to, false
		}
	}
	return append(to, list...), true
}

// reasonOf returns the reason for the error of a call.
func reasonOf(err error) string {
	var failure *host.Error
	if errors.As(err, &failure) && failure.Failure == host.Timeout {
		return Late
	}
	return Trap
}

// Calls counts the calls of one policy by their duration: bucket i holds those
// below 2^i ns. It is safe for concurrent use; the zero value is empty.
type Calls struct {
	sum      atomic.Int64 // ns
	failures atomic.Uint64
	buckets  [36]atomic.Uint64
}

// Summary holds the figures of Calls.
type Summary struct {
	Calls, Failures uint64
	MeanUS, P99US   float64 // P99US is the upper bound of its bucket
}

// Observe counts one call.
func (c *Calls) Observe(d time.Duration) {
	ns := max(int64(d), 0)
	c.sum.Add(ns)
	c.buckets[min(bits.Len64(uint64(ns)), len(c.buckets)-1)].Add(1)
}

// Fail counts one call as failed, whether or not Observe counted it.
func (c *Calls) Fail() { c.failures.Add(1) }

// Summary returns the figures so far.
func (c *Calls) Summary() Summary {
	s := Summary{Failures: c.failures.Load()}
	var counts [len(c.buckets)]uint64
	for i := range c.buckets {
		counts[i] = c.buckets[i].Load()
		s.Calls += counts[i]
	}
	if s.Calls == 0 {
		return s
	}
	s.MeanUS = float64(c.sum.Load()) / float64(s.Calls) / 1000
	var below uint64
	for i, n := range counts {
		if below += n; below*100 >= s.Calls*99 {
			s.P99US = float64(uint64(1)<<i) / 1000
			break
		}
	}
	return s
}
