// Package gaps learns how long conversations pause: the times between the end of a turn and the
// arrival of the next turn, and the turns after which none came. A table has these for each
// conversation, for each tool that an answer called, and for all turns. Answers that ended with a
// call of a tool and other answers count apart.
//
// A table does no I/O, has no clock of its own and is safe for concurrent use.
//
// The decisions behind this package are in docs/design/attempt.md.
package gaps

import (
	"slices"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/pdproxy/pdproxy/abi"
)

const (
	// MaxConversations and MaxTools bound the conversations and the tools of a table. Each takes
	// at most 400 bytes.
	MaxConversations = 16 << 10
	MaxTools         = 1 << 10
	// MaxNames is the number of tools of one answer that count.
	MaxNames = 4
	// maxName bounds the bytes of a tool's name that count.
	maxName = 128
)

// Ending is how the answer of a turn ended. Its zero value is an answer without a call of a tool.
type Ending struct {
	ToolCall bool
	// Tools are hashes of the names of the called tools, in ascending order and at most MaxNames.
	// The names are data of the client.
	Tools []uint64
}

// Call adds a call of the tool of that name; "": the name is unknown.
func (e *Ending) Call(tool []byte) {
	e.ToolCall = true
	if len(tool) == 0 || len(e.Tools) == MaxNames {
		return
	}
	hash := xxh3.Hash(tool[:min(len(tool), maxName)])
	if i, found := slices.BinarySearch(e.Tools, hash); !found {
		e.Tools = slices.Insert(e.Tools, i, hash)
	}
}

// Turn is a turn that has ended.
type Turn struct {
	Conversation uint64 // ConversationOf its name
	Ending
}

// ConversationOf returns the number of a conversation by its name in a scope; 0 for "", which is
// no conversation.
func ConversationOf(scope, name string) uint64 {
	if name == "" {
		return 0
	}
	return max(1, xxh3.HashStringSeed(name, xxh3.HashString(scope)))
}

// A histogram halves its counts when their sum reaches its limit, so that old turns count less.
const (
	limitOfConversation = 32
	limitOfTool         = 256
	limitOfAll          = 1024
)

// Table has the gaps of one deployment.
type Table struct {
	mu            sync.Mutex
	all           endings        // guarded by mu
	conversations lru[endings]   // guarded by mu
	tools         lru[histogram] // guarded by mu
}

// endings has the histograms of turns without and with a call of a tool.
type endings [2]histogram

func (e *endings) of(toolCall bool) *histogram {
	if toolCall {
		return &e[1]
	}
	return &e[0]
}

// New returns an empty table.
func New() *Table {
	return &Table{conversations: newLRU[endings](MaxConversations), tools: newLRU[histogram](MaxTools)}
}

// Returned records that the next turn of a conversation arrived that long after the end of t.
func (t *Table) Returned(turn Turn, gap time.Duration) { t.record(turn, bucketOf(gap)) }

// Lost records that no next turn came in the time for which an engine would retain the KV.
func (t *Table) Lost(turn Turn) { t.record(turn, lost) }

func (t *Table) record(turn Turn, bucket int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all.of(turn.ToolCall).add(bucket, limitOfAll)
	if turn.Conversation != 0 {
		t.conversations.use(turn.Conversation).of(turn.ToolCall).add(bucket, limitOfConversation)
	}
	for _, tool := range turn.Tools {
		t.tools.use(tool).add(bucket, limitOfTool)
	}
}

// Facts sets the gaps of f to those of turns like this one. An answer that called several tools
// has the gaps of the tool whose 90th percentile is the longest, because the next turn needs the
// results of all tools.
func (t *Table) Facts(turn Turn, f *abi.RetainFacts) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f.ToolCall, f.Conversation, f.Tools = turn.ToolCall, abi.Gaps{}, abi.Gaps{}
	f.All = t.all.of(turn.ToolCall).gaps()
	if e := t.conversations.find(turn.Conversation); e != nil {
		f.Conversation = e.of(turn.ToolCall).gaps()
	}
	for _, tool := range turn.Tools {
		if h := t.tools.find(tool); h != nil {
			if g := h.gaps(); f.Tools.Turns == 0 || g.P90 > f.Tools.P90 {
				f.Tools = g
			}
		}
	}
}
