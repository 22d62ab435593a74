package cleanup

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

// MaxEncoded limits an encoded job, in bytes. A longer job contains a long prompt. If this process
// dies, nobody makes its calls: the engine frees the blocks by its own timeout, if it has one.
const MaxEncoded = 64 << 10

// maxHold limits the patience of a job that another process encoded.
const maxHold = time.Hour

// The flags of an encoded call.
const (
	anyTarget = 1 << iota
	sameID
)

// Encode returns the job for Runner.StartEncoded of another process; nil if it is too
// long.
func (j *Job) Encode() []byte {
	size := 128 + len(j.RequestID) + len(j.Connector) + len(j.Auth)
	for i := range j.calls {
		size += 512 + len(j.calls[i].Leg.Body)
	}
	if size > MaxEncoded {
		return nil
	}
	return j.Append(make([]byte, 0, size))
}

// Append appends the encoded job to b. The length of each text and list precedes it as a
// uvarint. A target is the name of its engine and its rank, because another process
// numbers the engines differently.
func (j *Job) Append(b []byte) []byte {
	b = wire.AppendText(wire.AppendText(wire.AppendText(b, j.RequestID), j.Connector), j.Auth)
	b = wire.AppendUint(wire.AppendUint(b, uint64(max(0, j.Limit))), j.Restarts)
	b = wire.AppendUint(b, uint64(len(j.calls)))
	for i := range j.calls {
		c := &j.calls[i]
		b = append(b, byte(c.Phase), byte(c.Until), c.flags())
		b = wire.AppendUint(b, uint64(max(0, c.Cleanup.Hold)))
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

// flags returns the flags of the encoded call. Restarted has no flag: Append is not called
// for jobs that wait for the restart of an engine.
func (c *call) flags() (f byte) {
	if c.AnyTarget {
		f |= anyTarget
	}
	if c.SameID {
		f |= sameID
	}
	return f
}

// readComplete decodes a job that Append encoded. It fails if one of the job's engines is
// not known. The job does not refer to the memory of b.
func readComplete(b []byte, known *engine.Snapshot) (*Job, error) {
	j, lost, err := readJob(b, known)
	if err = cmp.Or(err, lost); err != nil {
		return nil, err
	}
	return j, nil
}

// readJob reads a job that Append wrote. Nothing of the job refers to b. lost names an
// engine that is not known any more; such a target is zero.
func readJob(b []byte, known *engine.Snapshot) (j *Job, lost, err error) {
	r := wire.Read(b)
	j = &Job{RequestID: string(r.Text()), Connector: string(r.Text()), Auth: string(r.Text()), Since: time.Now()}
	j.Limit = time.Duration(min(r.Uint(), uint64(time.Hour)))
	j.Restarts = uint32(r.Uint())
	for range r.List(1) {
		head := r.Bytes(3)
		if head == nil {
			break
		}
		c := call{Cleanup: connector.Cleanup{
			Phase: abi.Phase(head[0]), Until: connector.Until(head[1]),
			AnyTarget: head[2]&anyTarget != 0, SameID: head[2]&sameID != 0,
		}}
		c.Cleanup.Hold = time.Duration(min(r.Uint(), uint64(maxHold)))
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
				lost = fmt.Errorf("engine %.64q is no longer known", name)
				continue
			}
			*to = engine.Target{Instance: i, Rank: int(rank)}
		}
		j.slow = j.slow || c.Until == connector.UntilServed
		j.calls = append(j.calls, c)
	}
	if !r.Done() {
		return nil, nil, errNotAJob
	}
	return j, lost, nil
}

var errNotAJob = errors.New("it is not an encoded clean-up")
