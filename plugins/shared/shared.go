// Package shared owns the data that guests share beyond one VM. The guests of a
// vm_id, over all their VMs, plugins and versions in this process, share queues
// and data with compare-and-swap, as long as the vm_id is in use. The VMs of a
// plugin share the metrics that they define. Semantics: proxy-wasm/spec 0.2.1
// "Shared data", "Shared queues" and "Metrics", and proxy-wasm-cpp-host where
// the specification leaves them open.
//
// The decisions behind this package are in docs/design/plugins.md.
package shared

import (
	"sync"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/abi/host"
)

// The limits of one vm_id, so that guests cannot exhaust the memory of the
// process. Keys, names and values count.
const (
	MaxData   = 64 << 20 // bytes of shared data
	MaxQueue  = 16 << 20 // bytes of the items in one queue
	MaxQueues = 64 << 20 // bytes of the names and the items of all queues
	maxNames  = 10000    // keys, and queues
)

// itemCost is the cost of an entry or an item in bytes, in addition to its own
// bytes.
const itemCost = 64

// Store holds the shared data and queues of a process. The zero value is empty
// and ready for use. It is safe for concurrent use.
type Store struct {
	cas atomic.Uint32 // of the last write, over all spaces

	mu        sync.Mutex
	spaces    map[string]*Space
	queues    map[uint32]*queue
	lastQueue uint32
}

// Space is the shared data of one vm_id. Its methods are safe for concurrent use.
type Space struct {
	store *Store
	vmID  string
	users int // guarded by store.mu

	mu     sync.Mutex
	data   map[string]entry
	size   int               // of data, in bytes; guarded by mu
	queues map[string]*queue // guarded by store.mu
	queued atomic.Int64      // bytes of the names and the items of queues
}

type entry struct {
	value []byte
	cas   uint32
}

// Open returns the space of a vm_id, which may be empty. Every Open needs one
// Release.
func (s *Store) Open(vmID string) *Space {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.spaces == nil {
		s.spaces = make(map[string]*Space)
		s.queues = make(map[uint32]*queue)
	}
	sp := s.spaces[vmID]
	if sp == nil {
		sp = &Space{store: s, vmID: vmID, data: make(map[string]entry), queues: make(map[string]*queue)}
		s.spaces[vmID] = sp
	}
	sp.users++
	return sp
}

// Release ends one use of the space. The last Release drops its data and queues.
func (sp *Space) Release() {
	s := sp.store
	s.mu.Lock()
	defer s.mu.Unlock()
	sp.users--
	if sp.users > 0 {
		return
	}
	delete(s.spaces, sp.vmID)
	for _, q := range sp.queues {
		delete(s.queues, q.id)
	}
	for _, q := range s.queues {
		delete(q.senders, sp.vmID)
	}
}

// Get returns the value of a key and its cas, which is never 0. NotFound: there
// is no such key. The value must not be changed.
func (sp *Space) Get(key string) (value []byte, cas uint32, status host.Status) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	e, ok := sp.data[key]
	if !ok {
		return nil, 0, host.NotFound
	}
	return e.value, e.cas, host.OK
}

// Set stores a copy of value. A cas of 0 always writes. Any other cas must
// equal that of the existing value, else Set returns CASMismatch. A new key is
// written with any cas. InternalFailure: the space is full.
func (sp *Space) Set(key string, value []byte, cas uint32) host.Status {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	old, there := sp.data[key]
	if there && cas != 0 && cas != old.cas {
		return host.CASMismatch
	}
	size := sp.size + len(value) - len(old.value)
	if !there {
		size += len(key) + itemCost
	}
	if size > MaxData || !there && len(sp.data) >= maxNames {
		return host.InternalFailure
	}
	sp.size = size
	sp.data[key] = entry{append([]byte(nil), value...), sp.store.nextCAS()}
	return host.OK
}

// nextCAS counts writes and skips 0 when the counter wraps around.
func (s *Store) nextCAS() uint32 {
	for {
		if cas := s.cas.Add(1); cas != 0 {
			return cas
		}
	}
}
