// Package election decides which coordinator of a fleet leads, and tells the workers. The
// coordinators wait in line in etcd, each with a lease. The first in line writes the
// leader's record, which workers and the other coordinators watch. The record outlives the
// leader: a process that cannot reach etcd uses the last record that it has seen.
//
// # Epochs
//
// The epoch of a leader is above all earlier ones. It is the Unix time in ms at which it
// began to lead, or one more than the highest known epoch, whichever is larger. One
// transaction compares the record and the place in line, so two leaders of one store never
// have the same epoch. Because the epoch contains the time, it also grows if a store loses
// its data, and in fleets that begin to use etcd. A count kept by the store would begin
// again, and workers would refuse the lower epochs for ever.
//
// # Without etcd
//
// A leader whose lease has run out goes on to lead in its epoch until it sees the record
// of a higher one: an outage of etcd is no reason to stop serving. It may then lead at the
// same time as a leader that it does not see. Workers connect to the higher epoch, and the
// two mint from different ranges of ids.
package election

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Leader is the record of a coordinator that leads.
type Leader struct {
	// Address is the address for workers and standbys: host:port or unix:path.
	Address string `json:"address"`
	// Epoch is above that of every earlier leader; 0: nobody has led yet.
	Epoch uint64 `json:"epoch"`
	// Node is the name of its host, for operators.
	Node string `json:"node"`
	// ID is a random number of the coordinator's process.
	ID uint64 `json:"id,string"`
}

// mostRecord bounds the size of a record.
const mostRecord = 4 << 10

// parse reads a leader's record.
func parse(value []byte) (Leader, error) {
	var l Leader
	if len(value) > mostRecord {
		return Leader{}, errors.New("read leader's record: it is too long")
	}
	if err := json.Unmarshal(value, &l); err != nil {
		return Leader{}, errors.New("read leader's record: it is not valid JSON")
	}
	if l.Address == "" || l.Epoch == 0 {
		return Leader{}, errors.New("read leader's record: it names no leader")
	}
	return l, nil
}

// Options configures an Election.
type Options struct {
	Etcd clientv3.Config // Context is set by Run
	Name string          // of the fleet
	// Address and Node are for this process's record. With an empty Address the process
	// only follows, as a worker.
	Address, Node string
	// Lease is how long this process leads without contact to etcd, in whole seconds.
	Lease time.Duration
	Log   *slog.Logger
}

// Standing is the leader, as far as it is known here.
type Standing struct {
	Leader Leader // the last known; its epoch is 0 if none is
	Leads  bool   // this process leads
}

// Election is the part of one process in the election. Safe for concurrent use.
type Election struct {
	o      Options
	id     uint64
	prefix string // of all keys

	stands context.Context // until Resign
	resign context.CancelFunc

	mu       sync.Mutex
	standing Standing      // guarded by mu
	changed  chan struct{} // closed when standing changes
}

// New returns an election. Run starts it; before that nothing is known.
func New(o Options) *Election {
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	e := &Election{
		o: o, id: binary.LittleEndian.Uint64(id[:]), prefix: "/pdproxy/fleets/" + o.Name + "/",
		changed: make(chan struct{}),
	}
	e.stands, e.resign = context.WithCancel(context.Background())
	return e
}

// Standing returns the standing, and a channel that is closed when it changes.
func (e *Election) Standing() (s Standing, changed <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.standing, e.changed
}

// Resign gives up the lead or the place in line for good; the next in line leads at once.
// Run continues to follow.
func (e *Election) Resign() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.resign()
	if e.standing.Leads {
		e.set(Standing{Leader: e.standing.Leader})
	}
}

// set stores the standing; mu is held.
func (e *Election) set(s Standing) {
	if s == e.standing {
		return
	}
	e.standing = s
	close(e.changed)
	e.changed = make(chan struct{})
}

// saw handles a record from the store. It ignores the record of this process and those of
// past epochs.
func (e *Election) saw(l Leader) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if l.ID == e.id || l.Epoch <= e.standing.Leader.Epoch {
		return
	}
	if e.standing.Leads {
		e.o.Log.Warn("another coordinator leads; this one steps down", "leader", l.Address, "node", l.Node, "epoch", l.Epoch, "own", e.standing.Leader.Epoch)
	} else {
		e.o.Log.Info("a coordinator leads", "leader", l.Address, "node", l.Node, "epoch", l.Epoch)
	}
	e.set(Standing{Leader: l})
}

// lead notes that this process leads by a record that it wrote. False: a higher epoch has
// been seen since, or this process has resigned.
func (e *Election) lead(l Leader) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stands.Err() != nil || l.Epoch < e.standing.Leader.Epoch {
		return false
	}
	if e.standing != (Standing{Leader: l, Leads: true}) {
		e.o.Log.Info("this coordinator leads", "address", l.Address, "epoch", l.Epoch)
	}
	e.set(Standing{Leader: l, Leads: true})
	return true
}
