package proxy

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/upstream"
	"github.com/pdproxy/pdproxy/proxy/wire"
)

// maxOwed bounds a clean-up that is told beforehand. A longer one holds a prompt:
// it is left to the engine's own time-out if this process dies.
const maxOwed = 64 << 10

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
	size := 128 + len(j.requestID) + len(j.connector) + len(j.auth)
	for i := range j.calls {
		size += 512 + len(j.calls[i].Leg.Body)
	}
	if size > maxOwed {
		return nil
	}
	return j.append(make([]byte, 0, size))
}

// append encodes the job for readJob. Texts and lists have their length, a uvarint,
// before them; a target is its engine's name and its rank, for another process has
// other numbers.
func (j *cleanupJob) append(b []byte) []byte {
	b = wire.AppendText(wire.AppendText(wire.AppendText(b, j.requestID), j.connector), j.auth)
	b = wire.AppendUint(b, uint64(max(0, j.limit)))
	b = wire.AppendUint(b, uint64(len(j.calls)))
	for i := range j.calls {
		c := &j.calls[i]
		anyTarget := byte(0)
		if c.AnyTarget {
			anyTarget = 1
		}
		b = append(b, byte(c.Phase), byte(c.Until), anyTarget)
		b = wire.AppendText(wire.AppendText(wire.AppendText(b, c.How), c.Leg.Path), c.Leg.Body)
		b = wire.AppendUint(b, uint64(len(c.Leg.Header)))
		for _, f := range c.Leg.Header {
			b = wire.AppendText(wire.AppendText(b, f.Name), f.Value)
		}
		b = wire.AppendUint(b, uint64(len(c.Hosts)))
		for _, host := range c.Hosts {
			b = wire.AppendText(b, host)
		}
		for _, t := range [...]engine.Target{c.target, c.holder} {
			b = wire.AppendUint(wire.AppendText(b, t.Name()), uint64(t.Rank))
		}
	}
	return b
}

// CleanUp does, in the background, what another process of the same deployment
// owed its engines when it died: owed is of a Lease.Owe there.
func (s *Server) CleanUp(owed []byte) error {
	job, err := readOwed(owed, s.deps.Registry.Snapshot())
	if err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	s.janitor.start(job)
	return nil
}

// readOwed reads what owed wrote. Nothing of the job aliases b.
func readOwed(b []byte, known *engine.Snapshot) (*cleanupJob, error) {
	j, lost, err := readJob(b, known)
	if err = cmp.Or(err, lost); err != nil {
		return nil, err
	}
	return j, nil
}

// readJob reads what cleanupJob.append wrote. Nothing of the job aliases b. lost names
// an engine that is not known any more: such targets are zero.
func readJob(b []byte, known *engine.Snapshot) (j *cleanupJob, lost, err error) {
	r := wire.Read(b)
	j = &cleanupJob{requestID: string(r.Text()), connector: string(r.Text()), auth: string(r.Text()), since: time.Now()}
	j.limit = time.Duration(min(r.Uint(), uint64(time.Hour)))
	for range r.List(1) {
		head := r.Bytes(3)
		if head == nil {
			break
		}
		c := cleanupCall{Cleanup: connector.Cleanup{Phase: abi.Phase(head[0]), Until: connector.Until(head[1]), AnyTarget: head[2] != 0}}
		c.How, c.Leg.Path, c.Leg.Body = string(r.Text()), string(r.Text()), slices.Clone(r.Text())
		for range r.List(1) {
			c.Leg.Header = append(c.Leg.Header, upstream.Field{Name: string(r.Text()), Value: string(r.Text())})
		}
		for range r.List(1) {
			c.Hosts = append(c.Hosts, string(r.Text()))
		}
		for _, to := range [...]*engine.Target{&c.target, &c.holder} {
			name, rank := r.Text(), r.Uint()
			i := known.Instance(string(name))
			if i == nil || rank >= uint64(len(i.Load)) {
				lost = fmt.Errorf("engine %.64q is not known any more", name)
				continue
			}
			*to = engine.Target{Instance: i, Rank: int(rank)}
		}
		j.slow = j.slow || c.Until == connector.UntilServed
		j.calls = append(j.calls, c)
	}
	if !r.Done() {
		return nil, nil, errOwed
	}
	return j, lost, nil
}

var errOwed = errors.New("it is not what a worker owes")
