package attempt

import (
	"bytes"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/continuation"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// ringSize is the memory for the last events of a stream, in bytes: a dozen events or more. The seam of
// a stream with stop strings may lie further back, and log probabilities make events long: the
// memory is longRing then.
const ringSize, longRing = 4 << 10, 16 << 10

// Kept is what the proxy keeps of an open stream, so that another engine can go on with it when its
// engine fails, and so that the next turn can use the KV that decode retains (Turn). The exchange makes
// it before the first leg, and calls Resume before each leg that continues the stream. The goroutine of
// the exchange owns it, except open.
type Kept struct {
	Dialect tokens.Dialect // of the engines
	Limit   int            // of IDs
	Given   bool           // the client gets the ids too
	Moves   bool           // the proxy may leave an unresponsive engine
	Turn    bool           // decode retains the KV, and the ids prove to which text it belongs

	// Reason is why the stream cannot be continued any more; "": it can be. The ids are dropped then,
	// unless Turn needs them.
	Reason continuation.Reason
	IDs    []uint32  // those of the prompt, once Load has returned true, and of the answer
	Prompt int       // how many ids the prompt has
	Stub   []byte    // the body of the request without its prompt
	Last   time.Time // when the client got the last event

	// unproven is why the ids are not kept for the next turn, as a reason of a fallback; "": they are, if
	// Turn is set. The store of retained KV needs scope and name of the client's request, whose body is
	// released when the answer begins.
	unproven, scope, name string

	client  *downstream.Client // which counts all memory before it is allocated
	list    []byte             // the ids of the prompt as the engine of the first leg wrote them; nil: they have not come
	found   bool               // they have come in the running leg
	loaded  bool               // IDs begin with those of the prompt
	counted int                // bytes of list, IDs, Stub and again
	tools   bool
	content bool // the answer is inside its content
	ring    *buffer.Buffer
	written int64 // bytes, of which the ring has the last ones
	before  int64 // of them, those before the content

	splicer  *continuation.Splicer // of the leg that continues the stream; nil: it is the first leg
	same     bool                  // the engine of the leg has the prompt that it was sent
	drop     int                   // ids that the leg generates again
	again    []uint32              // those that it has generated, until its first event is relayed
	began    bool                  // an event of the leg has been relayed
	spliced  []byte                // memory for its events
	splicing int                   // bytes that are counted to splice them

	open atomic.Uint32 // one of the constants below
}

// The states of a stream, for the goroutine that gives up the calls of an unresponsive engine.
const (
	notOpen   = 0
	isOpen    = 1
	isMovable = 2 // another engine could go on now
	hasTail   = 3 // and the ring has enough content to find the seam
)

// tailSize is the number of bytes of events with content, in a leg, behind which a seam is found
// unless the engines differ: some events, each with a token and some letters.
const tailSize = ringSize / 2

// End frees the memory. It may be called again.
func (k *Kept) End() {
	k.free()
	k.endSplicing()
}

// free frees what only another engine and the next turn need.
func (k *Kept) free() {
	k.ring.Free()
	k.release(k.counted)
	k.ring, k.IDs, k.list, k.Stub, k.again = nil, nil, nil, nil, nil
}

// holds reports whether the ids are kept.
func (k *Kept) holds() bool { return k.Reason == "" || k.Turn && k.unproven == "" }

// reserve counts n bytes before they are allocated. It returns false if there is no room: the stream is
// not kept any more then.
func (k *Kept) reserve(n int) bool {
	if k.client.TakeMemory(int64(n)) != nil {
		k.Lose(continuation.Memory)
		return false
	}
	k.counted += n
	return true
}

// release gives back n bytes of reserve.
func (k *Kept) release(n int) {
	if n > 0 {
		k.client.ReleaseMemory(int64(n))
		k.counted -= n
	}
}

// Lose notes why the stream cannot be continued, and drops what is kept, except the ids that Turn
// needs.
func (k *Kept) Lose(reason continuation.Reason) {
	if k.Reason == "" {
		k.Reason = reason
	}
	if k.open.Load() >= isMovable {
		k.open.Store(isOpen)
	}
	switch {
	case k.unproven != "":
	case reason == continuation.NoIDs:
		k.unproven = "no_token_ids"
	case reason == continuation.TooLong || reason == continuation.Memory:
		k.unproven = string(reason)
	}
	if !k.holds() {
		k.free()
		return
	}
	k.ring.Free()
	k.release(cap(k.Stub) + 4*cap(k.again))
	k.ring, k.Stub, k.again = nil, nil, nil
}

// Output returns the number of kept ids of the answer.
func (k *Kept) Output() int {
	if !k.loaded {
		return len(k.IDs)
	}
	return max(0, len(k.IDs)-k.Prompt)
}

// Load puts the ids of the prompt before those of the answer. Until then they are text, because few
// streams break, and to read the ids of a long prompt takes longer than the rest of a request. It returns
// false if the text is no list of ids, or if there is no memory.
func (k *Kept) Load() bool {
	if k.loaded {
		return k.holds()
	}
	room := k.Prompt + len(k.IDs)
	if !k.reserve(4 * room) {
		return false
	}
	all, ok := continuation.ReadIDs(make([]uint32, 0, room), k.list)
	if !ok || len(all) != k.Prompt {
		k.Lose(continuation.NoIDs)
		return false
	}
	k.release(len(k.list) + 4*cap(k.IDs))
	k.IDs, k.list, k.loaded = append(all, k.IDs...), nil, true
	return true
}

// restart prepares for the head of another leg. The leg before it has failed before its content, or
// has broken off.
func (k *Kept) restart() {
	k.found, k.same = false, false
	if !k.Continued() {
		k.free()
		k.Prompt = 0
	}
}

// take looks for the ids of the prompt in head, the start of an answer for c, and removes them from head
// unless the client wants them. It copies the ids of the first leg, and compares those of a leg that
// continues the stream.
func (k *Kept) take(c *downstream.Client, head *buffer.Buffer) {
	if k.found {
		return
	}
	list := continuation.FindPrompt(head.B)
	if list == nil {
		return
	}
	k.found, k.client = true, c
	switch n := continuation.MaxIDs(list); {
	case !k.holds():
	case k.Continued():
		k.same = continuation.SameIDs(list, k.Sent())
	case n > k.Limit:
		k.Lose(continuation.TooLong)
	case k.reserve(len(list)):
		k.list, k.Prompt = append(make([]byte, 0, len(list)), list...), n
	}
	if !k.Given || k.Continued() {
		head.B = continuation.CutPrompt(head.B)
	}
}

// begin keeps the prompt of the first leg. take has seen the start of its answer.
func (k *Kept) begin(c *downstream.Client, r *openai.Request) {
	k.client, k.tools = c, r.Tools()
	k.content = r.API != openai.Chat
	if !k.holds() {
		return
	}
	switch {
	case r.API == openai.VLLMGenerate:
		k.readPrompt(r)
	case r.API == openai.Chat && continuation.Harmony(k.list):
		k.Lose(continuation.Reasoning)
	}
	if k.Prompt == 0 {
		k.Lose(continuation.NoIDs)
	}
	room := continuation.StubRoom(r)
	if k.Reason != "" || !k.reserve(room) {
		return
	}
	k.Stub = continuation.Stub(make([]byte, 0, room), r)
	var err error
	if k.ring, err = c.Buffer(ringOf(r)); err != nil {
		k.Lose(continuation.Memory)
	}
}

// readPrompt keeps the ids of the prompt that the client sent.
func (k *Kept) readPrompt(r *openai.Request) {
	n := r.MaxTokenIDs()
	if n > k.Limit {
		k.Lose(continuation.TooLong)
		return
	}
	if !k.reserve(4 * n) {
		return
	}
	var err error
	if k.IDs, err = r.AppendTokenIDs(make([]uint32, 0, n)); err != nil {
		k.Lose(continuation.NoIDs)
		return
	}
	k.Prompt, k.loaded = len(k.IDs), true
}

// ringOf returns the size of the ring for the stream of a request.
func ringOf(r *openai.Request) int {
	for _, key := range [...]string{"logprobs", "stop"} {
		if v, _ := r.Get(key); !openai.IsNull(v) && string(v) != "false" {
			return longRing
		}
	}
	return ringSize
}

var toolCalls = []byte(`"tool_calls":[{`)

// keep keeps the ids of events that the client gets, and removes them from the events.
func (k *Kept) keep(events []byte) []byte {
	if k.Reason == "" {
		k.follow(events)
	}
	if !k.holds() {
		if !k.Given {
			events = continuation.Strip(events)
		}
		return events
	}
	rest, ids, ok := continuation.Cut(events, k.IDs, k.Given, k)
	if !ok {
		k.Lose(continuation.NoIDs) // unless Grow has another reason
		return k.keep(rest)
	}
	if k.IDs = ids; k.Prompt+k.Output() > k.Limit {
		k.Lose(continuation.TooLong)
	}
	return rest
}

// follow keeps what another engine needs of events, beside their ids.
func (k *Kept) follow(events []byte) {
	if k.tools && bytes.Contains(events, toolCalls) {
		k.Lose(continuation.ToolCalls)
		return
	}
	if !k.content {
		k.content, k.before = hasContent(events), k.written
	}
	switch open := k.open.Load(); {
	case !k.content:
	case k.written-k.before >= tailSize && (open == isOpen || open == isMovable):
		k.open.Store(hasTail)
	case k.Moves && open == isOpen:
		k.open.Store(isMovable)
	}
	k.remember(events)
}

// Grow implements continuation.Room.
func (k *Kept) Grow(ids []uint32, n int) []uint32 {
	if len(ids)+n > k.Limit {
		k.Lose(continuation.TooLong)
		return nil
	}
	room := max(len(ids)+n, min(k.Limit, cap(ids)+max(16, cap(ids)/2)))
	if !k.reserve(4 * room) {
		return nil
	}
	k.release(4 * cap(ids))
	return append(make([]uint32, 0, room), ids...)
}

var contentMember = []byte(`"content":"`)

// hasContent reports whether a delta of a chat in whole events has content. A delta before that may
// have reasoning.
func hasContent(events []byte) bool {
	for {
		i := bytes.Index(events, contentMember)
		if i < 0 {
			return false
		}
		events = events[i+len(contentMember):]
		if len(events) > 0 && events[0] != '"' {
			return true
		}
	}
}

// remember writes events into the ring.
func (k *Kept) remember(events []byte) {
	ring := k.ring.B[:cap(k.ring.B)]
	if n := len(events) - len(ring); n > 0 {
		k.written += int64(n)
		events = events[n:]
	}
	at := int(k.written % int64(len(ring)))
	n := copy(ring[at:], events)
	copy(ring, events[n:])
	k.written += int64(len(events))
}

// Tail returns the last events, which begin at an event border. all: they are all events of the leg.
func (k *Kept) Tail() (events []byte, all bool) {
	if k.ring == nil {
		return nil, false
	}
	ring := k.ring.B[:cap(k.ring.B)]
	if k.written <= int64(len(ring)) {
		return bytes.Clone(ring[:k.written]), true
	}
	at := k.written % int64(len(ring))
	events = append(bytes.Clone(ring[at:]), ring[:at]...)
	return events[openai.EventEnd(events):], false
}

// opened reports whether the client has the begin of the running leg's answer. Safe for concurrent
// use; k may be nil.
func (k *Kept) opened() bool { return k != nil && k.open.Load() != notOpen }

// movable reports whether another engine could go on now. Safe for concurrent use.
func (k *Kept) movable() bool { return k.Moves && k.open.Load() >= isMovable }

// tailed reports whether another engine could surely go on now. Safe for concurrent use; k may be
// nil.
func (k *Kept) tailed() bool { return k != nil && k.open.Load() == hasTail }
