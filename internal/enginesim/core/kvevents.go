package enginesim

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// blockName is a block's hash in the engine's KV events. Each engine uses its
// own digest, which differs from the cache's own blockHash.
type blockName [32]byte

// naming is how an engine names blocks in its events.
type naming interface {
	// root is the name before the first block of a salt's prefix chains.
	root(salt string) blockName
	// next returns the name of a block of tokens after the block named parent. first:
	// there is no block before it. hash is the cache's own.
	next(parent blockName, first bool, salt string, tokens []token, hash blockHash) blockName
}

// Kinds of kvEvent.
type kvEventKind uint8

const (
	kvStored kvEventKind = iota
	kvRemoved
	kvCleared
	kvCreated // the creation of a cache, only of TensorRT-LLM
)

// kvEvent is one change of a rank's prefix cache.
type kvEvent struct {
	kind  kvEventKind
	names []blockName
	// The other fields belong to kvStored. tokens are those of all blocks in
	// order; size is the number of tokens of one block. parent is the block
	// before the first one, unless root is set.
	parent blockName
	root   bool
	tokens []token
	size   int
	salt   string
}

// kvLog collects the changes of a rank's prefix cache until they are published.
// It belongs to the cache and is guarded as that is.
type kvLog struct {
	naming
	// hits: the engine logs the prefix hits of a sequence again as stored.
	hits   bool
	events []kvEvent
}

// stored logs a block. Consecutive blocks of one chain share an event.
func (l *kvLog) stored(parent, b link, root bool, tokens []token) {
	if n := len(l.events); n > 0 {
		last := &l.events[n-1]
		if last.kind == kvStored && !root && last.salt == b.salt && last.size == len(tokens) &&
			last.names[len(last.names)-1] == parent.name {
			last.names = append(last.names, b.name)
			last.tokens = append(last.tokens, tokens...)
			return
		}
	}
	l.events = append(l.events, kvEvent{
		kind: kvStored, names: []blockName{b.name}, parent: parent.name, root: root,
		tokens: slices.Clone(tokens), size: len(tokens), salt: b.salt,
	})
}

// removed logs that a block has left the cache.
func (l *kvLog) removed(name blockName) {
	if n := len(l.events); n > 0 && l.events[n-1].kind == kvRemoved {
		l.events[n-1].names = append(l.events[n-1].names, name)
		return
	}
	l.events = append(l.events, kvEvent{kind: kvRemoved, names: []blockName{name}})
}

// kvSink receives the changes of a rank's prefix cache after each step of the
// scheduler. It is called with the rank's mutex held and does not block.
type kvSink interface {
	publish(rank int, events []kvEvent)
}

// announce publishes the changes of the cache. The caller holds mu.
func (r *rank) announce() {
	if l := r.cache.log; l != nil && len(l.events) > 0 {
		r.e.kvSink.publish(r.index, l.events)
		l.events = nil
	}
}

// logKV starts to publish the changes of every rank's prefix cache through sink.
func (e *Engine) logKV(sink kvSink, names naming, hits bool) {
	e.kvSink = sink
	for _, r := range e.ranks {
		r.cache.log = &kvLog{naming: names, hits: hits}
	}
}

// resetCache empties the prefix cache of every rank. It returns false when a
// rank has blocks in use: that rank keeps its cache.
func (e *Engine) resetCache() bool {
	done := true
	for _, r := range e.ranks {
		r.mu.Lock()
		done = r.cache.clear() && done
		r.announce()
		r.mu.Unlock()
	}
	return done
}

// The faults for batches of KV events, see Engine.SetKVEventFault.
const (
	// KVEventsDrop does not send a batch to the subscribers; a replay contains it.
	KVEventsDrop = "drop"
	// KVEventsLose keeps a batch from subscribers and from replays.
	KVEventsLose = "lose"
	// KVEventsReorder delivers a batch after the one that follows it.
	KVEventsReorder = "reorder"
	// KVEventsGarbage delivers malformed bytes in place of a batch.
	KVEventsGarbage = "garbage"
	// KVEventsStop delivers nothing and answers no replay. The held batches are
	// sent when the fault ends.
	KVEventsStop = "stop"
)

var kvEventFaults = []string{KVEventsDrop, KVEventsLose, KVEventsReorder, KVEventsGarbage, KVEventsStop}

// kvFault is the fault of the next batches. It is safe for concurrent use.
type kvFault struct {
	mu   sync.Mutex
	kind string
	left int // number of batches; negative: all
}

// SetKVEventFault sets the fault of the next batches of KV events, one of the
// KVEvents constants, and ends the previous fault. Negative batches: until the
// next call. An empty kind: no fault. [KVEventsStop] always lasts until the
// next call. A batch holds the changes of one step of the scheduler. For
// trtllm, garbage applies to a whole poll. Each publisher counts its own batches. With ranks, the
// fault is that of the publishers of these
// ranks only.
func (e *Engine) SetKVEventFault(kind string, batches int, ranks ...int) error {
	if err := checkKVEventFault(kind); err != nil {
		return err
	}
	if len(ranks) == 0 {
		e.kvFault.set(kind, batches)
	}
	if e.publishers != nil {
		for _, p := range e.publishers.list {
			if len(ranks) == 0 || slices.Contains(ranks, p.rank) {
				p.fault.set(kind, batches)
				p.wake()
			}
		}
	}
	return nil
}

func (f *kvFault) set(kind string, batches int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.kind, f.left = kind, batches
}

func checkKVEventFault(kind string) error {
	if kind != "" && !slices.Contains(kvEventFaults, kind) {
		return fmt.Errorf("fault kv_events: %q is not one of %s", kind, strings.Join(kvEventFaults, ", "))
	}
	return nil
}

// parseKVEventFault reads "KIND:BATCHES", or "KIND" for all batches.
func parseKVEventFault(text string) (kind string, batches int, err error) {
	kind, digits, counted := strings.Cut(text, ":")
	if !counted {
		return kind, -1, nil
	}
	if batches, err = strconv.Atoi(digits); err != nil || batches < 0 {
		return "", 0, fmt.Errorf("fault kv_events: %q is not KIND:BATCHES", text)
	}
	return kind, batches, nil
}

// draw returns the fault of the next batch. It is empty without a fault, and
// for a batch that is only delayed.
func (f *kvFault) draw() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.left == 0 || f.kind == "" {
		return ""
	}
	if f.kind == KVEventsStop {
		return ""
	}
	if f.left > 0 {
		f.left--
	}
	return f.kind
}

// garbles reports whether the answer of a poll is garbage. Such a poll counts
// as one batch.
func (f *kvFault) garbles() bool {
	f.mu.Lock()
	polled := f.kind == KVEventsGarbage
	f.mu.Unlock()
	return polled && f.draw() == KVEventsGarbage
}

// stopped reports whether deliveries are stopped now.
func (f *kvFault) stopped() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.kind == KVEventsStop && f.left != 0
}
