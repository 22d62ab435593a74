package proxy

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/upstream"
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
	b = appendOwed(appendOwed(appendOwed(b, j.requestID), j.connector), j.auth)
	b = binary.AppendUvarint(b, uint64(max(0, j.limit)))
	b = binary.AppendUvarint(b, uint64(len(j.calls)))
	for i := range j.calls {
		c := &j.calls[i]
		anyTarget := byte(0)
		if c.AnyTarget {
			anyTarget = 1
		}
		b = append(b, byte(c.Phase), byte(c.Until), anyTarget)
		b = appendOwed(appendOwed(appendOwed(b, c.How), c.Leg.Path), c.Leg.Body)
		b = binary.AppendUvarint(b, uint64(len(c.Leg.Header)))
		for _, f := range c.Leg.Header {
			b = appendOwed(appendOwed(b, f.Name), f.Value)
		}
		b = binary.AppendUvarint(b, uint64(len(c.Hosts)))
		for _, host := range c.Hosts {
			b = appendOwed(b, host)
		}
		for _, t := range [...]engine.Target{c.target, c.holder} {
			b = binary.AppendUvarint(appendOwed(b, t.Name()), uint64(t.Rank))
		}
	}
	return b
}

func appendOwed[T string | []byte](dst []byte, text T) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(text))), text...)
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
	r := owedReader{b: b}
	j = &cleanupJob{requestID: string(r.text()), connector: string(r.text()), auth: string(r.text()), since: time.Now()}
	j.limit = time.Duration(min(r.uint(), uint64(time.Hour)))
	for range r.list() {
		head := r.take(3)
		if head == nil {
			break
		}
		c := cleanupCall{Cleanup: connector.Cleanup{Phase: abi.Phase(head[0]), Until: connector.Until(head[1]), AnyTarget: head[2] != 0}}
		c.How, c.Leg.Path, c.Leg.Body = string(r.text()), string(r.text()), slices.Clone(r.text())
		for range r.list() {
			c.Leg.Header = append(c.Leg.Header, upstream.Field{Name: string(r.text()), Value: string(r.text())})
		}
		for range r.list() {
			c.Hosts = append(c.Hosts, string(r.text()))
		}
		for _, to := range [...]*engine.Target{&c.target, &c.holder} {
			name, rank := r.text(), r.uint()
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
	if r.bad || len(r.b) > 0 {
		return nil, nil, errOwed
	}
	return j, lost, nil
}

var errOwed = errors.New("it is not what a worker owes")

// owedReader reads from the front of b. What is not there makes it bad.
type owedReader struct {
	b   []byte
	bad bool
}

func (r *owedReader) uint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.b, r.bad = nil, true
		return 0
	}
	r.b = r.b[n:]
	return v
}

// list is the length of a list each of whose members takes a byte at least.
func (r *owedReader) list() int {
	n := r.uint()
	if n > uint64(len(r.b)) {
		r.b, r.bad = nil, true
		return 0
	}
	return int(n)
}

// take returns the next n bytes; nil when there are not so many.
func (r *owedReader) take(n int) []byte {
	if n > len(r.b) {
		r.b, r.bad = nil, true
		return nil
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

func (r *owedReader) text() []byte { return r.take(r.list()) }
