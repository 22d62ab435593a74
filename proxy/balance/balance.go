// Package balance spreads the connections of a host over the workers that share one
// listening socket.
//
// Each worker publishes how many connections and exchanges it has, in a file of the
// fleet's folder that all workers map into their memory. A worker that has more than
// its part waits for a moment before it accepts the next connection, so that the
// others can take it. It waits for a bounded time, because the others may be dead,
// stopped or busy: every connection is accepted by a worker that runs.
package balance

import (
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/takeover"
)

const (
	// fileName is the name of the shared file. Another layout needs another name,
	// because processes of two versions share the folder during a takeover.
	fileName = "balance-1"
	// slots is how many workers of a host there can be.
	slots = 256
	// tolerance is by how much of its part a worker may have more connections than
	// another one before it waits for that one, and the most that streams count.
	tolerance = 1.0 / 16
)

// entry is what one worker publishes. Only its worker writes to it. The zero value is
// that of a worker that does not accept.
type entry struct {
	socket      atomic.Uint64 // inode of the listening socket; 0: the worker does not accept
	looks       atomic.Uint64 // how often the worker was ready to accept
	connections atomic.Int64
	exchanges   atomic.Int64
	pid         atomic.Int64 // of the worker
	_           [24]byte     // an entry fills a cache line
}

// table is the shared file.
type table struct {
	// late is the last time that a worker took a connection because the others had not
	// used their head start, in nanoseconds since 1970.
	late    atomic.Int64
	used    atomic.Int64 // how many entries have ever been used: the first ones
	_       [48]byte
	entries [slots]entry
}

// Worker is the entry of this process, and its view of the others. A nil *Worker
// counts nothing. The methods Connection and Exchange are safe for concurrent use.
type Worker struct {
	all    *table
	own    *entry
	socket uint64
	others [slots]rival // of the goroutine that accepts
}

// rival is what a worker has noticed of another one.
type rival struct {
	looks  uint64 // of its entry, when the last head start began
	missed int    // head starts in a row that it did not use
}

// Join returns the entry of a worker in dir, and l as a listener that waits for the
// workers that have fewer connections. All workers of dir have the socket of l. The
// numbers of living workers differ. Close of the listener ends the worker's part. One
// goroutine may call Accept at a time.
func Join(dir *privatedir.Dir, slot int, l net.Listener) (*Worker, net.Listener, error) {
	if slot < 0 || slot >= slots {
		return nil, nil, fmt.Errorf("worker %d: there are %d entries", slot, slots)
	}
	all, err := share(dir)
	if err != nil {
		return nil, nil, err
	}
	socket, err := takeover.FromListener("public", l)
	if err != nil {
		return nil, nil, err
	}
	gate, err := newGate(l, socket.File)
	if err != nil {
		socket.File.Close()
		return nil, nil, err
	}
	w := &Worker{all: all, own: &all.entries[slot], socket: gate.inode}
	for used := all.used.Load(); used <= int64(slot) && !all.used.CompareAndSwap(used, int64(slot)+1); used = all.used.Load() {
	}
	w.own.connections.Store(0)
	w.own.exchanges.Store(0)
	w.own.pid.Store(int64(os.Getpid()))
	w.own.looks.Add(1)
	w.own.socket.Store(w.socket)
	gate.worker = w
	return w, gate, nil
}

// share maps the shared file. It stays mapped until the process ends.
func share(dir *privatedir.Dir) (*table, error) {
	f, err := dir.OpenFile(fileName, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	const size = int64(unsafe.Sizeof(table{}))
	if err := f.Truncate(size); err != nil { // the same size for all: nothing is cut
		return nil, err
	}
	b, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", f.Name(), err)
	}
	return (*table)(unsafe.Pointer(unsafe.SliceData(b))), nil
}

// Connection counts a connection of a client that has been opened (1) or closed (-1).
func (w *Worker) Connection(change int64) {
	if w != nil {
		w.own.connections.Add(change)
	}
}

// Exchange counts a request that has begun (1) or ended (-1).
func (w *Worker) Exchange(change int64) {
	if w != nil {
		w.own.exchanges.Add(change)
	}
}

// leave notes that the worker does not accept any more.
func (w *Worker) leave() { w.own.socket.Store(0) }

// entries are those of all workers that there have been.
func (w *Worker) entries() []entry {
	return w.all.entries[:max(0, min(w.all.used.Load(), slots))]
}

// part is how the load of the workers that accept compares at one moment.
type part struct {
	workers     int
	connections float64 // that each should have, those that wait for Accept included
	exchanges   float64 // that each has on average
}

// part adds up the workers that accept and use their head starts.
func (w *Worker) part(waiting int) part {
	p := part{connections: float64(waiting)}
	for i := range w.entries() {
		if e := &w.all.entries[i]; w.counts(i) {
			p.workers++
			p.connections += float64(e.connections.Load())
			p.exchanges += float64(e.exchanges.Load())
		}
	}
	p.connections /= float64(max(1, p.workers))
	p.exchanges /= float64(max(1, p.workers))
	return p
}

// counts reports whether worker i accepts connections of the socket. One that has not
// used its last head starts does not count until it is ready to accept again: it is
// dead, stopped, or has no processor.
func (w *Worker) counts(i int) bool {
	e := &w.all.entries[i]
	if e == w.own {
		return true
	}
	r := &w.others[i]
	return e.socket.Load() == w.socket && (r.missed < mostMissed || r.looks != e.looks.Load())
}

// score is what a worker has. The connections count; where they are nearly equal, the
// exchanges decide.
func (p part) score(e *entry) float64 {
	most := max(0.5, p.connections*tolerance)
	more := float64(e.exchanges.Load()) - p.exchanges
	return float64(e.connections.Load()) + max(-most, min(more, most))
}

// before reports whether worker i should take the next connection rather than this one.
func (w *Worker) before(p part, i int) bool {
	return &w.all.entries[i] != w.own && w.counts(i) && p.score(&w.all.entries[i])+p.connections*tolerance < p.score(w.own)
}

// ahead reports whether another worker should take the next of the connections that
// wait. A worker that has fewer than its part does not wait: so a burst is divided
// without any waiting, in whatever order the workers run.
func (w *Worker) ahead(waiting int) (part, bool) {
	p := w.part(waiting)
	if p.workers < 2 || float64(w.own.connections.Load()) < math.Floor(p.connections) {
		return p, false
	}
	for i := range w.entries() {
		if w.before(p, i) {
			return p, true
		}
	}
	return p, false
}

// begin notes where the others are when a head start begins.
func (w *Worker) begin() {
	for i := range w.entries() {
		r, looks := &w.others[i], w.all.entries[i].looks.Load()
		if r.looks != looks {
			r.looks, r.missed = looks, 0
		}
	}
}

// end notes who has not used the head start. The dead do not count from then on.
func (w *Worker) end(p part) {
	for i := range w.entries() {
		if !w.before(p, i) {
			continue
		}
		w.others[i].missed++
		if errors.Is(unix.Kill(int(w.all.entries[i].pid.Load()), 0), unix.ESRCH) {
			w.others[i].missed = mostMissed
		}
	}
}

// turn reports whether this worker may take a connection for which the others have not
// used their head start. All workers together take one in each headStart, because the
// others may only be late; a worker that has far more than its part waits for longer.
func (w *Worker) turn(p part) bool {
	wait := headStart
	if float64(w.own.connections.Load()) > p.connections*(1+2*tolerance) {
		wait *= farAhead
	}
	now, last := time.Now().UnixNano(), w.all.late.Load()
	early := now >= last && now-last < int64(wait) // the clock may have been set back
	return !early && w.all.late.CompareAndSwap(last, now)
}
