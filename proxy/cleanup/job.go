package cleanup

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Yield is how long a clean-up waits after the proxy has closed the connection to a
// decode engine. The engine's own abort frees prefill's blocks. If a second engine freed
// them while the first still reads, the first would read another request's memory.
const Yield = time.Second

const (
	// minPatience is the shortest time for which a clean-up is repeated: vLLM's default
	// lease (kv_lease_duration), after which the engine has freed the blocks itself. A
	// call whose engine holds the blocks longer says so (connector.Cleanup.Hold). A
	// prefill that is run again only to free decode's blocks has no lease. Its limit
	// starts when it leaves the queue and covers at least one try.
	minPatience = 30 * time.Second
	// minQueued is the minimum of queueCost, in bytes.
	minQueued = 64 << 10
)

// Job is the clean-up of one attempt. It refers to no memory of the request. It is not
// safe for concurrent use until Runner.Start has taken it.
type Job struct {
	RequestID string
	Connector string           // its name, for the metrics
	Auth      string           // the client's Authorization header; "" if engines do not get that
	Since     time.Time        // when the attempt ended: the time until the blocks are free counts from here
	Limit     time.Duration    // of one try
	Prompt    time.Duration    // of one try that computes a prompt
	Decode    *engine.Instance // of the attempt
	Restarts  uint32           // restarts of Decode when the attempt began

	calls []call
	delay time.Duration // before the first call
	slow  bool          // a call computes a prompt, so nobody waits for the job
}

// call is one call of a job.
type call struct {
	connector.Cleanup
	target     engine.Target // the engine that is called
	holder     engine.Target // the engine whose blocks the call frees
	lastChoice engine.Target // is called last: the leg failed there, so the call may fail there too
	waitFor    engine.Target // may be unresponsive and still read the blocks; the call waits until it responds
	reader     engine.Target // may still read the blocks; no other engine is called while it is unresponsive
	pointless  bool          // another try changes nothing: the engine's own timeout frees the blocks
	// substitute finds another target while target is not ready; it may return nil. A nil
	// func means that target cannot be replaced.
	substitute func() *engine.Instance

	tries    int       // of this round
	refusals []refusal // of this round, for lack of room
}

// Add adds calls to the job of an attempt on the targets p and d.
func (j *Job) Add(calls []connector.Cleanup, p, d engine.Target) {
	for _, c := range calls {
		t := d
		if c.Phase == abi.Prefill {
			t = p
		}
		cc := call{Cleanup: c, target: t, holder: t}
		switch {
		case c.Until == connector.UntilServed: // prefill writes into decode's blocks; decode frees them then
			cc.holder = d
			j.slow, j.delay, j.Limit = true, Yield, j.Prompt
		case c.AnyTarget: // any decode engine makes prefill free its blocks
			cc.holder = p
		}
		j.calls = append(j.calls, cc)
	}
}

// Empty reports whether the job has no call.
func (j *Job) Empty() bool { return len(j.calls) == 0 }

// Slow reports whether a call of the job computes a prompt. Nobody should wait for it.
func (j *Job) Slow() bool { return j.slow }

// YieldToDecode makes the job wait for the abort of the attempt's decode engine, which may still
// read prefill's blocks: the job starts after Yield, and no other engine is called while the
// decode engine is unresponsive.
func (j *Job) YieldToDecode() {
	j.delay = Yield
	for i := range j.calls {
		if c := &j.calls[i]; c.AnyTarget {
			c.reader = c.target
		}
	}
}

// Hold delays calls until t, which is unresponsive, answers again: calls to t, and calls
// that free blocks t may still read. Its own abort may come first.
func (j *Job) Hold(t engine.Target) {
	for i := range j.calls {
		if c := &j.calls[i]; c.AnyTarget || c.target == t {
			c.waitFor = t
		}
	}
}

// Avoid makes t the last choice of calls that any target can serve. A decode engine that could not
// load the blocks cannot make prefill free them either.
func (j *Job) Avoid(t engine.Target) {
	for i := range j.calls {
		if c := &j.calls[i]; c.AnyTarget && c.target == t {
			c.lastChoice = t
		}
	}
}

// patience is how long the Runner repeats the call, or keeps it until it can be made.
func (c *call) patience() time.Duration { return max(minPatience, c.Cleanup.Hold) }

// patience is the longest patience of the calls of the job.
func (j *Job) patience() time.Duration {
	longest := minPatience
	for i := range j.calls {
		longest = max(longest, j.calls[i].patience())
	}
	return longest
}

// queueCost is the memory in bytes that the job holds until it leaves the queue; 0 for a
// job that does not wait longer than it is tried.
func (j *Job) queueCost() (bytes int64) {
	for i := range j.calls {
		if c := &j.calls[i]; c.Until == connector.UntilServed {
			bytes += max(int64(len(c.Leg.Body)), minQueued)
		}
	}
	return bytes
}

// reaches reports whether t would connect to the engine that holds the blocks, and to no
// other host, if it is called with the hosts of prefill's answer.
func (c *call) reaches(t engine.Target) bool {
	for _, host := range c.Hosts {
		if host != "" && !c.holder.Owns(host, t.Instance) {
			return false
		}
	}
	return true
}

// gone reports whether the engine that holds the blocks has restarted or died: its memory is gone
// too. An engine that fails its probes may still be alive, so the Runner calls gone only after a
// try.
func (c *call) gone() bool {
	s := c.holder.State()
	return s != engine.Ready && s != engine.Draining
}

// header returns the header fields of a call to t, with t's own key if it has one.
func (j *Job) header(t engine.Target, leg []upstream.Field) []upstream.Field {
	auth := j.Auth
	if t.APIKey != "" {
		auth = "Bearer " + t.APIKey
	}
	if auth == "" {
		return leg
	}
	return append([]upstream.Field{{Name: "Authorization", Value: auth}}, leg...)
}
