// Package election decides which coordinator of a fleet leads, and publishes the decision
// to the workers. The coordinators wait in a queue in etcd, each with a lease, and the first
// in the queue leads; or they hold a Lease of Kubernetes one after another, and the holder leads.
// The leader writes its record. Workers and the other coordinators watch this record. The record
// outlives the leader: a process that cannot reach the store uses the last record that it has seen.
//
// # Epochs
//
// The epoch of a leader is higher than all earlier epochs. It is the larger of two
// numbers: the Unix time in ms at which the leader began to lead, and the highest known
// epoch plus one. One write compares the record and the place in the queue, or the version of
// the Lease, so two leaders of one store never have the same epoch. Because the epoch contains
// the time, it also grows if a store loses its data, and in fleets that begin to use etcd. A counter
// in the store would restart at 1, and workers would refuse the lower epochs permanently.
//
// # Without the store
//
// A leader with an expired lease continues to lead in its epoch until it reads a record
// with a higher epoch: an outage of the store is no reason to stop service. The old leader may
// then lead at the same time as a new leader whose record it cannot read. Workers connect
// to the leader with the higher epoch, and the two leaders mint from different ranges of
// ids.
//
// The decisions behind this package are in docs/design/fleet.md.
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
	// Epoch is higher than the epoch of every earlier leader; 0: there was no leader yet.
	Epoch uint64 `json:"epoch"`
	// Node is the name of its host, for operators.
	Node string `json:"node"`
	// ID is a random number of the coordinator's process.
	ID uint64 `json:"id,string"`
}

// maxRecord bounds the size of a record.
const maxRecord = 4 << 10

// parse reads a leader's record.
func parse(value []byte) (Leader, error) {
	var l Leader
	if len(value) > maxRecord {
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
	Etcd  clientv3.Config // Context is set by Run
	Lease *Lease          // nil: Etcd has the election
	Name  string          // of the fleet in Etcd
	// Address and Node go into this process's record. With an empty Address the process
	// only follows the leader, as a worker does.
	Address, Node string
	// TTL is the time to live of the lease, in whole seconds. When a leader has had no contact
	// with the store for this time, another coordinator can become the leader.
	TTL time.Duration
	Log *slog.Logger
}

// Standing is the leader according to the data of this process.
type Standing struct {
	Leader Leader // the last known leader; Epoch 0: none is known
	Leads  bool   // this process leads
}

// Election is one process's view of the election and its candidacy. Safe for concurrent
// use.
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

// New returns an election. Run starts it; before Run, no leader is known.
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

// Resign gives up the leadership or the place in the queue permanently. The next
// coordinator in the queue leads at once. Run continues to follow the leader's record.
func (e *Election) Resign() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.resign()
	if e.standing.Leads {
		e.set(Standing{Leader: e.standing.Leader})
	}
}

// set stores the standing and closes changed. The caller holds mu.
func (e *Election) set(s Standing) {
	if s == e.standing {
		return
	}
	e.standing = s
	close(e.changed)
	e.changed = make(chan struct{})
}

// saw handles a record from the store. It ignores this process's own record and the
// records of earlier epochs.
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

// lead notes that this process leads with the record l. False: this process has seen a
// higher epoch in the meantime or has resigned.
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
