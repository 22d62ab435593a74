package cleanup

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

// maxEncoded limits an encoded job, in bytes. A longer job contains a prompt: if this
// process dies, the engine frees the blocks by its own timeout.
const maxEncoded = 64 << 10

// Encode returns the job for Runner.StartEncoded of another process; nil if it is too
// long.
func (j *Job) Encode() []byte {
	size := 128 + len(j.RequestID) + len(j.Connector) + len(j.Auth)
	for i := range j.calls {
		size += 512 + len(j.calls[i].Leg.Body)
	}
	if size > maxEncoded {
		return nil
	}
	return j.Append(make([]byte, 0, size))
}

// Append appends the encoded job to b. The length of each text and list precedes it as a
// uvarint. A target is the name of its engine and its rank, because another process
// numbers the engines differently.
func (j *Job) Append(b []byte) []byte {
	b = appendText(appendText(appendText(b, j.RequestID), j.Connector), j.Auth)
	b = binary.AppendUvarint(b, uint64(max(0, j.Limit)))
	b = binary.AppendUvarint(b, uint64(len(j.calls)))
	for i := range j.calls {
		c := &j.calls[i]
		anyTarget := byte(0)
		if c.AnyTarget {
			anyTarget = 1
		}
		b = append(b, byte(c.Phase), byte(c.Until), anyTarget)
		b = appendText(appendText(appendText(b, c.How), c.Leg.Path), c.Leg.Body)
		b = binary.AppendUvarint(b, uint64(len(c.Leg.Header)))
		for _, f := range c.Leg.Header {
			b = appendText(appendText(b, f.Name), f.Value)
		}
		b = binary.AppendUvarint(b, uint64(len(c.Hosts)))
		for _, host := range c.Hosts {
			b = appendText(b, host)
		}
		for _, t := range [...]engine.Target{c.target, c.holder} {
			b = binary.AppendUvarint(appendText(b, t.Name()), uint64(t.Rank))
		}
	}
	return b
}

func appendText[T string | []byte](dst []byte, text T) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(text))), text...)
}

// readComplete reads a job that Append wrote, all of whose engines must be known.
// Nothing of the job refers to b.
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
	r := jobReader{b: b}
	j = &Job{RequestID: string(r.text()), Connector: string(r.text()), Auth: string(r.text()), Since: time.Now()}
	j.Limit = time.Duration(min(r.uint(), uint64(time.Hour)))
	for range r.list() {
		head := r.take(3)
		if head == nil {
			break
		}
		c := call{Cleanup: connector.Cleanup{Phase: abi.Phase(head[0]), Until: connector.Until(head[1]), AnyTarget: head[2] != 0}}
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
		return nil, nil, errNotAJob
	}
	return j, lost, nil
}

var errNotAJob = errors.New("it is not an encoded clean-up")

// jobReader reads from the front of b. A read behind the end sets bad.
type jobReader struct {
	b   []byte
	bad bool
}

func (r *jobReader) uint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.b, r.bad = nil, true
		return 0
	}
	r.b = r.b[n:]
	return v
}

// list reads the length of a list. Each member of the list has at least one byte.
func (r *jobReader) list() int {
	n := r.uint()
	if n > uint64(len(r.b)) {
		r.b, r.bad = nil, true
		return 0
	}
	return int(n)
}

// take returns the next n bytes; nil if there are fewer.
func (r *jobReader) take(n int) []byte {
	if n > len(r.b) {
		r.b, r.bad = nil, true
		return nil
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

func (r *jobReader) text() []byte { return r.take(r.list()) }
