package cleanup

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// Retained returns the job that makes holder free KV which it retains for the next turn.
// attempt has the fields of a job; via is the prefill engine that makes the call.
func Retained(attempt Job, call connector.Cleanup, via, holder engine.Target) *Job {
	attempt.Add([]connector.Cleanup{call}, via, holder)
	attempt.calls[0].holder, attempt.slow = holder, true
	return &attempt
}

// ReadRetained reads a job of Retained that Append wrote. find returns an engine that
// can make the call if the one of the job is not known here; it may return nil.
func ReadRetained(b []byte, known *engine.Snapshot, holder engine.Target, find func() *engine.Instance) (*Job, error) {
	j, _, err := readJob(b, known)
	if err != nil {
		return nil, err
	}
	if len(j.calls) != 1 {
		return nil, errNotAJob
	}
	c := &j.calls[0]
	c.holder, j.slow = holder, true // holder is known exactly; its name may be that of two engines
	if c.target.IsZero() {
		if c.target.Instance = find(); c.target.IsZero() {
			c.Leg.Path, c.How = "", engineTimeout
		}
	}
	return j, nil
}

// Free readies a job of Retained for Runner.Start, which begins after delay. substitute
// finds an engine that can make the call while the one of the job is not ready. The call is
// repeated for as long as holder would keep the KV.
func (j *Job) Free(delay time.Duration, substitute func() *engine.Instance) {
	j.Since, j.delay = time.Now(), delay
	c := &j.calls[0]
	c.substitute, c.Hold = substitute, c.holder.Spec.KeepsFor()
}

// WaitFor delays the call of a job of Retained: until t responds, and Yield longer.
func (j *Job) WaitFor(t engine.Target) { j.calls[0].waitFor = t }
