// Package balance spreads the connections of a host over the workers that share one
// listening socket.
//
// Each worker publishes its numbers of connections and exchanges in a file of the fleet's
// folder that all workers map into their memory. A worker with more than its share waits
// for a short time before it accepts the next connection, so that another worker can
// accept it. The wait is bounded, because the other workers may be dead, suspended or
// busy. Therefore a running worker accepts every connection.
//
// The decisions behind this package are in docs/design/edge.md.
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
	// layout is the number of table's layout. A worker does not use a file with another
	// number.
	layout = 1
	// slots is the maximum number of workers of a host.
	slots = 256
	// tolerance is a fraction of a worker's share. A worker waits for another worker if
	// it has more connections than the other worker by more than this fraction. It also
	// bounds the weight of exchanges.
	tolerance = 1.0 / 16
)

// entry is the published state of one worker. Only that worker writes to it. The zero
// value means that the worker does not accept.
type entry struct {
	socket      atomic.Uint64 // inode of the listening socket; 0: the worker does not accept
	looks       atomic.Uint64 // number of times that the worker was ready to accept
	connections atomic.Int64
	exchanges   atomic.Int64
	pid         atomic.Int64 // of the worker
	_           [24]byte     // an entry fills a cache line
}

// table is the shared file.
type table struct {
	// late is the last time at which a worker accepted a connection because no other
	// worker had accepted it during the head start. In nanoseconds since 1970.
	late    atomic.Int64
	used    atomic.Int64  // number of entries that were ever used: the first ones
	layout  atomic.Uint64 // constant layout; 0 in a new file
	_       [40]byte
	entries [slots]entry
}

// Worker is the entry of this process, and its view of the other workers. The methods Connection and Exchange are safe for concurrent use.
type Worker struct {
	all    *table
	own    *entry
	socket uint64
	others [slots]rival // used only by the accepting goroutine
}

// rival is a worker's observation of another worker.
type rival struct {
	looks  uint64 // its looks at the start of the last head start
	missed int    // consecutive head starts that the rival did not use
}

// Join returns the entry of a worker in dir, and l as a listener that waits for workers with fewer
// connections. All workers of dir must have the socket of l. Running workers must have different
// slots. The worker leaves the balancing when the listener is closed. Only one goroutine at a time
// may call Accept.
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

// share maps the shared file. It stays mapped until the process ends. A file of another size
// or layout is an error, and does not change: a smaller size would crash the processes that
// have mapped the file.
func share(dir *privatedir.Dir) (*table, error) {
	f, err := dir.OpenFile(fileName, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	const size = int64(unsafe.Sizeof(table{}))
	st, err := f.Stat()
	if err == nil && st.Size() == 0 {
		err = f.Truncate(size)
	}
	if err != nil {
		return nil, err
	}
	if st.Size() != 0 && st.Size() != size {
		return nil, fmt.Errorf("%s has %d bytes, not %d: another version wrote the file", f.Name(), st.Size(), size)
	}
	b, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", f.Name(), err)
	}
	t := (*table)(unsafe.Pointer(unsafe.SliceData(b)))
	if !t.layout.CompareAndSwap(0, layout) && t.layout.Load() != layout {
		err := fmt.Errorf("%s has layout %d, not %d: another version wrote the file", f.Name(), t.layout.Load(), layout)
		return nil, errors.Join(err, unix.Munmap(b))
	}
	return t, nil
}

// Remove removes the shared file. No worker of dir may accept, and none may join meanwhile.
func Remove(dir *privatedir.Dir) error { return dir.Remove(fileName) }

// Connection counts a connection of a client that has been opened (1) or closed (-1).
func (w *Worker) Connection(change int64) { w.own.connections.Add(change) }

// Exchange counts a request that has begun (1) or ended (-1).
func (w *Worker) Exchange(change int64) { w.own.exchanges.Add(change) }

// leave notes that the worker no longer accepts.
func (w *Worker) leave() { w.own.socket.Store(0) }

// entries returns the entries of all workers that have joined.
func (w *Worker) entries() []entry {
	return w.all.entries[:max(0, min(w.all.used.Load(), slots))]
}

// part is the average load of the accepting workers at one moment.
type part struct {
	workers     int
	connections float64 // each worker's share, including connections that wait for Accept
	exchanges   float64 // average of each worker
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

// counts reports whether worker i accepts connections of the socket. A worker that has
// not used its last head starts does not count until it is ready to accept again: it is
// dead, stopped, or gets no processor time.
func (w *Worker) counts(i int) bool {
	e := &w.all.entries[i]
	if e == w.own {
		return true
	}
	r := &w.others[i]
	return e.socket.Load() == w.socket && (r.missed < maxMissed || r.looks != e.looks.Load())
}

// score is the load of a worker. Connections count; if they are nearly equal, exchanges
// decide.
func (p part) score(e *entry) float64 {
	most := max(0.5, p.connections*tolerance)
	more := float64(e.exchanges.Load()) - p.exchanges
	return float64(e.connections.Load()) + max(-most, min(more, most))
}

// before reports whether worker i should take the next connection rather than this one.
func (w *Worker) before(p part, i int) bool {
	return &w.all.entries[i] != w.own && w.counts(i) && p.score(&w.all.entries[i])+p.connections*tolerance < p.score(w.own)
}

// ahead reports whether another worker should accept the next connection. A worker with
// less than its share does not wait, so a burst is divided without waiting, in any
// order of the workers.
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

// begin notes the state of the other workers at the start of a head start.
func (w *Worker) begin() {
	for i := range w.entries() {
		r, looks := &w.others[i], w.all.entries[i].looks.Load()
		if r.looks != looks {
			r.looks, r.missed = looks, 0
		}
	}
}

// end notes the workers that have not used the head start. Dead workers do not count
// from then on.
func (w *Worker) end(p part) {
	for i := range w.entries() {
		if !w.before(p, i) {
			continue
		}
		w.others[i].missed++
		if errors.Is(unix.Kill(int(w.all.entries[i].pid.Load()), 0), unix.ESRCH) {
			w.others[i].missed = maxMissed
		}
	}
}

// turn reports whether this worker may accept a connection that no other worker accepted
// during the head start. All workers together accept at most one such connection in each
// headStart, because the other workers may only be delayed. A worker with far more than
// its share waits longer.
func (w *Worker) turn(p part) bool {
	wait := headStart
	if float64(w.own.connections.Load()) > p.connections*(1+2*tolerance) {
		wait *= farAhead
	}
	now, last := time.Now().UnixNano(), w.all.late.Load()
	early := now >= last && now-last < int64(wait) // the clock may have been set back
	return !early && w.all.late.CompareAndSwap(last, now)
}
