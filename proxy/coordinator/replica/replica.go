// Package replica copies the homes of conversations from the leading coordinator to the
// standbys. A standby requests the changes since its last request. The leader answers
// from its table and keeps no state for each standby. So both hold at most one batch. A
// new, slow or reconnected standby sends the same kind of request.
//
// # What is copied
//
// The keys, turns and homes of all conversations. Each coordinator has its own numbers
// for instances, so the messages contain the names of instances. The values that policies
// keep for conversations are not copied: they are lost at a failover, as they may be at
// any time. If a leader dies, the turns of the last tenth of a second are lost too.
//
// The decisions behind this package are in docs/design/fleet.md.
package replica

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

const (
	// most is the largest number of conversations in an answer. The table's Record waits
	// while an answer is made.
	most = 1000
	// MaxAnswer is the largest answer in bytes.
	MaxAnswer = 1 << 20
	// every is the time between two questions of a standby that is up to date.
	every = 100 * time.Millisecond
	// again is the pause after a failed request to the leader.
	again = 500 * time.Millisecond
	// maxNames bounds the names of instances that a standby stores.
	maxNames = 1 << 16
)

// Source answers standbys from a table. Safe for concurrent use.
type Source struct {
	id    uint64 // number of this leader's table; the changes of another table have other numbers
	table *conversation.Table
	name  func(instance uint32) string
	pool  sync.Pool // of *[]conversation.Entry
}

// NewSource returns the source of a table. name returns the name of an instance, "" if
// the instance has left.
func NewSource(table *conversation.Table, name func(instance uint32) string) *Source {
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	return &Source{
		id: binary.LittleEndian.Uint64(id[:]), table: table, name: name,
		pool: sync.Pool{New: func() any { return new([]conversation.Entry) }},
	}
}

// Answer appends the answer to a question; more: there may be further changes.
func (s *Source) Answer(dst, question []byte) (answer []byte, more bool, err error) {
	of, since, err := readQuestion(question)
	if err != nil {
		return dst, false, err
	}
	if of != s.id {
		since = 0
	}
	batch := s.pool.Get().(*[]conversation.Entry)
	defer s.pool.Put(batch)
	*batch, since = s.table.Changes((*batch)[:0], since, most)
	return appendAnswer(dst, s.id, since, *batch, s.name), len(*batch) > 0, nil
}

// Copy is the table of a standby that follows a leader's table. Between Follow and Lead
// nothing else uses the table.
type Copy struct {
	table   *conversation.Table
	of      uint64 // id of the leader's table in the last answer
	since   uint64
	numbers map[string]uint32 // numbers of instance names while the copy follows a leader
	names   []string          // by number
	batch   []conversation.Entry

	mu     sync.Mutex
	inStep bool // guarded by mu
}

// NewCopy returns a Copy that writes to table.
func NewCopy(table *conversation.Table) *Copy {
	return &Copy{table: table, numbers: map[string]uint32{}}
}

// Follow begins to follow a leader. The table's own entries stay until the leader has
// newer entries. name returns the name of an entry's instance, "" if the instance has
// left.
func (c *Copy) Follow(name func(instance uint32) string) {
	c.of, c.since = 0, 0
	c.step(false)
	c.table.Renumber(func(n uint32) uint32 { return c.number(name(n)) })
}

// Lead ends the standby state. It replaces the copy's numbers of the homes' instances by
// the numbers that number returns for their names.
func (c *Copy) Lead(number func(name string) uint32) {
	known := make([]uint32, len(c.names))
	for i, name := range c.names {
		known[i] = number(name)
	}
	c.table.Renumber(func(n uint32) uint32 {
		if n == 0 || n > uint32(len(known)) { // not a number of this copy
			return 0
		}
		return known[n-1]
	})
	clear(c.numbers)
	c.names = c.names[:0]
}

// number returns the number of a name; 0: no name, or too many names.
func (c *Copy) number(name string) uint32 {
	if n := c.numbers[name]; n != 0 || name == "" || len(c.names) == maxNames {
		return n
	}
	c.names = append(c.names, name)
	n := uint32(len(c.names))
	c.numbers[name] = n
	return n
}

// Question appends the next question to the leader.
func (c *Copy) Question(dst []byte) []byte { return appendQuestion(dst, c.of, c.since) }

// Take applies an answer; more: the leader has further changes.
func (c *Copy) Take(answer []byte) (more bool, err error) {
	of, until, entries, err := c.readAnswer(answer)
	if err != nil {
		return false, err
	}
	c.table.Take(entries)
	c.of, c.since = of, until
	more = len(entries) > 0
	if !more {
		c.step(true)
	}
	return more, nil
}

// InStep reports whether the copy has had all changes of the leader at least once since
// Follow.
func (c *Copy) InStep() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.inStep
}

func (c *Copy) step(in bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inStep = in
}

// Run sends requests to the leader until ctx ends. ask sends one request and returns the
// answer. failed is called once for each series of failures.
func (c *Copy) Run(ctx context.Context, ask func(ctx context.Context, question []byte) (answer []byte, err error), failed func(error)) {
	var question []byte
	fails := false
	for ctx.Err() == nil {
		question = c.Question(question[:0])
		answer, err := ask(ctx, question)
		more := false
		if err == nil {
			more, err = c.Take(answer)
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil && !fails {
			failed(fmt.Errorf("follow the leader's conversations: %w", err))
		}
		switch fails = err != nil; {
		case fails:
			pause(ctx, again)
		case !more:
			pause(ctx, every)
		}
	}
}

// pause waits, unless ctx ends before.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
