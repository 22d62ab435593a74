package cleanup

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// MaxEncoded limits an encoded job, in bytes. A longer job contains a long prompt. If this process
// dies, nobody makes its calls: the engine frees the blocks by its own timeout, if it has one.
const MaxEncoded = 64 << 10

// maxHold limits the patience of a job that another process encoded.
const maxHold = time.Hour

// maxRecords bounds the records of an encoded job; see fleetpb.Unmarshal. A retained job may be
// longer than MaxEncoded.
const maxRecords = 4096

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

// Append appends the encoded job to b. A target is the name of its engine and its rank, because
// another process numbers the engines differently. Append is not called for jobs that wait for the
// restart of an engine.
func (j *Job) Append(b []byte) []byte {
	m := &fleetpb.Cleanup{
		RequestId: j.RequestID, Connector: j.Connector, Auth: j.Auth, LimitNs: int64(max(0, j.Limit)), Restarts: j.Restarts,
		Calls: make([]*fleetpb.CleanupCall, len(j.calls)),
	}
	for i := range j.calls {
		c := &j.calls[i]
		call := &fleetpb.CleanupCall{
			Phase: uint32(c.Phase), Until: uint32(c.Until), AnyTarget: c.AnyTarget, HoldNs: int64(max(0, c.Cleanup.Hold)),
			How: c.How, Path: c.Leg.Path, Body: c.Leg.Body, Hosts: c.Hosts,
			Target: c.target.Name(), TargetRank: uint32(c.target.Rank), Holder: c.holder.Name(), HolderRank: uint32(c.holder.Rank),
		}
		call.Header = make([]*fleetpb.Field, 0, len(c.Leg.Header))
		for _, f := range c.Leg.Header {
			call.Header = append(call.Header, &fleetpb.Field{Name: f.Name, Value: f.Value})
		}
		m.Calls[i] = call
	}
	return fleetpb.AppendFast(b, m)
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
	var m fleetpb.Cleanup
	if fleetpb.UnmarshalView(bytes.Clone(b), &m, maxRecords) != nil || len(m.Calls) == 0 {
		return nil, nil, errNotAJob
	}
	j = &Job{RequestID: m.RequestId, Connector: m.Connector, Auth: m.Auth, Since: time.Now(), Limit: bounded(m.LimitNs), Restarts: m.Restarts}
	for _, one := range m.Calls {
		if one.Phase > uint32(abi.Encode) || one.Until > uint32(connector.UntilServed) {
			return nil, nil, errLaterJob
		}
		c := call{Cleanup: connector.Cleanup{
			Phase: abi.Phase(one.Phase), Until: connector.Until(one.Until), AnyTarget: one.AnyTarget,
			Hold: bounded(one.HoldNs), How: one.How, Hosts: one.Hosts,
		}}
		c.Leg.Path, c.Leg.Body = one.Path, one.Body
		for _, f := range one.Header {
			c.Leg.Header = append(c.Leg.Header, upstream.Field{Name: f.Name, Value: f.Value})
		}
		find := func(to *engine.Target, name string, rank uint32) {
			i := known.Instance(name)
			if i == nil || uint64(rank) >= uint64(len(i.Load)) {
				lost = fmt.Errorf("engine %.64q is no longer known", name)
				return
			}
			*to = engine.Target{Instance: i, Rank: int(rank)}
		}
		find(&c.target, one.Target, one.TargetRank)
		find(&c.holder, one.Holder, one.HolderRank)
		j.slow = j.slow || c.Until == connector.UntilServed
		j.calls = append(j.calls, c)
	}
	return j, lost, nil
}

// bounded returns a duration of at most maxHold.
func bounded(ns int64) time.Duration { return time.Duration(min(max(0, ns), int64(maxHold))) }

var (
	errNotAJob  = errors.New("it is not an encoded clean-up")
	errLaterJob = errors.New("it is a clean-up of a later version")
)
