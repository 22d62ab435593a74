package core

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// BlockName is a block's hash in the engine's KV events. Each engine uses its
// own digest, which differs from the cache's own BlockHash.
type BlockName [32]byte

// Naming is how an engine names blocks in its events.
type Naming interface {
	// Root is the name before the first block of a salt's prefix chains.
	Root(salt string) BlockName
	// Next returns the name of a block of tokens after the block named parent. first:
	// there is no block before it. hash is the cache's own.
	Next(parent BlockName, first bool, salt string, tokens []Token, hash BlockHash) BlockName
}

// Kinds of KVEvent.
type kvEventKind uint8

const (
	KVStored kvEventKind = iota
	KVRemoved
	KVCleared
	KVCreated // the creation of a cache, only of TensorRT-LLM
)

// KVEvent is one change of a rank's prefix cache.
type KVEvent struct {
	Kind  kvEventKind
	Names []BlockName
	// The other fields belong to KVStored. tokens are those of all blocks in
	// order; size is the number of tokens of one block. parent is the block
	// before the first one, unless root is set.
	Parent BlockName
	Root   bool
	Tokens []Token
	Size   int
	Salt   string
}

// KVLog collects the changes of a rank's prefix cache until they are published.
// It belongs to the cache and is guarded as that is.
type KVLog struct {
	Naming
	// hits: the engine logs the prefix hits of a sequence again as stored.
	Hits   bool
	Events []KVEvent
}

// stored logs a block. Consecutive blocks of one chain share an event.
func (l *KVLog) stored(parent, b Link, root bool, tokens []Token) {
	if n := len(l.Events); n > 0 {
		last := &l.Events[n-1]
		if last.Kind == KVStored && !root && last.Salt == b.salt && last.Size == len(tokens) &&
			last.Names[len(last.Names)-1] == parent.name {
			last.Names = append(last.Names, b.name)
			last.Tokens = append(last.Tokens, tokens...)
			return
		}
	}
	l.Events = append(l.Events, KVEvent{
		Kind: KVStored, Names: []BlockName{b.name}, Parent: parent.name, Root: root,
		Tokens: slices.Clone(tokens), Size: len(tokens), Salt: b.salt,
	})
}

// removed logs that a block has left the cache.
func (l *KVLog) removed(name BlockName) {
	if n := len(l.Events); n > 0 && l.Events[n-1].Kind == KVRemoved {
		l.Events[n-1].Names = append(l.Events[n-1].Names, name)
		return
	}
	l.Events = append(l.Events, KVEvent{Kind: KVRemoved, Names: []BlockName{name}})
}

// kvSink receives the changes of a rank's prefix cache after each step of the
// scheduler. It is called with the rank's mutex held and does not block.
type kvSink interface {
	Publish(rank int, events []KVEvent)
}

// announce publishes the changes of the cache. The caller holds mu.
func (r *Rank) announce() {
	if l := r.Cache.Log; l != nil && len(l.Events) > 0 {
		r.Engine.kvSink.Publish(r.Index, l.Events)
		l.Events = nil
	}
}

// LogKV starts to publish the changes of every rank's prefix cache through sink.
func (e *Engine) LogKV(sink kvSink, names Naming, hits bool) {
	e.kvSink = sink
	for _, r := range e.Ranks {
		r.Cache.Log = &KVLog{Naming: names, Hits: hits}
	}
}

// ResetCache empties the prefix cache of every rank. It returns false when a
// rank has blocks in use: that rank keeps its cache.
func (e *Engine) ResetCache() bool {
	done := true
	for _, r := range e.Ranks {
		r.Mu.Lock()
		done = r.Cache.Clear() && done
		r.announce()
		r.Mu.Unlock()
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

// KVFault is the fault of the next batches. It is safe for concurrent use.
type KVFault struct {
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
		e.KVFault.set(kind, batches)
	}
	if e.Publishers != nil {
		for _, p := range e.Publishers.List {
			if len(ranks) == 0 || slices.Contains(ranks, p.rank) {
				p.fault.set(kind, batches)
				p.wake()
			}
		}
	}
	return nil
}

func (f *KVFault) set(kind string, batches int) {
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

// Draw returns the fault of the next batch. It is empty without a fault, and
// for a batch that is only delayed.
func (f *KVFault) Draw() string {
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

// Garbles reports whether the answer of a poll is garbage. Such a poll counts
// as one batch.
func (f *KVFault) Garbles() bool {
	f.mu.Lock()
	polled := f.kind == KVEventsGarbage
	f.mu.Unlock()
	return polled && f.Draw() == KVEventsGarbage
}

// Stopped reports whether deliveries are stopped now.
func (f *KVFault) Stopped() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.kind == KVEventsStop && f.left != 0
}
