// Package replica keeps the homes of conversations of the coordinator that leads
// in those that stand by. A standby asks again and again for what has changed
// since its last question; the leader answers from its table and keeps nothing of
// who asks. So neither holds more than one batch, and a standby that was away, is
// slow or is new asks from where it was.
//
// # What stands by
//
// The keys, turns and homes of all conversations. Homes are of instances, which
// every coordinator numbers for itself: on the way they have names. The values
// that policies keep of conversations stay behind: after a fail-over they are
// forgotten, as they may be at any time. So are, when a leader dies, the turns of
// its last tenth of a second.
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
	// most is how many conversations an answer has at most: Record waits that
	// long for the table.
	most = 1000
	// MostAnswer is the most bytes of an answer.
	MostAnswer = 1 << 20
	// every is the time between two questions of a standby that has it all.
	every = 100 * time.Millisecond
	// again is the time until a question that failed is asked once more.
	again = 500 * time.Millisecond
	// mostNames is how many instances a standby has homes on, of all that there
	// ever were.
	mostNames = 1 << 16
)

// Source answers standbys with what is in a table. Its methods are safe for
// concurrent use.
type Source struct {
	id    uint64 // of this leader's table: another's changes have other numbers
	table *conversation.Table
	name  func(instance uint32) string
	pool  sync.Pool // of *[]conversation.Entry
}

// NewSource returns the source of a table. name gives the name of an instance,
// "" for one that is gone.
func NewSource(table *conversation.Table, name func(instance uint32) string) *Source {
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	return &Source{
		id: binary.LittleEndian.Uint64(id[:]), table: table, name: name,
		pool: sync.Pool{New: func() any { return new([]conversation.Entry) }},
	}
}

// Answer appends the answer to a standby's question; more says that there may be
// something to ask for after it.
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

// Copy is the table of a standby, as it follows a leader's. Between Follow and
// Lead the table is nobody else's.
type Copy struct {
	table   *conversation.Table
	of      uint64 // the leader's table of the last answer
	since   uint64
	numbers map[string]uint32 // of the names that homes have while it stands by
	names   []string          // by number
	batch   []conversation.Entry

	mu     sync.Mutex
	inStep bool // guarded by mu
}

// NewCopy returns the copy that a table is made.
func NewCopy(table *conversation.Table) *Copy {
	return &Copy{table: table, numbers: map[string]uint32{}}
}

// Follow begins to stand by. What the table has of its own stays until the leader
// has newer; name gives the names of the instances it is about, "" for one that
// is gone.
func (c *Copy) Follow(name func(instance uint32) string) {
	c.of, c.since = 0, 0
	c.step(false)
	c.table.Renumber(func(n uint32) uint32 { return c.number(name(n)) })
}

// Lead ends standing by: homes are on the instances that have their names.
// number is 0 for a name that no instance has.
func (c *Copy) Lead(number func(name string) uint32) {
	known := make([]uint32, len(c.names))
	for i, name := range c.names {
		known[i] = number(name)
	}
	c.table.Renumber(func(n uint32) uint32 {
		if n == 0 || n > uint32(len(known)) { // it is none of the copy's
			return 0
		}
		return known[n-1]
	})
	clear(c.numbers)
	c.names = c.names[:0]
}

// number is that of a name; 0 for none and for one too many.
func (c *Copy) number(name string) uint32 {
	if n := c.numbers[name]; n != 0 || name == "" || len(c.names) == mostNames {
		return n
	}
	c.names = append(c.names, name)
	n := uint32(len(c.names))
	c.numbers[name] = n
	return n
}

// Question appends what the leader is to be asked.
func (c *Copy) Question(dst []byte) []byte { return appendQuestion(dst, c.of, c.since) }

// Take takes in the answer; more says that the leader has more to tell.
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

// InStep reports whether the leader has had nothing more to tell since Follow.
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

// Run stands by until ctx ends: ask carries a question to the leader. failed is
// told once of each time that it cannot be asked, or answers nonsense.
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
