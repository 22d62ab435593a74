package proxy

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// maxOwed bounds a clean-up that is told beforehand. A longer one holds a prompt:
// it is left to the engine's own time-out if this process dies.
const maxOwed = 16 << 10

// owedJob is a cleanupJob on its way to the process that runs it if this one dies
// between the legs.
type owedJob struct {
	RequestID, Connector, Auth string
	Limit                      time.Duration
	Calls                      []owedCall
}

type owedCall struct {
	connector.Cleanup
	Target, Holder owedTarget
}

// owedTarget is a target by its engine's name: another process has other numbers.
type owedTarget struct {
	Engine string
	Rank   int
}

// owe tells the coordinator, if there is one, what frees prefill's blocks if nobody
// is there to do so before decode has them, and that prefill is done.
func (a *attempt) owe() {
	if a.p.Lease.Owes() {
		if calls := a.conn.Cleanup(&a.c, a.orphan); slices.ContainsFunc(calls, func(c connector.Cleanup) bool { return c.Leg.Path != "" }) {
			a.p.Lease.Owe(a.cleanupJob(calls).owed())
		}
	}
	a.p.Lease.PrefillDone()
}

// owed encodes the job for CleanUp; nil if it is too long.
func (j *cleanupJob) owed() []byte {
	o := owedJob{RequestID: j.requestID, Connector: j.connector, Auth: j.auth, Limit: j.limit}
	for _, c := range j.calls {
		o.Calls = append(o.Calls, owedCall{
			Cleanup: c.Cleanup, Target: owedTarget{c.target.Name(), c.target.Rank}, Holder: owedTarget{c.holder.Name(), c.holder.Rank},
		})
	}
	b, err := json.Marshal(o)
	if err != nil || len(b) > maxOwed {
		return nil
	}
	return b
}

// CleanUp does, in the background, what another process of the same deployment
// owed its engines when it died: owed is of a Lease.Owe there.
func (s *Server) CleanUp(owed []byte) error {
	var o owedJob
	if err := json.Unmarshal(owed, &o); err != nil {
		return errors.New("clean up: it is not what a worker owes")
	}
	job := &cleanupJob{requestID: o.RequestID, connector: o.Connector, auth: o.Auth, since: time.Now(), limit: o.Limit}
	snapshot := s.deps.Registry.Snapshot()
	for _, c := range o.Calls {
		target, ok := c.Target.in(snapshot)
		holder, known := c.Holder.in(snapshot)
		if !ok || !known {
			return fmt.Errorf("clean up: engine %.64q or %.64q is not known any more", c.Target.Engine, c.Holder.Engine)
		}
		job.calls = append(job.calls, cleanupCall{Cleanup: c.Cleanup, target: target, holder: holder})
	}
	s.janitor.start(job)
	return nil
}

func (t owedTarget) in(s *engine.Snapshot) (engine.Target, bool) {
	i := s.Instance(t.Engine)
	return engine.Target{Instance: i, Rank: t.Rank}, i != nil && t.Rank >= 0 && t.Rank < len(i.Load)
}
