// Package election settles which of a fleet's coordinators leads, and tells its
// workers. The coordinators stand in line in etcd, each with a lease; the first
// in line writes the leader's record, which workers and the other coordinators
// watch. The record outlives the leader: whoever cannot reach etcd goes by the
// last one that it has seen.
//
// # Epochs
//
// A leader has an epoch above those of all before it: the Unix time in ms at
// which it began to lead, or one more than the highest known, whichever is more.
// The record and the place in line are compared in one transaction, so two
// leaders of one store never have the same. Time is in it for stores that lose
// their data and for fleets that had none: numbers counted by the store would
// begin again, and workers refuse a lower epoch for ever.
//
// # Without etcd
//
// A leader whose lease has run out is the leader of its epoch until it sees the
// record of a higher one: that etcd is away is no reason to serve nobody. It may
// then lead beside another that it does not see. Workers go to the higher epoch,
// and neither mints an id that the other could.
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
	// Address is where workers and standbys dial it: host:port or unix:path.
	Address string `json:"address"`
	// Epoch is above that of every earlier leader; 0: nobody has led yet.
	Epoch uint64 `json:"epoch"`
	// Node is the name of its host, for people.
	Node string `json:"node"`
	// ID is the coordinator's own, of this life of its process.
	ID uint64 `json:"id,string"`
}

// mostRecord bounds what is read of a record.
const mostRecord = 4 << 10

// parse reads a leader's record.
func parse(value []byte) (Leader, error) {
	var l Leader
	if len(value) > mostRecord {
		return Leader{}, errors.New("read leader's record: it is too long")
	}
	if err := json.Unmarshal(value, &l); err != nil {
		return Leader{}, errors.New("read leader's record: it is no JSON of one")
	}
	if l.Address == "" || l.Epoch == 0 {
		return Leader{}, errors.New("read leader's record: it names no leader")
	}
	return l, nil
}

// Options is what an Election stands on.
type Options struct {
	Etcd clientv3.Config // Context is set by Run
	Name string          // of the fleet
	// Address and Node are what the record says when this process leads. An
	// empty address stands for no election: a worker follows only.
	Address, Node string
	// Lease is how long this process leads without a word to etcd; whole seconds.
	Lease time.Duration
	Log   *slog.Logger
}

// Standing is who leads, as far as it is known here.
type Standing struct {
	Leader Leader // the last known; its epoch is 0 if none is
	Leads  bool   // it is this process
}

// Election is one process's part in it. Its methods are safe for concurrent use.
type Election struct {
	o      Options
	id     uint64
	prefix string // of all keys

	stands context.Context // until Resign
	resign context.CancelFunc

	mu       sync.Mutex
	standing Standing      // guarded by mu
	changed  chan struct{} // closed when standing is another; guarded by mu
}

// New returns an election of which nothing is known yet. It starts nothing.
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

// Standing returns who leads, and a channel that is closed when that is no
// longer so.
func (e *Election) Standing() (s Standing, changed <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.standing, e.changed
}

// Resign gives up the lead, or the place in line, for good: whoever is next
// leads at once. Run goes on to follow.
func (e *Election) Resign() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.resign()
	if e.standing.Leads {
		e.set(Standing{Leader: e.standing.Leader})
	}
}

// set notes who leads. It is called with mu held.
func (e *Election) set(s Standing) {
	if s == e.standing {
		return
	}
	e.standing = s
	close(e.changed)
	e.changed = make(chan struct{})
}

// saw takes in a record from the store. What this process wrote there itself is
// not news, and neither is an epoch that is past.
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

// lead notes that this process leads by a record that it wrote; false if a
// higher epoch has been seen since, or it has resigned.
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
